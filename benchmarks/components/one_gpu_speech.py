"""Spoken answers of one GPU over HTTP; and where a server that does not get ready breaks."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import signal
import subprocess
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.components.one_gpu_table import put
from benchmarks.components.run_loads import (
    SPEECH_HEADER,
    SPOKEN_S,
    WORK_HEADER,
    audio_s_per_s,
    speech_cells,
    speech_report,
    speech_work,
    summary,
)
from benchmarks.components.run_processes import Run, finish, python, spawn, stop, tail, try_part
from benchmarks.components.run_servers import (
    SPEECH_MODEL,
    Running,
    Server,
    deployment_options,
    folder_of,
    gpu_mib_by_process,
    is_ready,
    log_of,
    servers,
    steps_table,
    used_gpu_mib,
)
from benchmarks.text_table import number, render

FILE = "omni-one-gpu.toml"
CASES = ((1, 6), (4, 16), (16, 48), (64, 128))  # streams, requests
QUICK_CASES = ((1, 1), (2, 2))
START_LIMIT_S, AGAIN_LIMIT_S = 150.0, 100.0
# Leaves room for a talker and a vocoder of another process.
BOUNDED = ("thinker.memory=66GiB", "thinker.max_context=8192", "talker.memory=16GiB")
# Workers of the file, and what they are tried against.
TOGETHER = 'name = "answers"\nstages = ["talker", "vocoder", "thinker"]'
APART = """name = "thinker"
stages = ["thinker"]

