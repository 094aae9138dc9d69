"""Waiting for a condition of a loop's own state: looked at after each round in which something happened."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable


class WatchedLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        super().__init__()
        self._watched: dict[asyncio.Future[None], Callable[[], bool]] = {}

    def watch(self, condition: Callable[[], bool]) -> asyncio.Future[None]:
        """Done when the condition holds. What changes it must happen on this loop, or wake it."""
        future = self.create_future()
        self._watched[future] = condition
        return future

    def _run_once(self) -> None:
        super()._run_once()  # type: ignore[misc]
        for future, condition in list(self._watched.items()):
            if future.done() or condition():
                del self._watched[future]
                if not future.done():
                    future.set_result(None)


async def until(condition: Callable[[], bool]) -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, WatchedLoop), "the test does not run on a WatchedLoop"
    while not condition():
        await loop.watch(condition)


def run_watched(scenario: Callable[[], Awaitable[None]], timeout_s: float) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(timeout_s):
            await scenario()

    with asyncio.Runner(loop_factory=WatchedLoop) as runner:
        runner.run(bounded())
