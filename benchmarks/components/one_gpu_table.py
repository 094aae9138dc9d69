"""What one GPU should reach, and what it was seen to: the table at the end of a run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypedDict

from benchmarks.components.run_processes import Run
from benchmarks.text_table import number, render


@dataclass(frozen=True)
class Goal:
    """`floor`: what the hardware allows (bytes or operations over its rates, see docs/benchmarks.md).
    `more`: whether more is better."""

    target: float | None = None
    floor: float | None = None
    more: bool = False

    def reached(self, value: float | None) -> str:
        if self.target is None or value is None:
            return ""
        good = value >= self.target if self.more else value <= self.target
        return "yes" if good else "NO"


class Found(TypedDict):
    value: float | None
    floor: float | None


FRAME_MS = 80.0  # of sound
FRAME_FLOORS_MS = {1: 0.7, 16: 1.4, 64: 2.0}  # reading the talker's weights, by streams
SPEECH_TARGETS = {1: (100, 0.05, 20), 4: (150, 0.07, 57), 16: (250, 0.11, 145), 64: (700, 0.22, 290)}


def _speech_goals() -> Iterator[tuple[str, Goal]]:
    yield "speech: start to ready, s", Goal(60)
    yield "speech: memory planned, GiB", Goal()
    yield "speech: memory used when ready, GiB", Goal()
    yield "speech: memory used in the end, GiB", Goal()
    for streams, (first_ms, rtf, rate) in SPEECH_TARGETS.items():
        floor_ms = FRAME_FLOORS_MS.get(streams)
        yield f"speech x{streams}: first packet p50, ms", Goal(first_ms)
        yield f"speech x{streams}: RTF p50", Goal(rtf, floor_ms and floor_ms / FRAME_MS)
        rate_floor = floor_ms and streams * FRAME_MS / floor_ms
        yield f"speech x{streams}: audio-s/s", Goal(rate, rate_floor, more=True)


def _chat_goals(deployment: str) -> Iterator[tuple[str, Goal]]:
    # The floor of a cold one: 12 ms to decode and resize, 28 of tower and prefill.
    yield f"{deployment}, 1 user: TTFT cold p50, ms", Goal(60, 40)
    yield f"{deployment}, 1 user: TTFT warm p50, ms", Goal(12, 3)
    yield f"{deployment}, 8 users: req/s", Goal(33, 49, more=True)
    yield f"{deployment}, 32 users: req/s", Goal(60, 86, more=True)
    yield f"{deployment}, 32 users: TTFT cold p50, ms", Goal(400)
    yield f"{deployment}, 32 users: TTFT warm p50, ms", Goal(60)
    yield f"{deployment}, 32 users: ITL p99, ms", Goal(20)
    yield f"{deployment}, one image for all: req/s", Goal(140, 250, more=True)


def _alone_goals() -> Iterator[tuple[str, Goal]]:
    yield from ((f"alone, decode x{batch}: step, ms", Goal()) for batch in (1, 8, 32, 128))
    yield "alone, encoder: 1 picture, ms", Goal()
    yield "alone, encoder: 8 pictures, ms", Goal(130)
    for what in (
        "a small picture",
        "1 picture, by graph",
        "8 pictures, by graph",
        "a small picture, by graph",
    ):
        yield f"alone, encoder: {what}, ms", Goal()
    for streams in SPEECH_TARGETS:
        yield f"alone, talker x{streams}: frame, ms", Goal(floor=FRAME_FLOORS_MS.get(streams))
    yield "alone, vocoder: 1 frame of 1, ms", Goal(floor=0.1)
    yield "alone, vocoder: 16 frames of 16, ms", Goal(floor=1.7)


# By part.
GOALS: dict[str, dict[str, Goal]] = {
    "speech": dict(_speech_goals()),
    "decode": {
        "bf16, 1 stream: TPOT, ms": Goal(1.8, 1.44),
        "bf16, 32 streams: tok/s": Goal(8000, 11500, more=True),
        "fp8, 1 stream: TPOT, ms": Goal(),
        "fp8, 32 streams: tok/s": Goal(more=True),
    },
    "chat": dict([*_chat_goals("one-gpu.toml"), *_chat_goals("defaults")]),
    "start": {
        **{f"start, {cache}: ready, s": Goal() for cache in ("cold", "warm")},
        **{f"start, {cache}: first token, s": Goal(20) for cache in ("cold", "warm")},
    },
    "alone": dict(_alone_goals()),
}


def put(run: Run, name: str, value: float | None, floor: float | None = None) -> None:
    """A figure for the table. `floor`: as measured or counted in the run, where the goal has none."""
    figures: dict[str, Found] = run.results.setdefault("figures", {})
    figures[name] = {"value": value, "floor": floor}


def table_of(run: Run) -> str:
    """The goals of the parts that were asked for with what was found; then what else was found."""
    figures: dict[str, Found] = run.results.get("figures", {})
    parts: list[str] = run.results.get("parts", [])
    goals = {name: goal for part in parts for name, goal in GOALS.get(part, {}).items()}
    rows = []
    for name in [*goals, *(name for name in figures if name not in goals)]:
        goal, found = goals.get(name, Goal()), figures.get(name)
        value = None if found is None else found["value"]
        floor = found["floor"] if found is not None and found["floor"] is not None else goal.floor
        rows.append([name, number(value), number(floor), number(goal.target), goal.reached(value)])
    what = "tiny models on a CPU" if run.quick else ""
    return render([what, "measured", "floor", "target", "reached"], rows)
