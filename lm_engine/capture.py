"""Recording of CUDA graphs: one at a time in a process, each on a stream of its own GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TypeVar

import torch

from contracts.capture import DEVICE_LOCK, GraphPool

T = TypeVar("T")


class GraphRecorder:
    def __init__(self, device: torch.device) -> None:
        self._device = device

    @cached_property
    def _pool(self) -> GraphPool:
        return GraphPool(self._device)

    def record(self, run: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        """The graph, and where its result lies. Runs twice: what is new is compiled first, which a capture
        must not."""
        with DEVICE_LOCK:
            run()
            return self._pool.capture(run)
