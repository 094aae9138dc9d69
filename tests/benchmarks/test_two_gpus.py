"""What the runs on two GPUs make of what they have measured."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.components.run_servers import DEPLOYMENTS
from benchmarks.components.speech_death import report_of
from benchmarks.components.two_gpus import common
from benchmarks.components.two_gpus_servers import CHAT, SPEECH
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
    for server in (*CHAT, *SPEECH):
        assert server.deployment is not None
        text = (DEPLOYMENTS / server.deployment).read_text()
        assert server.replace is None or server.replace[0] in text
