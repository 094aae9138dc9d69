"""Recording of CUDA graphs: one at a time in a process, each on a stream of its own GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from contracts.capture import DEVICE_LOCK, capture

T = TypeVar("T")


class GraphRecorder:
    """Its graphs share one pool of memory: what a graph computes is valid until the next replay of any."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, run: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        """The graph, and where its result lies. Runs twice: what is new is compiled first, which a capture
        must not."""
        with DEVICE_LOCK:
            run()
            return capture(run, self._device, self._pool)
