"""The in-process connector: hands tensors over between two event loops (usually two threads), with real
credits."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from connectors.stats import EdgeStats
from contracts.chunks import Chunk
from contracts.errors import PeerLost


@dataclass
class _Waiter:
    """A task of some loop that waits for the channel to change; woken from any thread."""

    loop: asyncio.AbstractEventLoop
    event: asyncio.Event

    def wake(self) -> None:
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.event.set)


class _Sent(NamedTuple):
    chunk: Chunk
    nbytes: int
    at_s: float  # monotonic


@dataclass
class _Channel:
    """State shared by both ends, guarded by `lock`.

    credits + len(queue) + len(unreleased) == capacity at every unlock.
    """

    name: str
    capacity: int
    lock: threading.Lock = field(default_factory=threading.Lock)
    credits: int = 0
    queue: deque[_Sent] = field(default_factory=deque)
    unreleased: dict[int, Chunk] = field(
        default_factory=dict
    )  # id(chunk) → chunk: received, credit not returned
    send_cancelled: set[str] = field(default_factory=set)
    next_seq: dict[tuple[str, str], int] = field(default_factory=dict)
    sender_waiters: list[_Waiter] = field(default_factory=list)
    receiver_waiters: list[_Waiter] = field(default_factory=list)
    sender_closed: bool = False
    receiver_closed: bool = False
    sent: EdgeStats = field(default_factory=EdgeStats)
    received: EdgeStats = field(default_factory=EdgeStats)

    def check(self) -> None:
        held = self.credits + len(self.queue) + len(self.unreleased)
        assert held == self.capacity, f"edge {self.name}: {held} credits of {self.capacity}"


def _wake_all(waiters: list[_Waiter]) -> None:
    woken = list(waiters)
    waiters.clear()
    for waiter in woken:
        waiter.wake()


class InprocSender:
    def __init__(self, channel: _Channel) -> None:
        self._channel = channel

    @property
    def stats(self) -> EdgeStats:
        return self._channel.sent

    async def send(self, chunk: Chunk) -> None:
        """See `connectors.interface.Sender`. The tensors are handed over, not copied: do not write to them
        after."""
        channel = self._channel
        waiting_since: float | None = None
        while True:
            waiter = _Waiter(asyncio.get_running_loop(), asyncio.Event())
            with channel.lock:
                if channel.receiver_closed or channel.sender_closed:
                    raise PeerLost(f"edge {channel.name} is closed", request_id=chunk.request_id)
                if chunk.request_id in channel.send_cancelled:
                    return
                if channel.credits > 0:
                    self._enqueue([chunk])
                    if waiting_since is not None:
                        channel.sent.wait.add(time.monotonic() - waiting_since)
                    return
                if waiting_since is None:
                    waiting_since = time.monotonic()
                    channel.sent.waits_total += 1
                channel.sender_waiters.append(waiter)
            await waiter.event.wait()

    def send_now(self, chunks: Sequence[Chunk]) -> int:
        channel = self._channel
        with channel.lock:
            if channel.receiver_closed or channel.sender_closed:
                raise PeerLost(f"edge {channel.name} is closed")
            taken = chunks if channel.credits >= len(chunks) else chunks[: channel.credits]
            cancelled = channel.send_cancelled
            self._enqueue([chunk for chunk in taken if chunk.request_id not in cancelled])
            return len(taken)

    def _enqueue(self, chunks: Sequence[Chunk]) -> None:
        channel, now = self._channel, time.monotonic()
        for chunk in chunks:
            key = (chunk.request_id, chunk.stream)
            expected = channel.next_seq.get(key, 0)
            assert chunk.seq == expected, f"edge {channel.name}: {key} sends {chunk.seq}, expected {expected}"
            if chunk.last:
                channel.next_seq.pop(key, None)
            else:
                channel.next_seq[key] = expected + 1
            sent = _Sent(chunk, chunk.nbytes, now)
            channel.credits -= 1
            channel.queue.append(sent)
            channel.sent.chunks_total += 1
            channel.sent.bytes_total += sent.nbytes
        channel.check()
        if channel.queue:
            _wake_all(channel.receiver_waiters)

    def cancel(self, request_id: str) -> None:
        """Drops what is queued of the request; a send of it that waits returns. Forgotten with `forget`."""
        with self._channel.lock:
            self._channel.send_cancelled.add(request_id)
            _drop_queued(self._channel, request_id)
            for key in [key for key in self._channel.next_seq if key[0] == request_id]:
                del self._channel.next_seq[key]
            _wake_all(self._channel.sender_waiters)

    def forget(self, request_id: str) -> None:
        """No more chunks of the request will be sent: drops the memory of its cancellation."""
        with self._channel.lock:
            self._channel.send_cancelled.discard(request_id)

    def close(self) -> None:
        with self._channel.lock:
            self._channel.sender_closed = True
            _wake_all(self._channel.receiver_waiters)
            _wake_all(self._channel.sender_waiters)


class InprocReceiver:
    hands_over = True

    def __init__(self, channel: _Channel) -> None:
        self._channel = channel

    @property
    def stats(self) -> EdgeStats:
        return self._channel.received

    async def receive(self) -> Chunk:
        """See `connectors.interface.Receiver`. What was sent before the sender closed is still delivered."""
        channel = self._channel
        while True:
            waiter = _Waiter(asyncio.get_running_loop(), asyncio.Event())
            with channel.lock:
                if channel.queue:
                    return self._take()
                if channel.sender_closed or channel.receiver_closed:
                    raise PeerLost(f"edge {channel.name} is closed")
                channel.receiver_waiters.append(waiter)
            await waiter.event.wait()

    def receive_now(self) -> list[Chunk]:
        channel = self._channel
        with channel.lock:
            return [self._take() for _ in range(len(channel.queue))]

    def _take(self) -> Chunk:
        channel = self._channel
        chunk, nbytes, sent_s = channel.queue.popleft()
        stats = channel.received
        stats.chunks_total += 1
        stats.bytes_total += nbytes
        stats.wait.add(time.monotonic() - sent_s)
        channel.unreleased[id(chunk)] = chunk
        channel.check()
        return chunk

    async def renewed(self) -> None:
        """Never returns: both ends live and die with one process."""
        await asyncio.Event().wait()

    def release(self, *chunks: Chunk) -> None:
        with self._channel.lock:
            for chunk in chunks:
                held = self._channel.unreleased.pop(id(chunk), None)
                assert held is chunk, f"edge {self._channel.name}: released a chunk that is not held"
                self._channel.credits += 1
            self._channel.check()
            _wake_all(self._channel.sender_waiters)

    def cancel(self, request_id: str) -> None:
        with self._channel.lock:
            _drop_queued(self._channel, request_id)
            _wake_all(self._channel.sender_waiters)

    def close(self) -> None:
        with self._channel.lock:
            self._channel.receiver_closed = True
            self._channel.credits += len(self._channel.queue)
            self._channel.queue.clear()
            _wake_all(self._channel.sender_waiters)
            _wake_all(self._channel.receiver_waiters)


def _drop_queued(channel: _Channel, request_id: str) -> None:
    kept = deque(entry for entry in channel.queue if entry.chunk.request_id != request_id)
    channel.credits += len(channel.queue) - len(kept)
    channel.queue = kept
    channel.check()


def inproc_pair(name: str, capacity: int) -> tuple[InprocSender, InprocReceiver]:
    """Both ends of an edge with `capacity` credits (chunks sent and not yet released)."""
    assert capacity > 0, f"edge {name}: capacity {capacity}"
    channel = _Channel(name=name, capacity=capacity, credits=capacity)
    return InprocSender(channel), InprocReceiver(channel)
