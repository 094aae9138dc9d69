"""A tower of one product, and a recorder that stands for CUDA graphs: it runs what it recorded once more."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from encoder_pool.graphs import Forward, GraphedTower, Run, TowerGraphs
from encoder_pool.model import GraphBounds

Sizes = tuple[int, ...]  # rows of each item


class Reruns:
    """`runs` counts what was run again. `held_bytes` is what `hold` says of the number of graphs. Of a run
    whose number is in `fails` nothing can be recorded; runs count from 0, the largest one is the first."""

    def __init__(self, hold: Callable[[int], int] = lambda graphs: 0, fails: tuple[int, ...] = ()) -> None:
        self.recorded = self.runs = 0
        self._hold, self._fails = hold, fails

    def record(self, run: Run) -> Run:
        run()
        self.recorded += 1
        if self.recorded - 1 in self._fails:
            raise RuntimeError("cannot be captured")
        return lambda: self._rerun(run)

    def _rerun(self, run: Run) -> None:
        self.runs += 1
        run()

    @property
    def held_bytes(self) -> int:
        return self._hold(self.recorded)


class SumTower(GraphedTower[Sizes]):
    """Two rows of width 3, to which each item adds its size, are a token of width 2. `laid_out`: what was
    prepared."""

    embedding_width = 2
    dtype = torch.float32
    device = torch.device("cpu")

    def __init__(self) -> None:
        self.weight = torch.arange(6.0).view(3, 2)
        self.laid_out: list[Sizes] = []

    def max_rows(self, bounds: GraphBounds) -> int:
        return bounds.max_tokens * 2

    def input_shape(self, key: Sizes) -> tuple[int, ...]:
        return sum(key), 3

    def num_tokens(self, key: Sizes) -> int:
        return sum(key) // 2

    def prepared(self, key: Sizes) -> Forward:
        assert sum(key), "an empty batch"
        self.laid_out.append(key)
        size_N1 = torch.tensor([float(size) for size in key for _ in range(size)]).unsqueeze(1)
        return lambda x_N3: ((x_N3 + size_N1) @ self.weight).view(-1, 2, 2).sum(1)

    def largest(self, num_rows: int) -> Sizes:
        return (num_rows,)

    def embed(self, *items: Tensor) -> list[Tensor]:
        def write(x_N3: Tensor) -> None:
            torch.cat(items, out=x_N3)

        return self.compute(tuple(map(len, items)), [len(item) // 2 for item in items], write)


def graphed(*recorders: Reruns, num_bytes: int = 1 << 20, max_rows: int = 64) -> SumTower:
    """Its graphs are of the recorders, one after another."""
    tower, left = SumTower(), list(recorders)
    tower.graphs = TowerGraphs(tower, num_bytes, max_rows, lambda: left.pop(0))
    return tower


def rows(num_rows: int, seed: int = 0) -> Tensor:
    return torch.randn(num_rows, 3, generator=torch.Generator().manual_seed(seed))


class HostQuestions(TorchDispatchMode):
    """Refuses what a capture would: values that the host reads, and tensors that it makes."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        asked = {"_local_scalar_dense", "nonzero", "masked_select", "unique", "lift_fresh", "lift_fresh_copy"}
        assert func.overloadpacket._qualified_op_name.removeprefix("aten::") not in asked, func
        return func(*args, **kwargs or {})
