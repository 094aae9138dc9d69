"""Executes step plans on the device, in order, on a thread of its own.

Shapes: T tokens of a step, A position axes, H hidden, K deepstack levels, S sampling rows, V vocabulary.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from contracts.messages import TokenLogprobs
from lm_engine.alignment import first_positions, smoothed
from lm_engine.backlog import Backlog, capture_later
from lm_engine.devices import enter_device
from lm_engine.graphs import DecodeGraphs, make_decode_graphs, takes
from lm_engine.host_copies import HostCopies
from lm_engine.logits_rule import LogitsRule
from lm_engine.model import AligningModel, AttentionBackend, DecoderModel, PagedKV
from lm_engine.native.decodes import NativeDecodes, make_decodes
from lm_engine.passes import MixedPasses, make_passes
from lm_engine.plan import (
    AlignmentRead,
    HiddenRead,
    SampledToken,
    SequenceStep,
    SpanPiece,
    StepPlan,
    StepResult,
)
from lm_engine.request_table import RequestTable, StepInputs
from lm_engine.row_sampler import RowSampler, make_draws
from lm_engine.sampler import Logprobs, Sampled
from lm_engine.table_kernels import make_table_kernels, place_rows, rehearse_spans
from lm_engine.transfer import moved, stream_entry


class Completion(Protocol):
    def synchronize(self) -> None:
        """Waits for it. Raises EngineError when the step failed."""
        ...


@dataclass(frozen=True)
class LaunchedStep:
    """A step whose kernels are under way: host copies of its results are complete once `done` is."""

    step_id: int
    slots_S: tuple[int, ...]
    num_top_S: tuple[int | None, ...]  # alternatives each row wants; None = no log-probabilities
    results: Sampled | None
    done: Completion | None  # None: already complete
    hidden: tuple[Tensor, ...] = ()
    affinities: tuple[Tensor, ...] = ()  # [tokens, positions] of each alignment read


class Runner:
    """Owns the request table; borrows model and KV cache.

    `submit` never blocks. Steps run in the order of submission, each on what the one before left on the
    device, so a plan may be submitted before the previous result is known. A step that raises fails its own
    future; the next one runs. Embeddings of span pieces must be ready in the device's default stream.
    """

    def __init__(
        self,
        model: DecoderModel,
        attention: AttentionBackend,
        kv: PagedKV,
        *,
        max_sequences: int,
        max_length: int,
        cuda_graphs: bool = True,
        rule: LogitsRule | None = None,
        own_stream: bool = False,
    ) -> None:
        """`own_stream`: of high priority, so that an encoder on the same GPU gives way to every step; for a
        model whose hidden states nobody takes, who would look for them in the default stream.

        `cuda_graphs`: decode steps and small mixed ones are captured on first use and replayed, where
        device and attention allow; native kernels are given whole decode steps. `rule`: what the model's
        family forbids as the next token."""
        self.model = model
        self.attention = attention
        self.kv = kv
        self.table = RequestTable(
            vocab_size=model.config.vocab_size,
            num_axes=model.config.num_position_axes,
            max_sequences=max_sequences,
            max_length=max_length,
            block_size=kv.block_size,
            device=model.device,
            kernels=make_table_kernels(model.device, attention),
            gated=model.config.picture_adapter is not None,
        )
        self._sample = RowSampler(self.table, rule, make_draws(self.table, attention))
        self._copies = HostCopies(model.device)
        self._graphs: DecodeGraphs | None = None
        self._passes: MixedPasses | None = None
        self._decodes: NativeDecodes | None = None
        self._backlog: Backlog | None = None
        if cuda_graphs and rule is None:
            self._graphs = make_decode_graphs(model, attention, kv, self.table)
            self._passes = make_passes(model, attention, kv, self.table)
            self._decodes = make_decodes(model, attention, kv, self.table)
        assert not own_stream or kv.hidden is None, "hidden states are handed over in the default stream"
        enter = stream_entry(model.device) if own_stream else partial(enter_device, model.device)
        self._launcher = ThreadPoolExecutor(1, thread_name_prefix="runner-launch", initializer=enter)
        # What is collected without an event (alignments) is ordered by being of the same stream.
        self._collector = ThreadPoolExecutor(1, thread_name_prefix="runner-collect", initializer=enter)

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        launched = self._launcher.submit(self._launch, plan)
        return self._collector.submit(lambda: collect(launched.result()))

    def capture_graphs(self, *, compiled: bool = False) -> int:
        """Captures all graphs now rather than on first use; returns their number. Blocks for seconds.
        `compiled`: their kernels are in Triton's cache, so that threads would only get into each other's
        way."""
        self._launcher.submit(self._rehearse).result()
        graphs, passes = self._graphs, self._passes
        if graphs is None or passes is None:
            return 0

        def capture() -> int:
            if not compiled:
                self._compile(graphs)
            return graphs.capture_all() + passes.capture_all()

        return self._launcher.submit(capture).result()

    def capture_between_steps(self) -> bool:
        """Captures the largest graphs now, in which smaller steps find room, and the others while steps run:
        for a start that requests wait for, of kernels that are compiled. False: there are no graphs. Once,
        and not beside other ranks, who would have to capture in the same order."""
        assert self._backlog is None
        self._launcher.submit(self._rehearse).result()
        self._backlog = capture_later(self._launcher, self._graphs, self._passes)
        return self._backlog is not None

    def _compile(self, graphs: DecodeGraphs) -> None:
        graphs.compile_all()

    @torch.inference_mode()
    def _rehearse(self) -> None:
        self.table.rehearse()
        rehearse_spans(self.model, self.table)
        self._sample.rehearse()

    def close(self) -> None:
        """Finishes what was submitted, then ends the threads."""
        if self._backlog is not None:
            self._backlog.close()
        self._launcher.shutdown()
        self._collector.shutdown()
        if self._decodes is not None:
            self._decodes.close()

    @torch.inference_mode()
    def _launch(self, plan: StepPlan) -> LaunchedStep:
        launched = self._compute(plan)
        if plan.hidden_reads:
            launched = replace(launched, hidden=tuple(map(self._read_hidden, plan.hidden_reads)))
        if plan.alignment_reads:
            launched = replace(launched, affinities=tuple(map(self._read_affinity, plan.alignment_reads)))
        return launched

    def _read_hidden(self, read: HiddenRead) -> Tensor:
        assert self.kv.hidden is not None, "the cache has no hidden states"
        index_N = self.table.to_device(read.indices)
        block_N = self.table.block_tables[read.slot, index_N // self.kv.block_size].long()
        return self.kv.hidden[block_N, index_N % self.kv.block_size]

    def _read_affinity(self, read: AlignmentRead) -> Tensor:
        """The sequence's tokens are run once more, together: their weights were not kept."""
        model, block_size = self.model, self.kv.block_size
        assert isinstance(model, AligningModel), "only an encoder-decoder aligns"
        index_P = torch.arange(model.num_prefix, device=model.device)
        block_P = self.table.block_tables[read.slot, index_P // block_size].long()
        token_ids_U = self.table.token_ids[read.slot, model.num_prefix : read.length].long()
        slots_P = block_P * block_size + index_P % block_size
        weights_NUP = model.cross_attention(token_ids_U, self.kv, slots_P)
        return smoothed(weights_NUP[:, -read.num_tokens :, : read.num_positions].float())

    def _compute(self, plan: StepPlan) -> LaunchedStep:
        self.table.turn_over(plan.released_slots, plan.admissions)
        if self._decodes is not None:
            if self._decodes.takes(plan):
                return self._queue(self._decodes, plan)
            self._decodes.settle()  # what follows is done on this thread
        self._copy_blocks(plan.block_copies)
        if self._graphs is not None and takes(self._graphs, plan):
            return self._replay(self._graphs, plan)
        self.table.write(plan.admissions, plan.sequences)
        if not plan.sequences:
            return LaunchedStep(plan.step_id, (), (), None, None)
        inputs = self.table.step_inputs(plan.sequences)
        hidden_TH, deepstack_KTH = self._embed(inputs, plan)
        if self._passes is not None and self._passes.takes(hidden_TH.shape[0], deepstack_KTH):
            hidden_TH = self._passes.run(hidden_TH, inputs.positions_AT, inputs.metadata)
        else:
            hidden_TH = self.model.forward(
                hidden_TH, inputs.positions_AT, self.kv, self.attention, inputs.metadata, deepstack_KTH
            )
        if not inputs.host_slots_S:
            return LaunchedStep(plan.step_id, (), (), None, None)
        sampled = self._sample(inputs, self.model.logits(hidden_TH[inputs.last_rows_S]))
        results, done = _to_host(sampled, self._copies)
        wanted = tuple(self.table.rows[slot].sampling.logprobs for slot in inputs.host_slots_S)
        return LaunchedStep(plan.step_id, inputs.host_slots_S, wanted, results, done)

    def _queue(self, decodes: NativeDecodes, plan: StepPlan) -> LaunchedStep:
        packed_4R = self.table.pack_decodes(plan.sequences)
        slots = tuple(step.slot for step in plan.sequences)
        adjustments = self._sample.adjustments(slots, [step.start + 1 for step in plan.sequences])
        sampled, done = decodes.submit(packed_4R, adjustments)
        return LaunchedStep(plan.step_id, slots, (None,) * len(slots), sampled, done)

    def _replay(self, graphs: DecodeGraphs, plan: StepPlan) -> LaunchedStep:
        """The same step by a graph. It always draws as if all rows were plain; others are drawn again."""
        packed = self.table.pack_decodes(plan.sequences)
        slots, next_index = packed[0].tolist(), (packed[1] + 1).tolist()
        logits_RV, sampled = graphs.replay(packed, gated=self.table.is_gated(plan.sequences))
        if not all(map(self.table.draws_plainly, slots, next_index)):
            sampled = self._sample.draw(slots, next_index, logits_RV)
        results, done = _to_host(sampled, self._copies)
        wanted = tuple(self.table.rows[slot].sampling.logprobs for slot in slots)
        return LaunchedStep(plan.step_id, tuple(slots), wanted, results, done)

    def _copy_blocks(self, copies: tuple[tuple[int, int], ...]) -> None:
        if not copies:
            return
        targets = {target for _, target in copies}
        assert len(targets) == len(copies), "a block is the target of two copies"
        assert targets.isdisjoint(source for source, _ in copies), "a block is source and target"
        sources_C, targets_C = self.table.to_device(np.array(copies, dtype=np.int64).T.copy()).unbind(0)
        for cache in self.kv.layered:
            cache[:, targets_C] = cache[:, sources_C]
        if self.kv.hidden is not None:
            self.kv.hidden[targets_C] = self.kv.hidden[sources_C]

    def _embed(self, inputs: StepInputs, plan: StepPlan) -> tuple[Tensor, Tensor | None]:
        """Token embeddings with the span pieces in their places; deepstack features if there are any."""
        hidden_TH = self.model.embed(inputs.token_ids_T)
        if not plan.span_pieces:
            return hidden_TH, None
        num_tokens, width = hidden_TH.shape
        levels = self.model.config.num_deepstack_levels
        deepstack_KTH = hidden_TH.new_zeros(levels, num_tokens, width) if levels else None
        starts = inputs.metadata.host_query_starts
        row_of_slot = {step.slot: row for row, step in enumerate(plan.sequences)}
        pieces = []
        for piece in plan.span_pieces:
            row = row_of_slot[piece.slot]
            first = starts[row] + _offset_in_step(piece, plan.sequences[row])
            rows_LW = piece.embeddings[piece.source_start : piece.source_start + piece.length]
            assert len(rows_LW) == piece.length, "embeddings of too few rows"
            assert rows_LW.shape[1] in (width, (1 + levels) * width), "embeddings of the wrong width"
            pieces.append((first, moved(rows_LW, hidden_TH.device).to(hidden_TH.dtype)))
        if self.table.kernels is None:
            place_rows(pieces, hidden_TH, deepstack_KTH)
        else:
            self.table.kernels.place(self.table, pieces, hidden_TH, deepstack_KTH)
        return hidden_TH, deepstack_KTH


def _offset_in_step(piece: SpanPiece, step: SequenceStep) -> int:
    offset = piece.start - step.start
    assert piece.length > 0
    assert 0 <= offset <= step.num_tokens - piece.length, "a span piece lies outside its sequence's step"
    return offset


def _to_host(sampled: Sampled, copies: HostCopies) -> tuple[Sampled, torch.cuda.Event | None]:
    logprobs = sampled.logprobs
    (tokens, valid, *found), done = copies.start(
        sampled.token_R, sampled.valid_R, *(() if logprobs is None else logprobs.tensors)
    )
    return Sampled(tokens, valid, Logprobs(*found) if found else None), done


def collect(launched: LaunchedStep) -> StepResult:
    """Waits for the device's results and makes them host values."""
    if launched.results is None:
        assert not launched.affinities, "who is aligned has a token drawn"
        return StepResult(launched.step_id, (), hidden=launched.hidden)
    if launched.done is not None:
        launched.done.synchronize()
    tokens, valid = launched.results.token_R.tolist(), launched.results.valid_R.tolist()
    logprobs = iter(_host_logprobs(launched))
    sampled = tuple(
        SampledToken(slot, token, None if num_top is None else next(logprobs))
        for slot, token, num_top in zip(launched.slots_S, tokens, launched.num_top_S, strict=True)
    )
    failed = tuple(slot for slot, ok in zip(launched.slots_S, valid, strict=True) if not ok)
    alignments = tuple(first_positions(affinity.cpu().numpy()) for affinity in launched.affinities)
    return StepResult(launched.step_id, sampled, failed, launched.hidden, alignments)


def _host_logprobs(launched: LaunchedStep) -> list[TokenLogprobs]:
    """One entry per row that wants them, in row order."""
    assert launched.results is not None
    found = launched.results.logprobs
    if found is None:
        return []
    counts = [num_top for num_top in launched.num_top_S if num_top is not None]
    columns = (found.chosen_Q, found.rank_Q, found.top_ids_QK, found.top_values_QK)
    return [
        TokenLogprobs(chosen, rank, tuple(zip(ids[:num_top], values[:num_top], strict=True)))
        for num_top, chosen, rank, ids, values in zip(counts, *(c.tolist() for c in columns), strict=True)
    ]
