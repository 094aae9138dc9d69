"""A device in this process for the CUDA IPC edge: its sender's stream runs behind the host, as a GPU's
does."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from connectors.wire import DTYPES, nbytes_of
from contracts.chunks import TensorHeader

TIMEOUT_S = 60
_exported: dict[bytes, object] = {}  # what a handle opens, as a driver would


def export(thing: object) -> bytes:
    handle = str(id(thing)).encode()
    _exported[handle] = thing
    return handle


class Event:
    """As a CUDA event: a wait is for the last record before it."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._recorded = self._done = 0

    def record(self) -> Callable[[], None]:
        """Now by the host; the stream calls what is returned when it gets there."""
        with self._condition:
            self._recorded += 1
            number = self._recorded

        def reach() -> None:
            with self._condition:
                self._done = max(self._done, number)
                self._condition.notify_all()

        return reach

    def waiter(self) -> Callable[[], None]:
        number = self._recorded

        def wait() -> None:
            with self._condition:
                assert self._condition.wait_for(lambda: self._done >= number, TIMEOUT_S)

        return wait


class FakeSendLane:
    def __init__(self, nbytes: int, max_chunks: int) -> None:
        self.pool = torch.zeros(nbytes, dtype=torch.uint8)
        self.written = [Event() for _ in range(max_chunks)]
        self._read: list[Event] = []
        self._stream: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.go = threading.Event()  # the stream stands still until it is set
        self.go.set()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def carries(self, tensor: Tensor) -> bool:
        return tensor.dtype != torch.int32

    def export(self) -> bytes:
        return export(self)

    def meet(self, export: bytes) -> None:
        receiver = _exported[export]
        assert isinstance(receiver, FakeReceiveLane)
        self._read = receiver.was_read

    def write(self, slot: int, parts: Sequence[tuple[int, Tensor]]) -> None:
        for offset, tensor in parts:
            data = tensor.detach().resolve_conj().contiguous().view(-1).view(torch.uint8).clone()
            self._stream.put(lambda o=offset, d=data: self.pool[o : o + len(d)].copy_(d))
        self._stream.put(self.written[slot].record())

    def await_read(self, slot: int) -> None:
        self._stream.put(self._read[slot].waiter())

    def close(self) -> None:
        self.go.set()
        self._stream.put(None)
        self._thread.join(TIMEOUT_S)

    def _run(self) -> None:
        while (work := self._stream.get()) is not None:
            assert self.go.wait(TIMEOUT_S)
            work()


class FakeReceiveLane:
    def __init__(self, max_chunks: int) -> None:
        self.was_read = [Event() for _ in range(max_chunks)]
        self.num_met = 0
        self._sender: FakeSendLane | None = None

    def export(self) -> bytes:
        return export(self)

    def meet(self, export: bytes) -> None:
        sender = _exported[export]
        assert isinstance(sender, FakeSendLane)
        self._sender = sender
        self.num_met += 1

    def read(self, slot: int, parts: Sequence[tuple[int, TensorHeader]]) -> list[Tensor]:
        assert self._sender is not None
        self._sender.written[slot].waiter()()
        tensors = []
        for offset, header in parts:
            data = self._sender.pool[offset : offset + nbytes_of(header)].clone()
            tensors.append(data.view(DTYPES[header.dtype]).view(header.shape))
        self.was_read[slot].record()()
        return tensors

    def close(self) -> None: ...