[[worker]]
name = "speech"
stages = ["talker", "vocoder"]"""
DUMPS = "dumps"
SIZE = re.compile(r"([\d.]+) ([GM])iB")


def debugging(run: Run) -> dict[str, str]:
    """A kernel that fails is then the one launched last; its process leaves its stacks, the driver a dump."""
    dumps = run.work / DUMPS
    dumps.mkdir(exist_ok=True)
    skipped = (
        "nonrelocated_elf_images",
        "global_memory",
        "shared_memory",
        "local_memory",
        "constbank_memory",
    )
    return {
        "CUDA_LAUNCH_BLOCKING": "1",
        "TORCH_SHOW_CPP_STACKTRACES": "1",
        "CUDA_ENABLE_COREDUMP_ON_EXCEPTION": "1",
        "CUDA_COREDUMP_GENERATION_FLAGS": ",".join(f"skip_{part}" for part in skipped),
        "CUDA_COREDUMP_FILE": str(dumps / "gpu.%p"),
    }


def server_of(
    run: Run,
    name: str,
    *sets: str,
    env: dict[str, str] | None = None,
    replace: tuple[str, str] | None = None,
) -> Server:
    """With a cache of kernels that only these servers share. A worker that dies is not started again: the
    server ends, which is seen at once."""
    spoken = "server.max_speech_s=1" if run.quick else SPOKEN_S
    cache = {"TRITON_CACHE_DIR": str(run.work / "triton-speech")}
    # One that comes as another leaves finds a place beside 63 others.
    sets = (spoken, "server.max_restarts=0", "vocoder.max_streams=72", *sets)
    env = cache | (env or {})
    return Server(name, SPEECH_MODEL, FILE, sets=sets, env=tuple(env.items()), replace=replace)


def speech(run: Run) -> None:
    started: list[Running] = []
    server, works = server_of(run, "speech"), False
    with servers(run, [server], limit_s=START_LIMIT_S, all_started=started) as there:
        for running in there.values():
            put(run, "speech: start to ready, s", running.ready_s)
            run.show(steps_table({"speech": log_of(run, server)}))
            cases = QUICK_CASES if run.quick else CASES
            try_part(run, "speech, measured", partial(measure, run, running, cases))
            works = is_ready(running.port)
    if not works:
        if broke := started[0].ready_s is not None:
            run.fail("speech: the server does not answer any more")
            run.show(tail(run.log(server.name), 25))
        localise(run, died=broke or started[0].ended is not None)


def placements(run: Run) -> None:
    """What the file has chosen otherwise: the language model in a process of its own, whose kernels then take
    turns with those of the others; and a vocoder of half the precision."""
    others = [
        server_of(run, "speech, thinker apart", replace=(TOGETHER, APART)),
        server_of(run, "speech, vocoder of bfloat16", "vocoder.dtype=bfloat16"),
    ]
    for server in others:
        with servers(run, [server], limit_s=START_LIMIT_S) as there:
            for running in there.values():
                put(run, f"{server.name}: start to ready, s", running.ready_s)
                try_part(
                    run, server.name, partial(measure, run, running, QUICK_CASES if run.quick else CASES)
                )


# --- a server that speaks -----------------------------------------------------------------------------------
def measure(run: Run, running: Running, cases: Sequence[tuple[int, int]]) -> None:
    """Rows of a server under other settings are named after it."""
    who = running.server.name
    put(run, f"{who}: memory used when ready, GiB", _gib(used_gpu_mib()))
    rows, work = [], []
    for streams, requests in cases:
        report = speech_report(run, running, streams, requests)
        if report is None:
            continue
        put(run, f"{who} x{streams}: first packet p50, ms", summary(report["first_packet_ms"], "p50"))
        put(run, f"{who} x{streams}: RTF p50", summary(report["rtf"], "p50"))
        put(run, f"{who} x{streams}: audio-s/s", audio_s_per_s(report))
        rows.append([who, *speech_cells(report)])
        work.append([who, *speech_work(report)])
    run.show(render(["", *SPEECH_HEADER], rows))
    run.show(render(["", *WORK_HEADER], work))
    put(run, f"{who}: memory used in the end, GiB", _gib(used_gpu_mib()))
    say_memory(run, running)


def say_memory(run: Run, running: Running) -> None:
    """What the plan gives to each stage, beside what the driver says that each worker has."""
    command = python("api.cli", "plan", str(folder_of(run, SPEECH_MODEL)))
    command += [*deployment_options(run, running.server), "--gpu-memory", "139GiB"]
    name = f"plan {running.server.name}"
    finish(run, {name: spawn(run, name, command)}, 60)
    text = run.log(name).read_text(errors="replace")
    run.show(text)
    put(run, f"{running.server.name}: memory planned, GiB", planned_gib(text))
    used = gpu_mib_by_process()
    for worker, pid in workers_of(running):
        if pid in used:
            run.say(f"worker {worker} (pid {pid}) has {number(_gib(used[pid]))} GiB")


def planned_gib(plan: str) -> float:
    """The sum of all stages' totals, from the plan's table: the sixth size of a row."""
    rows = [SIZE.findall(line) for line in plan.splitlines()]
    return sum(float(row[5][0]) / (1 if row[5][1] == "G" else 1024) for row in rows if len(row) >= 6)


def workers_of(running: Running) -> list[tuple[str, int]]:
    """(stages, pid)"""
    connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=10)
    try:
        connection.request("GET", "/stages")
        workers = json.loads(connection.getresponse().read())["workers"]
    finally:
        connection.close()
    return [("+".join(worker["stages"]), int(worker["pid"])) for worker in workers]


def _gib(mib: float | None) -> float | None:
    return None if mib is None else mib / 1024


# --- one that does not --------------------------------------------------------------------------------------
def localise(run: Run, *, died: bool) -> None:
    """Once more, with kernels that are compiled by now: one by one if it died. Beside it talker and vocoder
    alone, whose kernels are compiled anew. Then without the talker's kernels and graphs."""
    alone = begin_alone(run)
    try:
        again = server_of(run, "speech again", *BOUNDED, env=debugging(run) if died else None)
        with servers(run, [again], limit_s=AGAIN_LIMIT_S) as there:
            if finish(run, {"speech alone": alone}, AGAIN_LIMIT_S):
                run.show(tail(run.log("speech alone"), 20))
            for running in there.values():
                measure(run, running, QUICK_CASES if run.quick else CASES[::2])
    finally:
        stop(alone, signal.SIGABRT)
    explain_dumps(run)
    if there:
        return
    plain = server_of(run, "speech, plain talker", *BOUNDED, "talker.kernels=reference")
    with servers(run, [plain], limit_s=AGAIN_LIMIT_S) as there:
        for running in there.values():
            measure(run, running, QUICK_CASES[:1] if run.quick else CASES[:1])


def begin_alone(run: Run) -> subprocess.Popen[bytes]:
    command = python("benchmarks.components.gpu_speech", str(folder_of(run, SPEECH_MODEL)))
    command += ["--streams", "1", "--frames", "12", "--chunks", "1x1"]
    command += ["--device", "cpu"] if run.quick else []
    env = debugging(run) | {"TRITON_CACHE_DIR": str(run.work / "triton-alone")}
    return spawn(run, "speech alone", command, None, **env)


def explain_dumps(run: Run) -> None:
    """The kernel and the instruction at which each process's GPU stopped."""
    dumps = sorted((run.work / DUMPS).glob("gpu.*"))
    run.say(f"dumps of the GPU: {', '.join(dump.name for dump in dumps) or 'none'}")
    debugger = shutil.which("cuda-gdb")
    for dump in dumps[:2] if debugger is not None else []:
        assert debugger is not None
        finish(run, {dump.name: spawn(run, dump.name, explaining(debugger, dump))}, 40)
        run.show(tail(run.log(dump.name), 20))


def explaining(debugger: str, dump: Path) -> list[str]:
    asked = (f"target cudacore {dump}", "info cuda kernels", "info cuda exception", "x/6i $pc")
    return [debugger, "-batch", *(part for one in asked for part in ("-ex", one))]
