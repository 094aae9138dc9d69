"""`omnistage bench speech`: exact arrival times through the player, and a server that speaks by script."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from benchmarks.rivals.transformers_omni import Speaker, _handler
from benchmarks.speech import command
from benchmarks.speech.command import CHAT_TOKENS, SpeechReport, main
from benchmarks.speech.playback import Packet, play
from benchmarks.speech.stage_seconds import increase, parse_counts, parse_seconds
from contracts.errors import EngineError
from tests.api.serving import running
from tests.api.spoken_fakes import SAMPLE_RATE, SpeakingService, SpeechScript
from tests.tiny_omni import VOICES

RATE = 1000


def pcm(seconds: float, value: int = 20_000) -> bytes:
    return np.full(round(seconds * RATE), value, "<i2").tobytes()


def test_speech_that_comes_in_time_never_stops_the_player() -> None:
    playback = play([Packet(10.5, pcm(1.0)), Packet(11.0, pcm(1.0)), Packet(11.2, pcm(0.5))], 10.0, RATE)
    assert playback is not None
    assert playback.first_packet_s == pytest.approx(0.5)
    assert playback.audible_s == pytest.approx(0.5)
    assert playback.duration_s == pytest.approx(2.5)
    assert playback.underrun_s == 0
    assert playback.rtf == pytest.approx(1.2 / 2.5)


def test_late_packets_stop_the_player_and_are_summed() -> None:
    """It plays 0-1, stands still for 0.5, plays 1.5-2.5, stands still for 0.25."""
    playback = play([Packet(0.0, pcm(1.0)), Packet(1.5, pcm(1.0)), Packet(2.75, pcm(0.1))], -1.0, RATE)
    assert playback is not None
    assert playback.underrun_s == pytest.approx(0.75)
    assert playback.first_packet_s == pytest.approx(1.0)


def test_leading_silence_is_not_heard() -> None:
    silent = pcm(0.3, value=100)
    playback = play([Packet(2.0, silent), Packet(2.1, silent + pcm(0.2))], 1.0, RATE)
    assert playback is not None
    assert playback.first_packet_s == pytest.approx(1.0)
    assert playback.audible_s == pytest.approx(1.6)
    nothing = play([Packet(2.0, silent)], 1.0, RATE)
    assert nothing is not None
    assert nothing.audible_s is None


def test_the_loudest_negative_sample_is_loud_and_samples_may_be_cut() -> None:
    data = np.array([0, -32768, 5], "<i2").tobytes()
    playback = play([Packet(0.0, data[:3]), Packet(0.5, data[3:])], 0.0, RATE)
    assert playback is not None
    assert playback.audible_s == pytest.approx(0.5)
    assert playback.duration_s == pytest.approx(0.003)
    assert play([Packet(0.0, b"x")], 0.0, RATE) is None


def bench(service: SpeakingService, tmp_path: Path, *arguments: str) -> tuple[int, SpeechReport]:
    """The command in a thread, as it runs a loop of its own; the server on this one."""
    result = tmp_path / "report.json"

    async def run() -> int:
        async with running(service) as server:
            argv = ["--url", server.url, "--requests", "4", "--words", "6"]
            argv += ["--sample-rate", str(SAMPLE_RATE), "--json", str(result), *arguments]
            return await asyncio.to_thread(main, argv)

    code = asyncio.run(run())
    return code, msgspec.json.decode(result.read_bytes(), type=SpeechReport)


@pytest.mark.parametrize("arguments", [(), ("--chat", "--concurrency", "2", "--voice", "Ethan")])
def test_a_server_is_measured(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    service = SpeakingService()
    code, report = bench(service, tmp_path, *arguments)
    assert code == 0
    assert report.failures == {}
    assert report.silent == 0
    assert report.options.voice == ("Ethan" if "--voice" in arguments else "Chelsie")
    assert report.first_audible_ms is not None
    assert report.first_audible_ms.count == 4
    assert report.audio_s > 0
    assert len(service.flows) == 5  # with the one that warms up
    if not arguments:
        said = [flow.request.speech.verbatim for flow in service.flows.values()]  # type: ignore[union-attr]
        assert len(set(said)) == 5
    else:  # bounded, or a small model talks to the end of its context
        assert {flow.request.sampling.max_tokens for flow in service.flows.values()} == {CHAT_TOKENS}


@pytest.mark.parametrize("arguments", [(), ("--chat",)])
def test_failures_are_counted_not_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    service = SpeakingService(speech=SpeechScript(error=EngineError("the talker is gone")))
    code, report = bench(service, tmp_path, *arguments)
    assert code == 1
    assert sum(report.failures.values()) == 4
    assert report.first_packet_ms is None
    assert "warning: http" in capsys.readouterr().err


def test_seconds_are_those_of_the_run_by_stage_and_edge() -> None:
    text = (
        "# TYPE omnistage:busy_seconds counter\n"
        'omnistage:busy_seconds_total{model_name="m",stage="talker"} %s\n'
        'omnistage:edge_delivery_seconds_sum{model_name="m",stage="talker->vocoder"} %s\n'
        'omnistage:audio_seconds_total{model_name="m"} 9.0\nvllm:other_seconds_total{stage="x"} 1.0\n'
    )
    text += (
        'omnistage:frames_total{model_name="m",stage="talker"} 7.0\n'
        'omnistage:stage_step_seconds_count{model_name="m",stage="talker"} 3.0\n'
        'omnistage:stage_step_seconds_bucket{le="0.1",model_name="m",stage="talker"} 2.0\n'
    )
    before, after = parse_seconds(text % (1.5, 2.0)), parse_seconds(text % (4.0, 2.0))
    assert before == {"talker busy": 1.5, "talker->vocoder edge delivery": 2.0}
    assert increase(before, after) == {"talker busy": 2.5}
    assert increase({}, after) == after
    assert parse_counts(text % (1.5, 2.0)) == {"talker frames": 7.0, "talker stage step": 3.0}


class _Whole:
    """Says half a second, with a mark on every request."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    def say(self, body: dict[str, Any]) -> tuple[str, bytes]:
        self.asked.append(body)
        return "hm", np.full(SAMPLE_RATE // 2, 9000, "<i2").tobytes()


@contextmanager
def rival(speaker: Any) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(speaker, "whole"))
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        serving.join()
        server.server_close()


