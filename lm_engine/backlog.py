"""Backlog: what a thread that runs steps also has to do, a piece at a time between them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Protocol

logger = logging.getLogger(__name__)

SHARE = 0.1  # of the thread's time
FIRST_REST_S = 1.0  # those who waited for the start go first


class Graphs(Protocol):
    """Of steps, one for each size."""

    def capture_next(self) -> bool: ...


def capture_later(executor: Executor, *kinds: Graphs | None) -> Backlog | None:
    """Captures the largest graph of each kind now, the others by a backlog; None: there are no graphs."""
    graphs = [one for one in kinds if one is not None]
    for one in graphs:
        executor.submit(one.capture_next).result()

    def capture_next() -> bool:
        captured = any(one.capture_next() for one in graphs)  # one alone: the first that has any left
        if not captured:
            logger.info("all graphs are captured")
        return captured

    return Backlog(executor, capture_next) if graphs else None


class Backlog:
    """`do_next` does a piece and tells whether there was one; on the executor's one thread, so never beside a
    step. It rests after each for as long as leaves the steps nine tenths of the time. A piece that raises is
    the last."""

    def __init__(
        self,
        executor: Executor,
        do_next: Callable[[], bool],
        *,
        rest: Callable[[threading.Event, float], bool] = threading.Event.wait,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`rest`: waits for so many seconds or for the event; whether it was the event."""
        self._executor, self._do_next = executor, do_next
        self._rest, self._clock = rest, clock
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="backlog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Lets the piece under way end, begins no other. Before the executor is shut down."""
        self._closing.set()
        self._thread.join()

    def join(self) -> None:
        """Until nothing is left."""
        self._thread.join()

    def _work(self) -> None:
        rest_s = FIRST_REST_S
        while not self._rest(self._closing, rest_s):
            took = self._executor.submit(self._timed)
            if (error := took.exception()) is not None:
                logger.error("what was left for later is left out", exc_info=error)
                return
            seconds = took.result()
            if seconds is None:
                return
            rest_s = seconds * (1 / SHARE - 1)

    def _timed(self) -> float | None:
        """Seconds that a piece took; None when nothing was left."""
        began_s = self._clock()
        return self._clock() - began_s if self._do_next() else None
