"""Mailbox: a queue that any thread fills and one event loop drains, woken by events, never polled."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """Bounded by its producers' own bounds (requests in flight); `put` never blocks."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._filled: asyncio.Event | None = None
        self._first_put_s = 0.0
        self.drained_since_s = 0.0  # monotonic: when the oldest of the items last drained was put

    def bind(self) -> None:
        """Called once on the loop that drains; items put earlier are kept."""
        with self._lock:
            self._loop = asyncio.get_running_loop()
            self._filled = asyncio.Event()
            if self._items:
                self._filled.set()

    def put(self, *items: T) -> None:
        self.put_all(items)

    def put_all(self, items: Sequence[T]) -> None:
        with self._lock:
            was_empty = not self._items
            self._items.extend(items)
            if was_empty:
                self._first_put_s = time.monotonic()
            loop, filled = self._loop, self._filled
            if items and was_empty and loop is not None and filled is not None and not loop.is_closed():
                loop.call_soon_threadsafe(filled.set)

    async def drain(self) -> list[T]:
        """Waits until there is something, then takes everything."""
        assert self._filled is not None, "bind() first"
        while True:
            await self._filled.wait()
            with self._lock:
                self._filled.clear()
                items = list(self._items)
                self.drained_since_s = self._first_put_s
                self._items.clear()
            if items:
                return items
