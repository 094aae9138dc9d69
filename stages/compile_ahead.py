"""Compiles a worker's kernels in processes of its own, before it touches a GPU and while it loads weights.

    worker ──fork──▶ lister ──fork──▶ compilers, one a core

The lister sees what the stages will launch (`lm_engine.triton.ahead`) and puts its numbers into a pipe, the
longest kernels first; each compiler takes the next one. The worker finds in Triton's cache on the disk what
they leave there; what they leave out, for whatever reason, it compiles when it comes to it.
"""

from __future__ import annotations

import logging
import os
import struct
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import xxhash

import lm_engine
from lm_engine.attention.choice import choose_mixed
from lm_engine.gpu_target import GpuTarget, assuming
from lm_engine.parallel import OneRank
from model_families.checkpoint import CONFIG_FILE
from stages.deployment import LMConfig, stage_of, step_bounds
from stages.planning import Plan
from stages.prctl import die_with, set_process_name

if TYPE_CHECKING:
    from lm_engine.triton.launch import Launch

logger = logging.getLogger(__name__)

ENGINE = Path(lm_engine.__path__[0])
NICENESS = 5  # the worker, which loads weights meanwhile, goes first
_NUMBER = struct.Struct("H")  # read whole: all of them are in the pipe before anyone reads
_MAX_LAUNCHES = (1 << 15) // _NUMBER.size  # half of what a pipe holds


class Compilation:
    """What `start_compiling` started."""

    def __init__(self, pid: int, code: int | None = None) -> None:
        """`code`: what it ended with, if it has."""
        self._pid = pid
        self._lock = threading.Lock()
        self._code = code

    def __call__(self) -> bool:
        """Whether all kernels are in the cache. From any thread; at once when it has ended."""
        with self._lock:
            if self._code is None:
                self._code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
                if self._code != 0:
                    logger.warning("compiling ahead ended with status %d: it is done as it comes", self._code)
            return self._code == 0


def start_compiling(plan: Plan, stages: Sequence[str], num_processes: int) -> Compilation | None:
    """For the language models among `stages` that run on GPUs. None: nothing to compile, or this process
    cannot be forked: it has threads, or has touched a GPU. Threads may be started afterwards."""
    targets = dict(plan.options.gpu_targets)
    names = [name for name in stages if _compiles(plan, name, targets)]
    touched = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if not names:
        return None
    if touched or threading.active_count() > 1:
        what = "has touched a GPU" if touched else "has threads"
        logger.warning("this process %s: kernels of %s are compiled as they come", what, ", ".join(names))
        return None
    stamp = _stamp(plan, names, targets)
    if stamp.exists():
        return Compilation(0, code=0)

    def compile_all() -> None:
        _list_and_compile(plan, names, targets, num_processes)
        stamp.touch()

    return Compilation(_fork("compiling", compile_all))


def _stamp(plan: Plan, names: Sequence[str], targets: dict[str, GpuTarget]) -> Path:
    """A file in Triton's cache that says that this has been compiled there: by the same sources, for the same
    stages. Saves a start the seconds of finding out, kernel by kernel."""
    import triton

    digest = xxhash.xxh3_128(f"{triton.__version__} {torch.__version__} {sorted(targets.items())}".encode())
    for path in sorted(ENGINE.rglob("*.py")):
        digest.update(path.read_bytes())
    digest.update((plan.folder / CONFIG_FILE).read_bytes())
    for name in names:
        stage, config = plan.stage(name), plan.deployment.lms[name]
        digest.update(f"{name} {stage.dtype} {plan.contexts[name]} {config}".encode())
    for variable in sorted(name for name in os.environ if name.startswith("TRITON_")):
        digest.update(f"{variable}={os.environ[variable]}".encode())
    return Path(triton.knobs.cache.dir) / f"omnistage-{digest.hexdigest()}"


