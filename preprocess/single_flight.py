"""Work that several callers want at the same time, done once for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


@dataclass(eq=False)
class _Flight(Generic[T]):
    task: asyncio.Task[T]
    waiters: int = 0


class SingleFlight(Generic[K, T]):
    """On one event loop. What is made belongs to all callers alike: nobody may change or release it."""

    def __init__(self) -> None:
        self._flights: dict[K, _Flight[T]] = {}

    def __len__(self) -> int:
        return len(self._flights)

    async def join(self, key: K, make: Callable[[], Coroutine[None, None, T]]) -> T:
        """What `make` gives, or raises, for whoever asks first; it is cancelled when its last caller is."""
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = _Flight(asyncio.create_task(make()))
        flight.waiters += 1
        try:
            return await asyncio.shield(flight.task)
        finally:
            flight.waiters -= 1
            if flight.waiters == 0:
                del self._flights[key]
                _end(flight.task)


def _end(task: asyncio.Task[T]) -> None:
    if not task.done():
        task.cancel()
    elif not task.cancelled():
        task.exception()  # all who would have seen it have left
