"""Recording of CUDA graphs: one at a time in a process, each on a stream of its own GPU."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")

# A capture must not meet another's synchronisation of the device.
_one_at_a_time = threading.Lock()


class GraphRecorder:
    """Its graphs share one pool of memory: what a graph computes is valid until the next replay of any."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        # torch's own stream for captures is one for the process, on the GPU that captured first.
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def record(self, run: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        """The graph, and where its result lies. Runs twice: what is new is compiled first, which a capture
        must
        not."""
        with _one_at_a_time:
            run()
            torch.cuda.synchronize(self._device)
            graph = torch.cuda.CUDAGraph()
            # Other threads (encoders, copies) may use CUDA meanwhile.
            with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                result = run()
        return graph, result
