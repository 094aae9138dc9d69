"""A training step that is launched once: on a GPU its thousands of small kernels are recorded as one graph
for each shape of input, and replayed. Elsewhere, and where that is not wanted, it is a plain call.

What is recorded reads its input where the recording read it, so input is copied there; it may not wait for
the device, and what changes from step to step (rates, averages) has to lie in tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Figures = dict[str, Tensor]
WARM_UPS = 3


@dataclass(frozen=True, eq=False)
class _Recorded:
    graph: torch.cuda.CUDAGraph
    inputs: tuple[Tensor, ...]
    figures: Figures


class Stepper:
    """`step` takes tensors and returns scalars, detached. Its first calls with a new shape run plainly, each
    of them a step; no other thread may use the device while the next is recorded."""

    def __init__(self, step: Callable[..., Figures], device: torch.device, *, recorded: bool) -> None:
        self._step, self._device = step, device
        self._records = recorded and device.type == "cuda"
        self._recorded: dict[tuple[torch.Size, ...], _Recorded] = {}
        self._calls: dict[tuple[torch.Size, ...], int] = {}
        self._stream = torch.cuda.Stream(device) if self._records else None  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle() if self._records else None

    def __call__(self, *inputs: Tensor) -> Figures:
        if not self._records:
            return self._step(*inputs)
        shape = tuple(tensor.shape for tensor in inputs)
        if (found := self._recorded.get(shape)) is not None:
            for target, source in zip(found.inputs, inputs, strict=True):
                target.copy_(source)
            found.graph.replay()
            return found.figures
        self._calls[shape] = self._calls.get(shape, 0) + 1
        if self._calls[shape] > WARM_UPS:
            self._recorded[shape] = self._record(inputs)
        return self._plainly(inputs)

    def _plainly(self, inputs: tuple[Tensor, ...]) -> Figures:
        assert self._stream is not None
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            figures = self._step(*inputs)
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return figures

    def _record(self, inputs: tuple[Tensor, ...]) -> _Recorded:
        torch.cuda.synchronize(self._device)
        static = tuple(tensor.clone() for tensor in inputs)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            figures = self._step(*static)
        return _Recorded(graph, static, figures)
