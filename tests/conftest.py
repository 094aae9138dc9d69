"""What every test shares: tiny checkpoints made once a session, and the proof that nothing is left behind."""

from __future__ import annotations

import multiprocessing
import os
import re
import select
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch's threads, here and in the processes that tests start

SEGMENT_DIRECTORY = Path("/dev/shm")
GRACE_S = 5.0  # how long something that is already on its way out may take
ROOT = Path(__file__).resolve().parent.parent
SHIPPED = ROOT / "model_families" / "default_model" / "weights"
DEFAULT_MODEL = (
    ROOT / ".models" / ("omnistage-nano" if any(SHIPPED.glob("*.safetensors")) else "omnistage-default")
)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`tiny("qwen2_5_vl", seed=1, ...)`: the folder of a tiny checkpoint (see `build_tiny`), never written
    to."""
    from tests.tiny_models import build_tiny  # imports torch and transformers: only where they are needed

    built: dict[str, Path] = {}

    def build(family: str, seed: int = 0, **overrides: Any) -> Path:
        key = repr((family, seed, sorted(overrides.items())))
        if key not in built:
            built[key] = build_tiny(family, tmp_path_factory.mktemp(f"tiny_{family}_"), seed, **overrides)
        return built[key]

    return build


@pytest.fixture(scope="session")
def tiny_omni(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`tiny_omni("qwen3_omni_moe", thinker_only=True, ...)`: see `build_tiny_omni`."""
    from tests.tiny_omni import build_tiny_omni

    built: dict[str, Path] = {}

    def build(family: str, seed: int = 0, **overrides: Any) -> Path:
        key = repr((family, seed, sorted(overrides.items())))
        if key not in built:
            built[key] = build_tiny_omni(
                family, tmp_path_factory.mktemp(f"tiny_{family}_"), seed, **overrides
            )
        return built[key]

    return build


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The folder of the default model; the test is skipped where it was not built."""
    if not (DEFAULT_MODEL / "config.json").exists():
        pytest.skip("the default model is not built: run `make setup`")
    return DEFAULT_MODEL


@pytest.fixture(scope="session")
def default_reference(default_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The default model in a folder that `transformers` reads: it cannot hear or speak."""
    from tests.default_reference import without_ears_and_voice

    return without_ears_and_voice(default_model, tmp_path_factory.mktemp("default_reference"))


# --- nothing is left behind ---------------------------------------------------------------------------------
def child_processes() -> set[int]:
    """Children of this process, but for Python's own resource tracker, which lives as long as we do."""
    multiprocessing.active_children()  # reaps those that have ended
    children: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        try:
            children.update(int(pid) for pid in (task / "children").read_text().split())
        except (FileNotFoundError, ProcessLookupError):  # the thread ended while we looked
            continue
    return {pid for pid in children if b"multiprocessing.resource_tracker" not in _command_line(pid)}


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def open_segments() -> set[str]:
    """Shared-memory segments of ours, but for those that name a living process outside our tree as owner."""
    names = {path.name for path in SEGMENT_DIRECTORY.glob("omnistage*")}
    ours = {os.getpid(), *child_processes()}
    return {name for name in names if not (_living_owners(name) - ours)}


def _living_owners(name: str) -> set[int]:
    pids = {int(digits) for digits in re.findall(r"(?<![0-9a-zA-Z])\d{1,8}(?![0-9a-zA-Z])", name)}
    return {pid for pid in pids if Path(f"/proc/{pid}").exists()}


def blocking_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if not thread.daemon}


def _wait_for_exit(pid: int) -> None:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    poller.poll(GRACE_S * 1000)
    os.close(descriptor)


@contextmanager
def nothing_left_behind() -> Iterator[None]:
    """Fails on a child process, a thread that would keep Python alive, or a shared segment that is new."""
    children, threads, segments = child_processes(), blocking_threads(), open_segments()
    yield
    for thread in blocking_threads() - threads:
        thread.join(GRACE_S)
    for pid in child_processes() - children:
        _wait_for_exit(pid)
    leaks = [
        *(f"child process {pid}: {_command_line(pid)!r}" for pid in child_processes() - children),
        *(f"thread {thread.name!r}" for thread in blocking_threads() - threads),
        *(f"shared-memory segment {name!r}" for name in open_segments() - segments),
    ]
    assert not leaks, "the test left behind: " + "; ".join(leaks)


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    """After every test; modules whose servers serve several tests do this once, after all of them."""
    with nothing_left_behind():
        yield
