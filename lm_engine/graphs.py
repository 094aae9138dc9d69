"""CUDA graphs of decode steps: one per batch size, from the request table to the drawn tokens.

Shapes: R rows of the step, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from lm_engine.capture import GraphRecorder
from lm_engine.devices import companion_threads
from lm_engine.layers.mlp import has_grouped_product
from lm_engine.model import AttentionBackend, DecoderModel, PagedKV
from lm_engine.plan import StepPlan
from lm_engine.request_table import RequestTable
from lm_engine.sampler import Sampled

if TYPE_CHECKING:
    from lm_engine.triton.step import DecodeBuffers

logger = logging.getLogger(__name__)

COMPILE_THREADS = 8
BATCH_SIZES = (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256)
GATED_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
Size = TypeVar("Size")


class StepKind(NamedTuple):
    """What a graph is for: steps of up to so many sequences. `gated`: a picture adapter takes part."""

    size: int
    gated: bool = False


class DecodeGraphs(Protocol):
    """Decode steps of up to `max_rows` sequences. Called from one thread, on one stream."""

    max_rows: int

    def replay(self, packed_4R: np.ndarray, *, gated: bool = False) -> tuple[Tensor, Sampled]:
        """Runs the step of `RequestTable.pack_decodes`; `gated`: a picture adapter takes part. The logits
        [R, V] are valid, and may be spent, until
        the next replay; the tokens, drawn greedily or by plain temperature, are the caller's."""
        ...

    def compile_all(self) -> None:
        """Compiles what `capture_all` will need, on several threads: steps run here in any order."""
        ...

    def capture_all(self) -> int:
        """Captures what is not captured yet, one after another; returns the number of graphs."""
        ...

    def capture_next(self) -> bool:
        """Captures the largest batch that is not captured yet; False: all are. Smaller steps run as the
        next larger captured batch, so that after the first call no step waits for a capture."""
        ...


def takes(graphs: DecodeGraphs, plan: StepPlan) -> bool:
    """Whether the plan is nothing but decodes that all sample."""
    if plan.admissions or plan.span_pieces or not 0 < len(plan.sequences) <= graphs.max_rows:
        return False
    return all(s.num_tokens == 1 and s.samples and len(s.new_block_ids) <= 1 for s in plan.sequences)


def can_capture(model: DecoderModel, attention: AttentionBackend) -> bool:
    """Not without a GPU, and not what asks the host in the middle: other attention, experts in a loop."""
    if model.device.type != "cuda" or attention.name != "triton":
        return False
    return model.config.moe is None or has_grouped_product(model.device, model.dtype)


def make_decode_graphs(
    model: DecoderModel, attention: AttentionBackend, kv: PagedKV, table: RequestTable
) -> DecodeGraphs | None:
    """None where steps cannot be captured."""
    if not can_capture(model, attention):
        return None
    return CapturedDecodes(model, attention, kv, table)


def step_kinds(max_rows: int, *, gated: bool) -> list[StepKind]:
    """Of all graphs of steps up to `max_rows`, the smallest first; `gated`: with those of an adapter."""
    plain = [StepKind(size) for size in BATCH_SIZES if size < max_rows] + [StepKind(max_rows)]
    if not gated:
        return plain
    adapted = [StepKind(size, True) for size in GATED_SIZES if size < max_rows] + [StepKind(max_rows, True)]
    return sorted(plain + adapted)


def stand_in(size: int, captured: Iterable[int]) -> int:
    """What a step of `size` runs as: the smallest captured batch that holds it, else itself, which is to be
    captured. Padding takes less time than a capture, for which everybody would wait."""
    return min((other for other in captured if other >= size), default=size)


def graph_for(kind: StepKind, kinds: Iterable[StepKind], captured: Iterable[StepKind]) -> StepKind:
    """As `stand_in`, of `kinds`: where an adapter takes part it need not change a row."""

    def smallest(among: Iterable[StepKind]) -> StepKind | None:
        fitting = (other for other in among if other.size >= kind.size and other.gated >= kind.gated)
        return min(fitting, default=None)

    found = smallest(captured) or smallest(k for k in kinds if k.gated == kind.gated)
    assert found is not None, f"no graph is for {kind}"
    return found


