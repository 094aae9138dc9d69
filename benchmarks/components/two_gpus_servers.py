"""The servers, and every other process, of the runs on two GPUs: started, waited for, ended."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.text_table import number

ROOT = Path(__file__).resolve().parent.parent.parent
DEPLOYMENTS = ROOT / "examples" / "deployments"
READY_LIMIT_S = 200.0
STOP_LIMIT_S = 6.0
CHAT_MODEL, SPEECH_MODEL = "qwen2_5_vl_3b", "qwen3_omni_30b_a3b"
# So that all servers of a group fit beside each other; a deployment alone takes what its file says.
CHAT_MEMORY = (
    *("vision.memory=7GiB", "vision.embedding_cache=1GiB", "vision.embedding_cache_host=1GiB"),
    *("thinker.memory=16GiB", "thinker.max_context=16384", "preprocess.workers=12"),
)
SPEECH_MEMORY = (
    *("vision.memory=4GiB", "vision.embedding_cache=512MiB", "vision.embedding_cache_host=512MiB"),
    *("audio.memory=3GiB", "audio.embedding_cache=256MiB", "audio.embedding_cache_host=256MiB"),
    *("thinker.memory=66GiB", "thinker.max_context=8192", "talker.memory=16GiB", "talker.max_sequences=64"),
    *("vocoder.memory=4GiB", "preprocess.workers=4"),
)


@dataclass(frozen=True)
class Server:
    """`gpus`: CUDA_VISIBLE_DEVICES. `half`: of the cores, for what is measured beside another; None: all."""

    name: str
    shape: str
    deployment: str
    gpus: str
    half: int | None = None
    replace: tuple[str, str] | None = None  # in the text of the deployment

    @property
    def num_gpus(self) -> int:
        return 1 if self.half is not None or self.name == "speech on one GPU" else 2


CHAT = (
    Server("one GPU, one worker", CHAT_MODEL, "one-gpu.toml", "0", 0),
    Server("one GPU, two processes", CHAT_MODEL, "one-gpu-two-processes.toml", "1", 1),
    Server("apart on two GPUs", CHAT_MODEL, "two-gpus.toml", "0,1"),
    Server(
        "apart, shared memory",
        CHAT_MODEL,
        "two-gpus.toml",
        "0,1",
        replace=('connector = "auto"', 'connector = "shm"'),
    ),
    Server("two replicas", CHAT_MODEL, "two-gpus-replicas.toml", "0,1"),
    Server("tensor parallel 2", CHAT_MODEL, "two-gpus-tensor-parallel.toml", "0,1"),
)
SPEECH = (
    Server("speech on one GPU", SPEECH_MODEL, "omni-one-gpu.toml", "0"),
    Server("speech on two GPUs", SPEECH_MODEL, "omni-two-gpus.toml", "0,1"),
)


@dataclass
class Run:
    out: Path
    work: Path
    budget_s: float
    models: dict[str, Path | None]
    quick: bool
    only_servers: tuple[str, ...]  # parts of their names; (): all
    started_s: float = field(default_factory=time.monotonic)
    results: dict[str, Any] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    @property
    def left_s(self) -> float:
        return self.budget_s - (time.monotonic() - self.started_s)

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.started_s:5.0f} s] {text}", flush=True)

    def log(self, name: str) -> Path:
        return self.work / (name.replace(" ", "-").replace(",", "") + ".log")


# --- processes ----------------------------------------------------------------------------------------------
def cores_of(half: int | None) -> set[int]:
    cores = sorted(os.sched_getaffinity(0))
    middle = len(cores) // 2
    return set(cores if half is None or middle == 0 else cores[:middle] if half == 0 else cores[middle:])


def spawn(
    run: Run, name: str, command: Sequence[str], half: int | None = None, **env: str
) -> subprocess.Popen[bytes]:
    """In a process group of its own, its output in a log."""
    cores = cores_of(half)
    with run.log(name).open("ab") as log:
        return subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | env,
            cwd=ROOT,
            start_new_session=True,
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )


def stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def finish(run: Run, processes: dict[str, subprocess.Popen[bytes]], limit_s: float) -> bool:
    """Waits for all; whether all went well. What is late is killed."""
    end_s = time.monotonic() + min(limit_s, max(1.0, run.left_s))
    good = True
    for name, process in processes.items():
        try:
            status = process.wait(max(0.1, end_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            stop(process)
            status = -1
        if status != 0:
            good = False
            run.failures.append(f"{name}: {'too late' if status == -1 else f'status {status}'}")
            run.say(f"FAILED {run.failures[-1]}\n" + tail(run.log(name)))
    return good


def tail(path: Path, num_lines: int = 12) -> str:
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    return "\n".join("    " + line[:220] for line in lines[-num_lines:])


def python(module: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", module, *arguments]


# --- servers ------------------------------------------------------------------------------------------------
@dataclass
class Running:
    server: Server
    port: int
    process: subprocess.Popen[bytes]
    ready_s: float | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


def start_server(run: Run, server: Server, port: int) -> Running:
    file = DEPLOYMENTS / server.deployment
    if server.replace is not None:
        text = file.read_text()
        assert server.replace[0] in text
        file = run.work / (run.log(server.name).stem + ".toml")
        file.write_text(text.replace(*server.replace))
    memory = SPEECH_MEMORY if server.shape == SPEECH_MODEL else CHAT_MEMORY
    small = small_settings(server) if run.quick else ()
    sets = [part for value in (*memory, *small) for part in ("--set", value)]
    command = python("api.cli", "serve", str(run.models[server.shape]), "--port", str(port))
    command += ["--deployment", str(file), *sets]
    process = spawn(run, server.name, command, server.half, CUDA_VISIBLE_DEVICES=server.gpus)
    return Running(server, port, process)


def small_settings(server: Server) -> tuple[str, ...]:
    """For a tiny model on a CPU."""
    speaks = server.shape == SPEECH_MODEL
    stages = ("vision", "audio", "thinker", "talker", "vocoder") if speaks else ("vision", "thinker")
    settings = [f"{stage}.devices=cpu" for stage in stages] + ["preprocess.workers=1"]
    for stage in ("thinker", "talker")[: 1 + speaks]:
        settings += [f"{stage}.kv_memory=32MiB", f"{stage}.max_step_tokens=256", f"{stage}.memory=2GiB"]
        settings += [f"{stage}.max_sequences=8", f"{stage}.max_context=2048"]
    return (*settings, "vision.memory=2GiB")


def is_ready(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/ready")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def wait_ready(run: Run, started: Sequence[Running], begun_s: float) -> None:
    """Returns when each is ready or has ended, or when it takes too long."""
    waiting = [one for one in started if one.ready_s is None]
    end_s = time.monotonic() + min(READY_LIMIT_S * (3 if run.quick else 1), run.left_s)
    while waiting and time.monotonic() < end_s:
        for one in list(waiting):
            if one.process.poll() is not None:
                waiting.remove(one)
            elif is_ready(one.port):
                one.ready_s = time.monotonic() - begun_s
                waiting.remove(one)
        time.sleep(0.25)


@contextmanager
def servers(run: Run, wanted: Sequence[Server], first_port: int) -> Iterator[dict[str, Running]]:
    """Those that got ready, by name."""
    begun_s = time.monotonic()
    if run.only_servers:
        wanted = [server for server in wanted if any(part in server.name for part in run.only_servers)]
    started: list[Running] = []
    try:
        for i, server in enumerate(wanted):
            started.append(start_server(run, server, first_port + i))
            if i == 0:  # it fills the cache of compiled kernels for the others
                wait_ready(run, started, begun_s)
        wait_ready(run, started, begun_s)
        for one in started:
            ready = "not ready" if one.ready_s is None else f"ready after {one.ready_s:.0f} s"
            run.say(f"{one.server.name}: {ready}")
            if one.ready_s is None:
                run.failures.append(f"{one.server.name}: not ready")
                print(tail(run.log(one.server.name), 25), flush=True)
        run.results.setdefault("ready_s", {}).update({one.server.name: one.ready_s for one in started})
        yield {one.server.name: one for one in started if one.ready_s is not None}
    finally:
        for one in started:
            one.process.terminate()
        for one in started:
            stop(one.process)


def bench(run: Run, running: Running, what: str, *arguments: str) -> tuple[subprocess.Popen[bytes], Path]:
    name = f"{what} {running.server.name}"
    result = run.log(name).with_suffix(".json")
    command = python(
        "api.cli", "bench", what.split()[0], "--url", running.url, *arguments, "--json", str(result)
    )
    return spawn(run, name, command, running.server.half), result


def read(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text()) if path.exists() else None


def figure(summary: dict[str, Any] | None, name: str) -> str:
    return number(None if summary is None else summary[name])
