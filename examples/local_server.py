"""A server of the default model for as long as a `with` block lasts."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence

import httpx

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 30.0
POLL_INTERVAL_S = 0.2


@contextlib.contextmanager
def local_server(options: Sequence[str] = ()) -> Iterator[str]:
    """Starts `omnistage serve` on a free port and yields its URL once /ready says so; stops it at the end."""
    url = f"http://127.0.0.1:{_free_port()}"
    port = url.rpartition(":")[2]
    command = [sys.executable, "-m", "api.cli", "serve", "--port", port, *options]
    with tempfile.TemporaryFile("w+") as log:
        server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            if not _wait_until_ready(server, url):
                log.seek(0)
                raise SystemExit(f"the server did not start; its log:\n{log.read()}")
            yield url
        finally:
            _stop(server)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait_until_ready(server: subprocess.Popen[bytes], url: str) -> bool:
    deadline = time.monotonic() + START_TIMEOUT_S
    while server.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/ready", timeout=5.0).status_code == httpx.codes.OK:
                return True
        time.sleep(POLL_INTERVAL_S)
    return False


def _stop(server: subprocess.Popen[bytes]) -> None:
    server.terminate()
    try:
        server.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