def test_a_rival_that_answers_in_one_piece_is_measured_beside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    speaker = _Whole()
    with rival(speaker) as url:

        class Started:
            def __init__(self, model: Path, *, max_frames: int) -> None:
                assert (model.name, max_frames) == ("checkpoint", 7)

            def __enter__(self) -> Any:
                self.url = url
                return self

            def __exit__(self, *_: object) -> None:
                pass

        monkeypatch.setattr(command, "TransformersOmni", Started)
        monkeypatch.setattr(command, "exit_on_sigterm", lambda: None)
        arguments = ("--chat", "--transformers", "checkpoint", "--max-frames", "7")
        code, report = bench(SpeakingService(), tmp_path, *arguments, "--extra-body", '{"max_tokens": 5}')
    assert code == 0
    assert report.rival is not None
    assert report.rival.failures == {}
    assert report.rival.server.model == "whole"
    assert report.rival.audio_s == pytest.approx(4 * 0.5)
    assert len(speaker.asked) == 5
    assert {body["max_tokens"] for body in speaker.asked} == {5}
    assert "transformers, whose answers come whole" in capsys.readouterr().out


def test_the_rival_says_what_the_checkpoint_says(tiny_omni: Callable[..., Path]) -> None:
    speaker = Speaker(tiny_omni("qwen3_omni_moe"), max_frames=4)
    body = {"messages": [{"role": "user", "content": "hello there"}], "max_tokens": 3, "ignore_eos": True}
    text, pcm = speaker.say(body | {"audio": {"voice": VOICES[1]}})
    assert len(pcm) > 0
    assert len(pcm) % 2 == 0
    assert isinstance(text, str)
