"""Waits that end inside the callback that has the news, a round of the event loop sooner than an Event's."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator
from contextvars import Context

_Resume = Callable[["_Nap"], object]


class Naps:
    """The tasks that wait for the same news. On one event loop."""

    def __init__(self) -> None:
        self._naps: list[_Nap] = []

    def nap(self) -> Awaitable[None]:
        """To be awaited at once."""
        nap = _Nap(asyncio.get_running_loop(), self._naps)
        self._naps.append(nap)
        return nap

    def end(self) -> None:
        """From a callback of the loop, never from a task: every task that waits runs on before this returns,
        and may call whatever it likes."""
        naps = self._naps.copy()
        self._naps.clear()
        for nap in naps:
            nap.end()

    def end_soon(self) -> None:
        """From anywhere on the loop."""
        naps = self._naps.copy()
        self._naps.clear()
        for nap in naps:
            nap.end_soon()


class _Nap:
    """What a task awaits, by asyncio's protocol of future-like objects: it hands over what resumes it. A
    Future
    would let the loop call that in its next round; here `end` calls it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, naps: list[_Nap]) -> None:
        self._asyncio_future_blocking = False
        self._loop = loop
        self._naps = naps  # all that wait
        self._resume: tuple[_Resume, Context | None] | None = None
        self._is_over = False
        self._is_cancelled = False

    def __await__(self) -> Generator[_Nap, None, None]:
        self._asyncio_future_blocking = True
        yield self

    def end(self) -> None:
        if not self._is_over and self._resume is not None:
            self._is_over = True
            resume, context = self._resume
            if context is None:
                resume(self)
            else:
                context.run(resume, self)

    def end_soon(self) -> None:
        if not self._is_over and self._resume is not None:
            self._is_over = True
            resume, context = self._resume
            self._loop.call_soon(resume, self, context=context)

    # --- what the task calls --------------------------------------------------------------------------------

    def add_done_callback(self, resume: _Resume, *, context: Context | None = None) -> None:
        assert self._resume is None, "one task waits"
        self._resume = resume, context

    def cancel(self, msg: object = None) -> bool:
        if self._is_over:
            return False
        self._is_cancelled = True
        if self in self._naps:
            self._naps.remove(self)
        self.end_soon()
        return True

    def result(self) -> None:
        assert self._is_over
        if self._is_cancelled:
            raise asyncio.CancelledError

    def get_loop(self) -> asyncio.AbstractEventLoop:
        return self._loop