def compile_ahead(run: Callable[[Size], None], sizes: Sequence[Size], device: torch.device) -> None:
    """Runs all sizes once, on several threads. The first goes alone: most kernels are the same for all."""
    from lm_engine.triton.launch import compiling_ahead

    if not sizes:
        return
    with compiling_ahead():
        run(sizes[0])
        with companion_threads(device, "compile", COMPILE_THREADS) as threads:
            list(threads.map(run, sizes[1:]))


@dataclass(frozen=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    buffers: DecodeBuffers
    logits_RV: Tensor  # the graph's own memory


class CapturedDecodes:
    """Borrows model, cache and table; their memory must stay where it is.

    A step of R rows runs as the next larger batch. Padding rows compute one token into the scratch
    block and write nothing else.
    """

    def __init__(
        self, model: DecoderModel, attention: AttentionBackend, kv: PagedKV, table: RequestTable
    ) -> None:
        self.max_rows = min(table.max_sequences, BATCH_SIZES[-1])
        self._model, self._attention, self._kv, self._table = model, attention, kv, table
        self._arrivals_R = torch.zeros(self.max_rows, dtype=torch.int32, device=table.device)
        self._recorder = GraphRecorder(table.device)
        self._kinds = step_kinds(self.max_rows, gated=table.gated_from is not None)
        self._captured: dict[StepKind, _Captured] = {}

    def replay(self, packed_4R: np.ndarray, *, gated: bool = False) -> tuple[Tensor, Sampled]:
        num_rows = packed_4R.shape[1]
        kind = graph_for(StepKind(num_rows, gated), self._kinds, self._captured)
        captured = self._captured.get(kind) or self._capture(kind)
        padded_4B = np.zeros((4, kind.size), dtype=np.int32)
        padded_4B[0] = -1
        padded_4B[:, :num_rows] = packed_4R
        captured.buffers.packed_4R.copy_(torch.from_numpy(padded_4B).pin_memory(), non_blocking=True)
        captured.graph.replay()
        # A copy: the next replay may come before the results are with the host.
        token_R, valid_R = captured.buffers.results_2R[:, :num_rows].clone().unbind(0)
        return captured.logits_RV[:num_rows], Sampled(token_R, valid_R, None)

    def compile_all(self) -> None:
        compile_ahead(self.run_once, self.missing(), self._table.device)

    def capture_all(self) -> int:
        with torch.inference_mode():
            for kind in self.missing():
                self._capture(kind)
        return len(self._captured)

    def capture_next(self) -> bool:
        missing = self.missing()
        with torch.inference_mode():
            for kind in missing[:1]:
                self._capture(kind)
        return bool(missing)

    def missing(self) -> list[StepKind]:
        """Batches that are not captured yet, the largest first, with an adapter before without: that one is
        right for all."""
        return sorted(set(self._kinds) - self._captured.keys(), reverse=True)

    @torch.inference_mode()
    def run_once(self, kind: StepKind) -> None:
        """The step of padding alone, on the current stream."""
        from lm_engine.triton.step import DecodeBuffers

        self._run(DecodeBuffers.allocate(kind.size, self._table, gated=kind.gated))

    def _capture(self, kind: StepKind) -> _Captured:
        from lm_engine.triton.step import DecodeBuffers

        buffers = DecodeBuffers.allocate(kind.size, self._table, gated=kind.gated)
        graph, logits_RV = self._recorder.record(lambda: self._run(buffers))
        captured = self._captured[kind] = _Captured(graph, buffers, logits_RV)
        logger.info("captured the decode step of %d sequences", kind.size)
        return captured

    def _run(self, buffers: DecodeBuffers) -> Tensor:
        from lm_engine.triton.step import draw, prepare_inputs

        model = self._model
        prepare_inputs(buffers, self._table)
        hidden_RH = model.embed(buffers.token_ids_R)
        hidden_RH = model.forward(
            hidden_RH, buffers.positions_AR, self._kv, self._attention, buffers.metadata
        )
        logits_RV = model.logits(hidden_RH)
        draw(logits_RV, buffers, self._table, self._arrivals_R)
        return logits_RV
