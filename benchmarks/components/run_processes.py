"""A run of many measurements within a budget of time: its processes, its logs, what failed, what it leaves.

Imports nothing but the standard library, so that a run can say what else is missing.
"""

from __future__ import annotations

import http.client
import json
import math
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
STOP_LIMIT_S = 6.0
QUICK_PATIENCE = 6.0  # a small machine that others use, too
LEAST_S = 5.0  # nothing is begun with less
MAX_PACKED_BYTES = 8 << 20  # of one file; a longer log loses its middle


@dataclass
class Run:
    """`work` holds logs and results while it runs; `out` gets NAME.json, NAME.txt and NAME.logs.tar.gz."""

    name: str
    out: Path
    work: Path
    budget_s: float
    models: dict[str, Path | None]  # a folder for each shape; None until it is written
    quick: bool = False
    only_servers: tuple[str, ...] = ()  # parts of their names; (): all
    started_s: float = field(default_factory=time.monotonic)
    results: dict[str, Any] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    not_run: list[str] = field(default_factory=list)
    part_ends_s: float = math.inf  # monotonic
    table: Callable[[Run], str] = lambda run: ""  # of what it has found so far

    @property
    def left_s(self) -> float:
        """Of the budget, and of the part under way."""
        return min(self.started_s + self.budget_s, self.part_ends_s) - time.monotonic()

    @property
    def patience(self) -> float:
        """Limits of time are so many times as long as stated."""
        return QUICK_PATIENCE if self.quick else 1.0

    @contextmanager
    def limited(self, limit_s: float) -> Iterator[None]:
        """What is waited for within it ends in time."""
        before = self.part_ends_s
        self.part_ends_s = min(before, time.monotonic() + limit_s * self.patience)
        try:
            yield
        finally:
            self.part_ends_s = before

    def say(self, text: str) -> None:
        self.show(f"[{time.monotonic() - self.started_s:5.0f} s] {text}")

    def show(self, text: str) -> None:
        print(text, flush=True)
        with (self.work / "said.log").open("a") as said:
            said.write(text + "\n")

    def fail(self, what: str) -> None:
        self.failures.append(what)
        self.say(f"FAILED {what}")

    def log(self, name: str) -> Path:
        return self.work / (name.replace(" ", "-").replace(",", "") + ".log")

    def json(self, name: str) -> Path:
        return self.log(name).with_suffix(".json")


@contextmanager
def measured(
    name: str,
    out: Path,
    budget_s: float,
    models: dict[str, Path | None],
    *,
    quick: bool,
    table: Callable[[Run], str],
    only_servers: Sequence[str] = (),
) -> Iterator[Run]:
    """A run whose results lie in `out` however it ends; SIGTERM ends it with its processes."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="omnistage-run-") as work:
        run = Run(name, out, Path(work), budget_s, models, quick, tuple(only_servers), table=table)
        run.say(" ".join(sys.argv))
        before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
        try:
            yield run
        finally:
            signal.signal(signal.SIGTERM, before)
            save(run)


def save(run: Run) -> None:
    """Again after every part: a run that is killed has left what it had."""
    found = run.results | {"failures": run.failures, "not_run": run.not_run}
    (run.out / f"{run.name}.json").write_text(json.dumps(found))
    (run.out / f"{run.name}.txt").write_text(run.table(run) + "\n")
    with tarfile.open(run.out / f"{run.name}.logs.tar.gz", "w:gz") as packed:
        for path in sorted(run.work.iterdir()):
            if path.is_file():
                packed.add(_shortened(path), path.name)


def _shortened(path: Path) -> Path:
    """The file, or what is left of it without its middle."""
    if path.stat().st_size <= MAX_PACKED_BYTES:
        return path
    half = MAX_PACKED_BYTES // 2
    with path.open("rb") as whole:
        head = whole.read(half)
        whole.seek(-half, os.SEEK_END)
        tail = whole.read()
    short = path.parent / "shortened" / path.name  # in a folder, which is not packed
    short.parent.mkdir(exist_ok=True)
    short.write_bytes(head + b"\n[... the middle was left out ...]\n" + tail)
    return short


def try_part(
    run: Run, name: str, part: Callable[[], None], *, limit_s: float = math.inf, needs_s: float = LEAST_S
) -> None:
    """What one part cannot do is written down, and the next one begins. It is not begun with less than
    `needs_s` left."""
    if run.left_s < needs_s:
        run.not_run.append(f"{name} (wants {needs_s:.0f} s, {max(0.0, run.left_s):.0f} s were left)")
        run.say(f"NOT RUN {run.not_run[-1]}")
        return
    run.say(f"== {name}")
    try:
        with run.limited(limit_s):
            part()
    except (
        *(AssertionError, OSError, ValueError, TypeError, LookupError, ArithmeticError, RuntimeError),
        *(subprocess.SubprocessError, http.client.HTTPException),
    ) as error:
        run.fail(f"{name}: {type(error).__name__}: {error}")
    save(run)


# --- processes ----------------------------------------------------------------------------------------------
def cores_of(half: int | None) -> set[int]:
    cores = sorted(os.sched_getaffinity(0))
    middle = len(cores) // 2
    return set(cores if half is None or middle == 0 else cores[:middle] if half == 0 else cores[middle:])


def spawn(
    run: Run, name: str, command: Sequence[str], half: int | None = None, **env: str
) -> subprocess.Popen[bytes]:
    """In a process group of its own, its output in a log. A process that dies of a signal leaves the stacks
    of its threads there."""
    cores = cores_of(half)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    with run.log(name).open("ab") as log:
        return subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment | {"PYTHONFAULTHANDLER": "1"} | env,
            cwd=ROOT,
            start_new_session=True,
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )


def stop(process: subprocess.Popen[bytes], first: signal.Signals = signal.SIGTERM) -> None:
    """`first`: what the whole group is asked to end with (SIGABRT: and to leave its stacks)."""
    if first is signal.SIGTERM:
        process.terminate()
    elif process.poll() is None:
        os.killpg(process.pid, first)
    try:
        process.wait(STOP_LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def finish(run: Run, processes: dict[str, subprocess.Popen[bytes]], limit_s: float) -> bool:
    """Waits for all; whether all went well. What is late is killed."""
    end_s = time.monotonic() + min(limit_s * run.patience, max(1.0, run.left_s))
    good = True
    for name, process in processes.items():
        try:
            status = process.wait(max(0.1, end_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            stop(process)
            status = None
        if status != 0:
            good = False
            run.fail(f"{name}: {'too late' if status is None else f'status {status}'}")
            run.show(tail(run.log(name)))
    return good


def tail(path: Path, num_lines: int = 12) -> str:
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    return "\n".join("    " + line[:220] for line in lines[-num_lines:])


def python(module: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", module, *arguments]


def read(path: Path) -> Any:
    """None for what was not written."""
    return json.loads(path.read_text()) if path.exists() else None
