"""How a command ends at a signal while it still imports and loads: at once, however long that would go on."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM)
CLEANING_LIMIT_S = 3.0  # for ending what was started so far, of which some waits for threads that load


def at_once(message: str, status: int) -> NoReturn:
    """Ends the process without waiting for its threads: one that imports or loads cannot be stopped and holds
    nothing that outlives the process. Children are told by the kernel (`stages.prctl`)."""
    logging.shutdown()
    if message:
        os.write(2, f"omnistage: {message}\n".encode())  # a signal may have come amid a print
    os._exit(status)


@contextmanager
def ended_by_signals(message: str, status: int) -> Iterator[None]:
    """Within it, where no loop has taken them over, SIGINT and SIGTERM end the process, as they would by
    default; but also as the first process of a container, which the kernel spares signals that nobody
    handles."""
    if sys.platform == "win32":
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        at_once(message, status)

    before = {number: signal.signal(number, end) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def on_signals(stop: Callable[[], object]) -> None:
    """On the running loop."""
    if sys.platform == "win32":
        return  # Ctrl-C still arrives, as KeyboardInterrupt
    for number in SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, stop)
