"""`transformers serve --continuous-batching` on a free port, as a server to measure against.

Needs the `serving` extra of transformers (fastapi, uvicorn, openai, rich; accelerate for GGUF). In 5.24 it
rejects `ignore_eos` and `min_tokens` (422), ignores `stream_options` (usage comes in the last chunk anyway),
sends no `[DONE]`, and tells nothing about its caches.
"""

from __future__ import annotations

import argparse
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

READY_LINE = "Application startup complete"
READY_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 15.0
KEPT_LINES = 40


class RivalFailed(Exception):
    """The server ended or hung before it was ready. The message, for the user, ends with its last lines."""


class TransformersServe:
    """Owns the server process from `start` to `stop`; also a context manager. Ready means loaded."""

    def __init__(
        self, model: Path, *, device: str = "cpu", dtype: str = "auto", options: Sequence[str] = ()
    ) -> None:
        self.port = _free_port()
        self.command = (
            sys.executable,
            *("-c", "from transformers.cli.transformers import main; main()"),
            *("serve", str(model), "--continuous-batching", "--host", "127.0.0.1", "--port", str(self.port)),
            *("--device", device, "--dtype", dtype, *options),
        )
        self._process: subprocess.Popen[str] | None = None
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._ready = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Returns once the server answers. Raises RivalFailed, with the process gone."""
        assert self._process is None
        self._process = subprocess.Popen(
            self.command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
        self._follower = threading.Thread(target=self._follow, name="rival-log", daemon=True)
        self._follower.start()
        in_time = self._ready.wait(timeout_s)
        if in_time and self._process.poll() is None:
            return
        self.stop()
        reason = "ended before it was ready" if in_time else f"was not ready after {timeout_s:g} s"
        raise RivalFailed(f"transformers serve {reason}:\n" + "".join(self._lines))

    def _follow(self) -> None:
        """Reads the log to its end, so that the server never blocks on a full pipe."""
        process = self._process
        assert process is not None
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                self._lines.append(line)
                if READY_LINE in line:
                    self._ready.set()
        process.wait()
        self._ready.set()

    def wait(self) -> None:
        assert self._process is not None
        self._process.wait()

    def stop(self) -> None:
        """Ends this process and waits for it."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._follower.join(STOP_TIMEOUT_S)

    def __enter__(self) -> TransformersServe:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def exit_on_sigterm() -> None:
    """A terminated benchmark unwinds, and with it stops the server it started."""
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description="Serves until interrupted; other options go to transformers serve."
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="auto")
    args, options = parser.parse_known_args(argv)
    exit_on_sigterm()
    with TransformersServe(args.model, device=args.device, dtype=args.dtype, options=options) as server:
        print(server.url, flush=True)
        try:
            server.wait()
        except KeyboardInterrupt:
            print("stopping", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
