"""`decode` and `repeat-image`: rounds in turns, exact rates, and the rival's process."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

from benchmarks import cli
from benchmarks.chat.distribution import Size
from benchmarks.decode_http import DecodeOptions, figure_of, measure, run_of
from benchmarks.repeat_image import RepeatOptions, requests_of
from benchmarks.rivals.transformers_serve import RivalFailed, TransformersServe
from benchmarks.wire.chat_stream import Failure, StreamChunk, StreamRecord, Usage
from benchmarks.wire.clock import MonotonicClock
from benchmarks.wire.request import RequestShape
from tests.benchmarks.fake_server import Reply, Request, answer, honest, serving, serving_in_thread

SHAPE = RequestShape(None, 3)


def record(start_s: float, times: list[float], tokens: int, failure: Failure | None = None) -> StreamRecord:
    chunks = tuple(StreamChunk(at_s, None) for at_s in times)
    return StreamRecord(
        start_s, times[-1] if times else start_s, chunks, "", "length", Usage(5, tokens), failure
    )


def test_rates_are_exact() -> None:
    run = run_of("a", 0, [record(0.0, [0.5, 1.0, 1.5], 3), record(0.0, [1.0, 1.25, 2.0], 3)], SHAPE)
    assert run.stream_tok_s == (2.0, 2.0)
    assert (run.sum_tok_s, run.ttft_ms, run.failures, run.disobeyed) == (3.0, (500.0, 1000.0), (), 0)


def test_failed_and_short_answers_are_counted_not_averaged() -> None:
    broken = record(0.0, [], 0, Failure("http_status", "", 503))
    run = run_of("a", 0, [record(0.0, [0.5, 1.0], 2), broken], SHAPE)
    assert (run.stream_tok_s, run.sum_tok_s, run.failures, run.disobeyed) == ((2.0,), 2.0, ("http_503",), 1)


def test_figures_are_medians_of_one_server_and_one_number_of_streams() -> None:
    runs = [
        run_of("a", i, [record(0.0, [0.5, 0.5 + gap], 2)], SHAPE) for i, gap in enumerate((0.5, 0.25, 2.0))
    ]
    runs += [
        run_of("b", 0, [record(0.0, [0.5, 9.0], 2)], SHAPE),
        run_of("a", 0, [record(0.0, [7, 9], 2)] * 2, SHAPE),
    ]
    figure = figure_of("a", 1, runs)
    assert (figure.stream_tok_s, figure.sum_tok_s, figure.ttft_ms) == (2.0, 2.0, 500.0)
    assert figure_of("c", 1, runs).stream_tok_s is None


def test_servers_take_turns_with_the_same_prompts_that_never_come_twice() -> None:
    async def scenario() -> None:
        order: list[str] = []

        def noting(name: str):
            def respond(request: Request) -> Reply:
                if request.method == "POST" and "Say something" not in str(request.body):
                    order.append(name)
                return honest(request)

            return respond

        async with serving(noting("a")) as one, serving(noting("b")) as other:
            options = DecodeOptions(
                urls={"a": one.url, "b": other.url},
                streams=(1, 2),
                output_tokens=3,
                repeats=2,
                model=None,
                api_key=None,
                timeout_s=20,
                extra_json=b"{}",
                seed=0,
                floor_tok_s=None,
                command=("x",),
            )
            report = await measure(options, MonotonicClock())
            assert order == ["a", "b", "a", "a", "b", "b"] * 3
            prompts = [[request.body["messages"][0]["content"] for request in s.chats] for s in (one, other)]
            assert sorted(prompts[0]) == sorted(prompts[1])
            assert len(set(prompts[0])) == len(prompts[0])
            assert len(report.runs) == 8  # the warm-up round is not kept
            assert [(figure.server, figure.streams) for figure in report.figures] == [
                ("a", 1),
                ("b", 1),
                ("a", 2),
                ("b", 2),
            ]

    asyncio.run(scenario())


def test_the_decode_command_prints_and_saves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "d.json"
    with serving_in_thread() as server:
        argv = [
            "decode",
            "--url",
            f"ours={server.url}",
            "--output-tokens",
            "3",
            "--repeats",
            "1",
            "--json",
            str(saved),
        ]
        assert cli.main([*argv, "--streams", "1,2", "--ceiling", "99"]) == 0
    written = capsys.readouterr().out
    assert "ours x1" in written
    assert "ours x2" in written
    assert json.loads(saved.read_bytes())["schema"] == "omnistage.bench.decode/1"


def test_a_repeat_shows_one_image_three_times_and_never_again() -> None:
    options = RepeatOptions("u", None, None, 1.0, b"{}", Size(16, 16), 4, 2, 0, 0, ("x",))
    first, second = requests_of(options, 0), requests_of(options, 1)
    assert first == requests_of(options, 0)
    assert list(first) == ["text", "new", "asked", "same"]
    assert first["new"] == first["same"]
    assert first["asked"].images == first["new"].images
    assert first["asked"].text != first["new"].text
    assert not first["text"].images
    assert second["new"].images[0].digest != first["new"].images[0].digest


def test_the_repeat_command_tells_each_kind_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen: set[str] = set()

    def caching(request: Request) -> Reply:
        if request.method == "GET":
            return honest(request)
        body = str(request.body["messages"])
        known = body in seen
        seen.add(body)
        return answer(request.body["max_tokens"], prompt=10, cached=10 if known else 0)

    saved = tmp_path / "r.json"
    with serving_in_thread(caching) as server:
        argv = [
            "repeat-image",
            "--url",
            server.url,
            "--image-size",
            "16",
            "--repeats",
            "2",
            "--json",
            str(saved),
        ]
        assert cli.main(argv) == 0
    report = json.loads(saved.read_bytes())
    assert report["cached_share"] == {"text": 0, "new": 0, "asked": 0, "same": 1}
    assert {kind: one["count"] for kind, one in report["ttft_ms"].items()} == dict.fromkeys(
        report["samples_ms"], 2
    )
    assert "1.00x" in capsys.readouterr().out


def rival(script: str) -> TransformersServe:
    server = TransformersServe(Path("model"))
    server.command = (sys.executable, "-c", script)
    return server


def test_a_rival_is_ready_when_it_says_so_and_gone_when_stopped() -> None:
    server = rival("import signal; print('INFO: Application startup complete.', flush=True); signal.pause()")
    with server:
        process = server._process
        assert process.poll() is None
    assert process.poll() is not None
    assert not server._follower.is_alive()


def test_a_rival_that_dies_gives_its_last_words() -> None:
    with pytest.raises(RivalFailed, match=r"ended before it was ready:\nno such model"):
        rival("print('no such model')").start()


def test_a_rival_that_hangs_is_stopped() -> None:
    server = rival("import signal; print('loading', flush=True); signal.pause()")
    with pytest.raises(RivalFailed, match=r"not ready after 0\.2 s"):
        server.start(timeout_s=0.2)


def test_the_rivals_command_names_its_model_and_port() -> None:
    server = TransformersServe(Path("folder"), options=["--cb-block-size", "32"])
    assert server.command[3:5] == ("serve", "folder")
    assert str(server.port) in server.command
    assert server.command[-2:] == ("--cb-block-size", "32")
