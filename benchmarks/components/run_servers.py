"""The servers of a run of many measurements: started, waited for, ended, and what the start of one was at."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.components.run_processes import ROOT, Run, finish, python, spawn, stop, tail
from benchmarks.text_table import number, render

DEPLOYMENTS = ROOT / "examples" / "deployments"
READY_LIMIT_S = 200.0
POLL_S = 0.1
RELEASE_LIMIT_S = 15.0  # of the memory of a GPU, by processes that have been killed
MIB_LEFT_OVER = 1024
CHAT_MODEL, SPEECH_MODEL = "qwen2_5_vl_3b", "qwen3_omni_30b_a3b"
IMPORTS = "import api.cli, api.app, stages.launch, stages.build, transformers"  # of every server
STEP = re.compile(r"^\S+ \S+ INFO \S+: (?P<who>.+?): (?P<doing>.+) took (?P<s>[\d.]+) s$")


@dataclass(frozen=True)
class Server:
    """`gpus`: CUDA_VISIBLE_DEVICES. `half`: of the cores, for what is measured beside another; None: all."""

    name: str
    shape: str
    deployment: str | None  # a file of `DEPLOYMENTS`; None: the defaults
    gpus: str = "0"
    half: int | None = None
    replace: tuple[str, str] | None = None  # in the text of the deployment
    sets: tuple[str, ...] = ()  # --set
    env: tuple[tuple[str, str], ...] = ()

    @property
    def num_gpus(self) -> int:
        return len(self.gpus.split(","))


@dataclass
class Running:
    server: Server
    port: int
    process: subprocess.Popen[bytes]
    begun_s: float  # monotonic
    ready_s: float | None = None  # since it was begun
    ended: int | None = None  # its status, when it ended before it was ready

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def outcome(self) -> str:
        if self.ready_s is not None:
            return f"ready after {self.ready_s:.1f} s"
        return "not ready in time" if self.ended is None else f"ended with status {self.ended}"


def start_server(run: Run, server: Server, port: int) -> Running:
    command = python("api.cli", "serve", str(run.models[server.shape]), "--port", str(port))
    command += deployment_options(run, server)
    env = {"CUDA_VISIBLE_DEVICES": server.gpus, **dict(server.env)}
    begun_s = time.monotonic()
    return Running(server, port, spawn(run, server.name, command, server.half, **env), begun_s)


def deployment_options(run: Run, server: Server) -> list[str]:
    small = small_settings(server) if run.quick else ()
    options = [part for value in (*server.sets, *small) for part in ("--set", value)]
    if server.deployment is None:
        return options
    file = DEPLOYMENTS / server.deployment
    if server.replace is not None:
        text = file.read_text()
        assert server.replace[0] in text
        file = run.work / (run.log(server.name).stem + ".toml")
        file.write_text(text.replace(*server.replace))
    return ["--deployment", str(file), *options]


def small_settings(server: Server) -> tuple[str, ...]:
    """For a tiny model on a CPU."""
    speaks = server.shape == SPEECH_MODEL
    stages = ("vision", "audio", "thinker", "talker", "vocoder") if speaks else ("vision", "thinker")
    settings = [f"{stage}.devices=cpu" for stage in stages] + ["preprocess.workers=1"]
    settings += [f"{stage}.embedding_cache=16MiB" for stage in ("vision", "audio")[: 1 + speaks]]
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


def free_port() -> int:
    """Until it is taken, which is soon."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_ready(run: Run, started: Sequence[Running], limit_s: float) -> None:
    """Returns when each is ready or has ended, or when it takes too long."""
    waiting = [one for one in started if one.ready_s is None and one.ended is None]
    end_s = time.monotonic() + min(limit_s * run.patience, run.left_s)
    while waiting and time.monotonic() < end_s:
        for one in list(waiting):
            one.ended = one.process.poll()
            if one.ended is None and is_ready(one.port):
                one.ready_s = time.monotonic() - one.begun_s
            if one.ended is not None or one.ready_s is not None:
                waiting.remove(one)
        time.sleep(POLL_S)


@contextmanager
def servers(
    run: Run,
    wanted: Sequence[Server],
    *,
    limit_s: float = READY_LIMIT_S,
    all_started: list[Running] | None = None,
) -> Iterator[dict[str, Running]]:
    """Those that got ready, by name. `all_started` is given the others, too. `limit_s`: of the first one, and
    of all others."""
    if run.only_servers:
        wanted = [server for server in wanted if any(part in server.name for part in run.only_servers)]
    started: list[Running] = [] if all_started is None else all_started
    before_mib = used_mib_of_gpus()
    try:
        for server in wanted:
            started.append(start_server(run, server, free_port()))
            if len(started) == 1:  # it fills the cache of compiled kernels for the others
                wait_ready(run, started, limit_s)
        wait_ready(run, started, limit_s)
        for one in started:
            _tell_ready(run, one)
        yield {one.server.name: one for one in started if one.ready_s is not None}
    finally:
        for one in started:
            if one.ready_s is not None:
                one.process.terminate()
        for one in started:
            stop(one.process)
            with suppress(ProcessLookupError):
                os.killpg(one.process.pid, signal.SIGKILL)  # what a front process that died has left
        _wait_released(before_mib)