def _compiles(plan: Plan, name: str, targets: dict[str, GpuTarget]) -> bool:
    config = plan.deployment.lms.get(name)
    return config is not None and config.device_list[0] in targets and config.kernels in ("auto", "triton")


def _fork(name: str, run: Callable[[], None]) -> int:
    """The pid of a process that does this and nothing more, and ends with this one."""
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            die_with(parent)
            set_process_name(name)
            run()
            status = 0
        finally:
            if status:
                logger.error("%s failed", name, exc_info=True)
            os._exit(status)  # nothing of the worker's is to be cleared up here, nor gone on with
    return pid


def _list_and_compile(
    plan: Plan, names: Sequence[str], targets: dict[str, GpuTarget], num_processes: int
) -> None:
    began_s = time.monotonic()
    by_target: dict[GpuTarget, list[Launch]] = {}
    for name in names:
        config = plan.deployment.lms[name]
        target = targets[config.device_list[0]]
        by_target.setdefault(target, []).extend(launches_of(plan, name, config, target))
    for target, launches in by_target.items():
        compile_launches(launches, target, num_processes)
    count = sum(map(len, by_target.values()))
    logger.info("%d kernels are in the cache after %.1f s", count, time.monotonic() - began_s)


def launches_of(plan: Plan, name: str, config: LMConfig, target: GpuTarget) -> list[Launch]:
    """One launch of each kernel variant that the stage's graphs will need; none for kernels of torch."""
    from lm_engine.triton.ahead import META, decoder_launches, talker_launches

    family, dtype = plan.family, plan.stage(name).dtype
    with assuming(target):
        bounds = {
            "max_sequences": step_bounds(config).max_sequences,
            "max_length": plan.contexts[name],
            "block_size": config.block_size,
        }
        choose = partial(
            choose_mixed,
            config.mixed_attention,
            dtype=dtype,
            device=META,
            block_size=config.block_size,
            kv_dtype=config.kv_dtype,
            stage=name,
        )
        if stage_of(name) != family.pipeline.entry:
            talker = family.load_talker(META, dtype, config.kernels)
            assert talker.attention.name == "triton"
            choose(talker.attention, talker.config.decoder)
            return talker_launches(talker, kv_dtype=config.kv_dtype, **bounds)
        parallel = OneRank(config.tensor_parallel) if config.tensor_parallel > 1 else None
        decoder = family.load_decoder(META, dtype, config.kernels, parallel)
        if decoder.attention.name != "triton":
            return []
        choose(decoder.attention, decoder.config)
        return decoder_launches(decoder, kv_dtype=config.kv_dtype, **bounds)


def compile_launches(launches: Sequence[Launch], target: GpuTarget, num_processes: int) -> None:
    """Raises RuntimeError when a process could not; the others have finished by then."""
    from lm_engine.triton.ahead import LauncherBuilder, compile_only

    if not launches:
        return
    builder = LauncherBuilder()
    assert len(launches) <= _MAX_LAUNCHES
    compile_only(target)
    ordered = sorted(launches, key=lambda launch: -_effort(launch))
    reading, writing = os.pipe()
    os.write(writing, b"".join(map(_NUMBER.pack, range(len(ordered)))))
    os.close(writing)  # in the compilers too: who reads the last number sees the end

    def compile_some() -> None:
        os.nice(NICENESS)
        while number := os.read(reading, _NUMBER.size):
            builder.build(ordered[_NUMBER.unpack(number)[0]].compile())

    pids = [_fork("compiling", builder.build_utils)]
    pids += [_fork("compiling", compile_some) for _ in range(min(num_processes, len(ordered)))]
    os.close(reading)
    statuses = [os.waitpid(pid, 0)[1] for pid in pids]
    if any(statuses):
        raise RuntimeError(f"{sum(map(bool, statuses))} of {len(pids)} compilers failed")


def _effort(launch: Launch) -> int:
    """Longer kernels take longer."""
    return len(launch.kernel.fn.__code__.co_code)
