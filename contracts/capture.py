"""Capturing CUDA graphs in a process whose threads share a device."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

# Held by whoever captures or waits for the whole device: waiting spoils what another thread is capturing.
DEVICE_LOCK = threading.RLock()


def synchronize(device: torch.device) -> None:
    """Waits until all that was launched on the device is done."""
    import torch  # contracts load without it

    with DEVICE_LOCK:
        torch.cuda.synchronize(device)


def capture(run: Callable[[], T], device: torch.device, pool: Any) -> tuple[torch.cuda.CUDAGraph, T]:
    """A graph of what `run` launches, and what it returns, whose memory is the graph's own and, with all
    graphs
    of `pool`, used again by the next replay. It has run once, so that nothing is compiled here.

    Unlike `torch.cuda.graph`, this neither collects garbage nor empties the allocator's cache, which other
    threads are filling.
    """
    import torch

    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with DEVICE_LOCK:
        torch.cuda.synchronize(device)
        with torch.cuda.stream(stream):
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                result = run()
            finally:
                graph.capture_end()
    return graph, result
