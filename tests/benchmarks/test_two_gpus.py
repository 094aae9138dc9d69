"""What the runs on two GPUs make of what they have measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from benchmarks.components import two_gpus
from benchmarks.components.run_processes import Run
from benchmarks.components.run_servers import DEPLOYMENTS, Running, Server
from benchmarks.components.speech_death import report_of
from benchmarks.components.two_gpus import PARTS, common, death_table, measure, tables
from benchmarks.components.two_gpus_servers import CHAT, SPEECH, TOGETHER
from benchmarks.speech.listen import Heard
from benchmarks.speech.playback import Packet
from benchmarks.wire.chat_stream import Failure

PCM = np.full(2400, 3000, "<i2").tobytes()  # 0.1 s


def heard(*times_s: float, failure: Failure | None = None, started_s: float = 0.0) -> Heard:
    return Heard(started_s, tuple(Packet(at_s, PCM) for at_s in times_s), failure)


def test_the_pause_is_the_longest_gap_from_the_kill_on_of_streams_that_sounded() -> None:
    streams = [
        heard(1.0, 1.9, 2.1, 2.5),  # 0.4 s: what was under way came first
        heard(0.5, 3.0),  # 2.5 s
        heard(0.5, 1.0),  # over by then
        heard(4.0, started_s=1.5),  # waits for its first sound
        heard(5.0, started_s=4.5),  # begun later
        heard(failure=Failure("http_status", "", 503)),
    ]
    report = report_of(streams, killed_s=2.0, stage="talker", restarts=1)
    assert report.under_way == 2
    assert report.pause_ms is not None
    assert (report.pause_ms.count, report.pause_ms.max) == (2, 2500.0)
    assert report.pause_ms.cdf[0] == pytest.approx(400)
    assert report.gap_before_ms is not None
    assert (report.gap_before_ms.count, report.gap_before_ms.max) == (1, pytest.approx(900))
    assert report.first_packet_after_ms is not None
    assert report.first_packet_after_ms.p50 == 2500.0
    assert report.failures == {"http_503": 1}


def test_answers_agree_up_to_the_first_token_that_differs() -> None:
    one = [("a", -0.1), ("b", -0.2), ("c", -0.3)]
    assert common(one, [("a", -0.11), ("b", -0.2), ("d", -0.3)]) == 2
    assert common(one, one[:2]) == 2
    assert common(one, [("x", 0.0)]) == 0


def test_the_deployments_that_are_run_are_the_examples() -> None:
    for server in (*CHAT, *SPEECH, TOGETHER):
        assert server.deployment is not None
        text = (DEPLOYMENTS / server.deployment).read_text()
        assert server.replace is None or server.replace[0] in text


# --- the run ------------------------------------------------------------------------------------------------
@pytest.fixture
def run(tmp_path: Path) -> Run:
    work = tmp_path / "work"
    work.mkdir()
    return Run("two_gpus", tmp_path, work, 600.0, {}, table=tables)


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was measured, and on which servers; speech breaks on one GPU."""
    done: list[str] = []

    @contextmanager
    def servers(run: Run, wanted: Sequence[Server], **_: float) -> Iterator[dict[str, Server]]:
        yield {server.name: server for server in wanted}

    def measuring(part: str, run: Run, there: dict[str, Running] | None = None) -> None:
        names = list(there or ())
        done.append(f"{part}: {names[0] if len(names) == 1 else len(names)}")
        if done[-1] == "speech: speech on one GPU":
            raise KeyError("rtf")

    monkeypatch.setattr(two_gpus, "servers", servers)
    for part in PARTS:
        monkeypatch.setattr(two_gpus, part, partial(measuring, part))
    return done


def test_parts_run_in_their_order_and_one_that_breaks_stops_no_other(run: Run, done: list[str]) -> None:
    measure(run, PARTS)
    assert done == [
        "tests: 0",
        "speech: speech on one GPU",
        "speech: speech on two GPUs",
        "death: speech on two GPUs",
        "links: 0",
        "chat: 6",
        "decode: 6",
    ]
    assert run.failures == ["speech, speech on one GPU: KeyError: 'rtf'"]


def test_no_server_is_started_for_nothing(run: Run, done: list[str]) -> None:
    for parts in (["death"], ["together"], ["decode"], ["chat"], ["links"]):
        measure(run, parts)
    assert done == [
        "death: speech on two GPUs",
        "speech: talker with vocoder",
        "decode: 2",
        "chat: 5",
        "links: 0",
    ]


def test_a_part_for_which_no_time_is_left_is_named(run: Run, done: list[str]) -> None:
    run.budget_s = 70.0
    measure(run, PARTS)
    assert done == ["tests: 0", "links: 0"]
    assert len(run.not_run) == 3


def test_a_death_is_told_with_its_pauses_and_failures(run: Run) -> None:
    run.results["death 16 it"] = {
        "requests": 192,
        "under_way": 16,
        "restarts": 1,
        "pause_ms": {"p50": 7100.0, "p99": 7200.0},
        "gap_before_ms": {"p50": 80.0, "p99": 90.0},
        "underrun_ms": {"p50": 5000.0, "p99": 6100.0},
        "first_packet_after_ms": None,
        "failures": {"http_503": 2, "timeout": 1},
    }
    row = death_table(run).splitlines()[1].split()
    assert row == ["death", "16", "it", "192", "16", "1", "7100", "7200", "90.00", "6100", "-", "3"]
    assert "7200" in tables(run)
