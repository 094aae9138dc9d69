"""Capturing CUDA graphs in a process whose threads share a device."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

# Held by whoever captures or waits for the whole device: waiting spoils what another thread is capturing.
DEVICE_LOCK = threading.RLock()
_abandoned: list[torch.cuda.CUDAGraph] = []


def synchronize(device: torch.device) -> None:
    """Waits until all that was launched on the device is done."""
    import torch  # contracts load without it

    with DEVICE_LOCK:
        torch.cuda.synchronize(device)


class GraphPool:
    """Memory that graphs have in common: what a graph computes is valid until the next replay of any.

    All are captured on one stream, since the allocator gives a freed block to its own stream alone: with a
    stream each, every graph would keep memory of its own. The largest first, and the others fit into it.
    """

    def __init__(self, device: torch.device, after: GraphPool | None = None) -> None:
        """`after`: whose stream is used on. What cuBLAS works with it keeps for each stream, in the memory of
        the pool that was captured into first, for as long as the process lives."""
        import torch  # contracts load without it

        self._device = device
        self._id = torch.cuda.graph_pool_handle()
        self._stream: torch.cuda.Stream
        if after is None:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        else:
            self._stream = after._stream

    def capture(self, run: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        """A graph of what `run` launches, and what it returns. It has run once, so that nothing is compiled
        here.

        Unlike `torch.cuda.graph`, this neither collects garbage nor empties the allocator's cache, which
        other threads are filling.
        """
        import torch

        graph = torch.cuda.CUDAGraph()
        with DEVICE_LOCK:
            torch.cuda.synchronize(self._device)
            with torch.cuda.stream(self._stream):
                graph.capture_begin(pool=self._id, capture_error_mode="thread_local")
                try:
                    result = run()
                    graph.capture_end()
                except BaseException:
                    self._abandon(graph)
                    raise
        return graph, result

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """Ends a capture that has failed: as torch's `capture_end` raises, the allocator still allocates for
        it, and would refuse the pool's next capture. It still asks the graph as well, which is kept."""
        import torch

        with contextlib.suppress(RuntimeError):
            graph.capture_end()
            return
        _abandoned.append(graph)
        with contextlib.suppress(RuntimeError):  # versions that have done it by themselves
            index = torch.cuda.current_device() if self._device.index is None else self._device.index
            torch._C._cuda_endAllocateToPool(index, self._id)
            torch._C._cuda_releasePool(index, self._id)

    @property
    def held_bytes(self) -> int:
        """Device memory of all its graphs. Looks through everything that the process has allocated."""
        return sum(size for _, pool, size in _segments() if pool == tuple(self._id))


def graph_bytes(device: torch.device) -> int:
    """Device memory that this process holds for graphs."""
    return sum(size for index, pool, size in _segments() if index == device.index and pool != (0, 0))


def _segments() -> Iterator[tuple[int, tuple[int, int], int]]:
    """Device, memory pool and bytes of what the allocator has of the driver."""
    import torch

    for segment in torch.cuda.memory_snapshot():  # type: ignore[no-untyped-call]
        yield segment["device"], tuple(segment["segment_pool_id"]), int(segment["total_size"])


def release_unused() -> None:
    """Gives back what the allocator keeps for later, of all devices: a first run that led to a graph has
    left as much as the graph has."""
    import torch

    with DEVICE_LOCK:
        torch.cuda.empty_cache()
