"""The other process of a test of two, and how it is spoken to."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence

import msgspec


@contextlib.contextmanager
def child_process(
    module: str, role: str, described: Sequence[msgspec.Struct], fds: Sequence[int] = ()
) -> Iterator[subprocess.Popen[str]]:
    """`python -m module role <the edges>`; killed at the end."""
    arguments = [msgspec.json.encode(edge).decode() for edge in described]
    command = [sys.executable, "-m", module, role, *arguments]
    process = subprocess.Popen(command, pass_fds=tuple(fds), stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


async def word(process: subprocess.Popen[str]) -> str:
    """The next line that it says."""
    assert process.stdout is not None
    return (await asyncio.to_thread(process.stdout.readline)).strip()


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()