def _tell_ready(run: Run, one: Running) -> None:
    run.results.setdefault("ready_s", {})[one.server.name] = one.ready_s
    if one.ready_s is not None:
        run.say(f"{one.server.name}: {one.outcome}")
        return
    run.fail(f"{one.server.name}: {one.outcome}")
    if one.ended is None:
        stop(one.process, signal.SIGABRT)
    run.show(tail(run.log(one.server.name), 25))


# --- what a start was at ------------------------------------------------------------------------------------
def steps_of(log: str) -> list[tuple[str, str, float]]:
    """(who, doing what, seconds) of the steps that a server's log tells, in the order of their ends."""
    found = (STEP.match(line) for line in log.splitlines())
    return [(match["who"], match["doing"], float(match["s"])) for match in found if match is not None]


def steps_table(logs: dict[str, str]) -> str:
    """Of the logs of several starts, by name, side by side."""
    took: dict[str, dict[str, float]] = {}
    for start, log in logs.items():
        for who, doing, seconds in steps_of(log):
            took.setdefault(f"{who}: {doing}", {})[start] = seconds
    rows = [[step, *(number(by.get(start)) for start in logs)] for step, by in took.items()]
    return render(["steps of a start, some side by side", *(f"{start}, s" for start in logs)], rows)


def first_answer_s(running: Running) -> float:
    """From the server's beginning until it has answered a request for one token, asked now."""
    body = {"messages": [{"role": "user", "content": "Say something."}], "max_tokens": 1}
    connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=60)
    try:
        headers = {"content-type": "application/json"}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        response = connection.getresponse()
        answer = response.read()
        assert response.status == 200, answer[:300]
    finally:
        connection.close()
    return time.monotonic() - running.begun_s


# --- the memory of a GPU ------------------------------------------------------------------------------------
def used_gpu_mib() -> float | None:
    """Of the first GPU; None where nothing tells."""
    return next(iter(used_mib_of_gpus()), None)


def used_mib_of_gpus() -> list[float]:
    """Empty where nothing tells."""
    return [float(used) for used in _ask_gpu("--query-gpu=memory.used") if used.isdigit()]


def gpu_mib_by_process() -> dict[int, float]:
    """By pid, as far as the driver sees processes from here."""
    rows = [line.split(",") for line in _ask_gpu("--query-compute-apps=pid,used_memory")]
    return {int(row[0]): float(row[1]) for row in rows if len(row) == 2 and row[1].strip().isdigit()}


def _ask_gpu(query: str) -> list[str]:
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    asked = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    return asked.stdout.splitlines() if asked.returncode == 0 else []


def _wait_released(before_mib: Sequence[float]) -> None:
    """The next server plans with what is free."""
    end_s = time.monotonic() + RELEASE_LIMIT_S
    while time.monotonic() < end_s:
        used = used_mib_of_gpus()
        if len(used) != len(before_mib) or all(
            now <= before + MIB_LEFT_OVER for now, before in zip(used, before_mib, strict=True)
        ):
            return
        time.sleep(POLL_S)


# --- before all of it ---------------------------------------------------------------------------------------
def prepare(run: Run) -> None:
    """Folders of the shapes for which none was given; and, as `make setup` does, the byte code of what
    servers import and the C of the preprocessing workers: no server that starts later waits for either."""
    begun = {}
    for shape in [shape for shape, given in run.models.items() if given is None]:
        place = run.models[shape] = run.work / shape
        begun[shape] = spawn(run, shape, python("benchmarks.components.shape_folder", shape, str(place)))
    if not run.quick:
        begun["imports"] = spawn(run, "imports", [sys.executable, "-c", IMPORTS])
        begun["preprocess native"] = spawn(run, "preprocess native", python("preprocess.native"))
    finish(run, begun, 90)


def folder(text: str) -> Path:
    """Of the command line; servers run elsewhere."""
    return Path(text).resolve()


def log_of(run: Run, server: Server) -> str:
    return run.log(server.name).read_text(errors="replace")


def folder_of(run: Run, shape: str) -> Path:
    folder = run.models.get(shape)
    assert folder is not None, f"{shape}: no folder was written"
    return folder
