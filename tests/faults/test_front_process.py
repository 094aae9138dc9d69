"""The front process: it drains on SIGTERM, and however it ends, its workers end with it and leave nothing."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

LIMIT_S = 600  # never reached by a machine that is only slow


class Server:
    def __init__(self, folder: Path, log: Path) -> None:
        self.log = log
        command = [sys.executable, "-m", "api.cli", "serve", str(folder), "--port", "0"]
        command += ["--workers", "per-stage", "--kv-memory", "8MiB", "--dtype", "float32"]
        with log.open("w") as errors:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.search(r"http://[\d.]+:\d+", line)
        assert found is not None, f"the server did not start: {line!r}"
        self.url = found.group()

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=LIMIT_S) as response:
            return json.load(response)

    def open_stream(self, max_tokens: int) -> Any:
        body = {
            "messages": [{"role": "user", "content": "hello there"}],
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
        }
        request = urllib.request.Request(
            self.url + "/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        return urllib.request.urlopen(request, timeout=LIMIT_S)

    def refusal(self) -> str | None:
        """Status and code with which /ready is refused; None: it is ready."""
        try:
            self.get("/ready")
        except urllib.error.HTTPError as error:
            with error:
                return f"{error.code} {json.load(error)['error']['code']}"
        return None

    def descendants(self) -> list[int]:
        found, todo = [], [self.process.pid]
        while todo:
            pid = todo.pop()
            for task in Path(f"/proc/{pid}/task").iterdir():
                children = [int(c) for c in (task / "children").read_text().split()]
                found += children
                todo += children
        return found

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(LIMIT_S)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def server(tiny: Callable[[str], Path], tmp_path: Path) -> Iterator[Server]:
    server = Server(tiny("qwen2_5_vl"), tmp_path / "log")
    yield server
    server.close()


def wait_for_end(pidfds: list[int]) -> None:
    for descriptor in pidfds:
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        assert poller.poll(LIMIT_S * 1000), "a process outlived the front process"
        os.close(descriptor)


def test_kill_9_leaves_no_process(server: Server) -> None:
    workers = server.get("/stages")["workers"]
    assert [w["state"] for w in workers] == ["ready", "ready"]
    pids = server.descendants()
    assert {w["pid"] for w in workers} < set(pids), "preprocessing workers too"
    pidfds = [os.pidfd_open(pid) for pid in pids]
    server.process.kill()
    wait_for_end(pidfds)


def test_sigterm_drains(server: Server) -> None:
    """What is under way is finished; then every process ends."""
    pidfds = [os.pidfd_open(pid) for pid in server.descendants()]
    with server.open_stream(max_tokens=150) as stream:
        assert stream.readline().startswith(b"data: ")
        server.process.send_signal(signal.SIGTERM)
        rest = stream.read()
    assert rest.rstrip().endswith(b"data: [DONE]")
    assert b'"finish_reason":"length"' in rest
    assert server.process.wait(LIMIT_S) == 0
    wait_for_end(pidfds)


def test_a_second_signal_ends_at_once(server: Server) -> None:
    pidfds = [os.pidfd_open(pid) for pid in server.descendants()]
    with server.open_stream(max_tokens=4000) as stream:
        assert stream.readline().startswith(b"data: ")
        server.process.send_signal(signal.SIGTERM)
        while server.refusal() is None:  # until the first signal has been taken
            pass
        assert server.refusal() == "503 shutting_down"
        server.process.send_signal(signal.SIGTERM)
        rest = stream.read()
    assert b'"code":"shutting_down"' in rest.splitlines()[-2], "the client is told"
    assert b"[DONE]" not in rest
    assert server.process.wait(LIMIT_S) == 0
    wait_for_end(pidfds)
    log = server.log.read_text()
    assert "Traceback" not in log
    assert log.count("told to stop again: 1 requests under way are cut off") == 1
