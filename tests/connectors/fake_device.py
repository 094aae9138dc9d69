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


class FakeCopying:
    def __init__(self, done: threading.Event) -> None:
        self._done = done

    def is_complete(self) -> bool:
        return self._done.is_set()

    def wait(self) -> None:
        assert self._done.wait(TIMEOUT_S)


class FakeSendLane:
    def __init__(self, nbytes: int) -> None:
        self.pool = torch.zeros(nbytes, dtype=torch.uint8)
        self.was_read: bool | None = None  # as `close` was told
        self._stream: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self.go = threading.Event()  # the stream stands still until it is set
        self.go.set()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def carries(self, tensor: Tensor) -> bool:
        return tensor.dtype != torch.int32

    def export(self) -> bytes:
        return export(self)

    def write(self, parts: Sequence[tuple[int, Tensor]]) -> FakeCopying:
        for offset, tensor in parts:
            data = tensor.detach().resolve_conj().contiguous().view(-1).view(torch.uint8).clone()
            self._stream.put(lambda o=offset, d=data: self.pool[o : o + len(d)].copy_(d))
        done = threading.Event()
        self._stream.put(done.set)
        return FakeCopying(done)

    def close(self, *, is_read: bool) -> None:
        self.was_read = is_read
        self.go.set()
        self._stream.put(None)
        self._thread.join(TIMEOUT_S)

    def _run(self) -> None:
        while (work := self._stream.get()) is not None:
            assert self.go.wait(TIMEOUT_S)
            work()


class FakeReceiveLane:
    def __init__(self) -> None:
        self.num_met = 0
        self._sender: FakeSendLane | None = None

    def meet(self, export: bytes) -> None:
        sender = _exported[export]
        assert isinstance(sender, FakeSendLane)
        self._sender = sender
        self.num_met += 1

    def read(self, parts: Sequence[tuple[int, TensorHeader]]) -> list[Tensor]:
        assert self._sender is not None
        tensors = []
        for offset, header in parts:
            data = self._sender.pool[offset : offset + nbytes_of(header)].clone()
            tensors.append(data.view(DTYPES[header.dtype]).view(header.shape))
        return tensors

    def close(self) -> None: ...
