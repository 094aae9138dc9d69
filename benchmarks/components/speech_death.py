"""The death of a worker under spoken answers over HTTP: kill -9 of a stage's process while many are heard.

    python -m benchmarks.components.speech_death --url URL [--stage talker] [--concurrency 16] [--after-s 4]

Runs on the server's machine. A stream's pause is its longest time without a packet that ended after the
kill (what
had left the stage by then still comes), beside its longest one that ended before. Streams that had all
their sound
by then have none; requests that begin after the kill wait for the new worker.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import msgspec

from benchmarks.samples import Summary, summarize
from benchmarks.speech.command import SpeechOptions, body_of, listen_all
from benchmarks.speech.listen import Heard
from benchmarks.speech.playback import play
from benchmarks.text_table import number, render
from benchmarks.wire.clock import Clock, MonotonicClock
from benchmarks.wire.connection import HttpPool
from benchmarks.wire.loop import run
from benchmarks.wire.server import describe

SAMPLE_RATE = 24_000


class _Worker(msgspec.Struct):
    stages: list[str]
    pid: int
    restarts: int = 0


class _Stages(msgspec.Struct):
    workers: list[_Worker]


class DeathReport(msgspec.Struct, frozen=True, kw_only=True):
    """`under_way`: streams that had begun to sound and not ended when the worker was killed."""

    stage: str
    requests: int
    failures: dict[str, int]
    under_way: int
    pause_ms: Summary | None
    gap_before_ms: Summary | None  # the longest of each stream until the kill
    underrun_ms: Summary | None
    first_packet_after_ms: Summary | None  # of requests begun before the kill that had had no sound
    restarts: int


async def workers_of(pool: HttpPool) -> list[_Worker]:
    status, body = await pool.get("/stages")
    assert status == 200, f"/stages answered {status}"
    return msgspec.json.decode(body, type=_Stages).workers


async def strike(pool: HttpPool, clock: Clock, stage: str, after_s: float) -> float:
    """Kills the stage's process; when."""
    await asyncio.sleep(after_s)
    (worker,) = (w for w in await workers_of(pool) if stage in w.stages)
    assert worker.pid > 0
    killed_s = clock.now()
    os.kill(worker.pid, signal.SIGKILL)
    return killed_s


async def measure(args: argparse.Namespace, clock: Clock) -> DeathReport:
    pool = HttpPool(args.url, clock)
    try:
        server = await describe(pool, None)
        options = SpeechOptions(
            kind="chat",
            requests=args.requests,
            concurrency=args.concurrency,
            words=args.words,
            voice=args.voice,
            sample_rate=SAMPLE_RATE,
            seed=7,
        )
        bodies = [body_of(options, server.model, args.extra_body.encode(), i) for i in range(args.requests)]
        killing = asyncio.create_task(strike(pool, clock, args.stage, args.after_s))
        heard = await listen_all(pool, options, bodies, args.timeout)
        killed_s = await killing
        restarts = sum(w.restarts for w in await workers_of(pool) if args.stage in w.stages)
    finally:
        pool.close()
    return report_of(heard, killed_s, args.stage, restarts)


def report_of(heard: Sequence[Heard], killed_s: float, stage: str, restarts: int) -> DeathReport:
    pauses, before, waits, underruns, under_way = [], [], [], [], 0
    for one in heard:
        times = [packet.at_s for packet in one.packets if packet.pcm]
        later = [at_s for at_s in times if at_s > killed_s]
        if times and times[0] <= killed_s and later:
            under_way += 1
            gaps = [(b - a, b) for a, b in pairwise(times)]
            pauses.append(max(gap for gap, end_s in gaps if end_s > killed_s) * 1e3)
            if times[1] <= killed_s:
                before.append(max(gap for gap, end_s in gaps if end_s <= killed_s) * 1e3)
        elif later and one.started_s <= killed_s:
            waits.append((later[0] - one.started_s) * 1e3)
        playback = play(one.packets, one.started_s, SAMPLE_RATE)
        if playback is not None:
            underruns.append(playback.underrun_s * 1e3)
    return DeathReport(
        stage=stage,
        requests=len(heard),
        failures=dict(Counter(one.failure.label for one in heard if one.failure is not None)),
        under_way=under_way,
        pause_ms=summarize(pauses),
        gap_before_ms=summarize(before),
        underrun_ms=summarize(underruns),
        first_packet_after_ms=summarize(waits),
        restarts=restarts,
    )


def format_report(report: DeathReport) -> str:
    rows = []
    for name, summary in (
        ("pause, ms", report.pause_ms),
        ("longest gap before, ms", report.gap_before_ms),
        ("underrun of a listener, ms", report.underrun_ms),
        ("first packet of those that waited, ms", report.first_packet_after_ms),
    ):
        cells = ["-"] * 4
        if summary is not None:
            cells = [number(v) for v in (summary.p50, summary.p90, summary.p99, summary.max)]
        rows.append([name, *cells])
    failed = ", ".join(f"{kind} {count}" for kind, count in sorted(report.failures.items())) or "none"
    return "\n".join(
        [
            f"{report.stage} killed under {report.requests} answers, {report.under_way} of them sounding;"
            f" failed: {failed}; restarts: {report.restarts}",
            render(["", "p50", "p90", "p99", "max"], rows),
        ]
    )


def main(argv: Sequence[str]) -> int:
    """0; 1 when a request failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", required=True)
    parser.add_argument("--stage", default="talker")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--words", type=int, default=15)
    parser.add_argument("--voice", default="alloy")
    parser.add_argument("--after-s", type=float, default=4.0)
    parser.add_argument("--timeout", type=float, default=60.0)
    parser.add_argument("--extra-body", default="{}")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    report = run(measure(args, MonotonicClock()))
    print(format_report(report))
    if args.json is not None:
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1))
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
