"""The device's table of running sequences, one row per slot, and the step inputs made from it.

Shapes: T tokens of a step, R sequences in it, A position axes, L tokens of a sequence, M blocks.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from contracts.params import SamplingParams
from lm_engine.model import AttentionMetadata
from lm_engine.plan import Admission, SequenceStep
from lm_engine.random import signed_seed
from lm_engine.table_kernels import Appended, Int32, TableKernels
from lm_engine.transfer import to_device

Int64: TypeAlias = npt.NDArray[np.int64]
NEVER = np.iinfo(np.int32).max  # the index from which a sequence without a picture is gated
FLOATS = ("temperature", "top_p", "min_p", "presence", "frequency", "repetition")


@dataclass
class Row:
    """What the host keeps of a slot: what it needs to decide without asking the device."""

    sampling: SamplingParams
    stop_token_ids: tuple[int, ...]
    num_prompt_tokens: int
    num_known_tokens: int  # tokens that the table holds or that a step in flight will write
    plain_from: int | None  # sequence index from which its draws need no more than a temperature; None: never
    last_position: float  # of its prompt; infinite where not all positions are whole numbers
    gated_from: int | None = None  # index of its first gated token; None: none, or the table has no gates
    num_blocks: int = 0

    def is_gated(self, end: int) -> bool:
        """Whether one of its first `end` tokens is."""
        return self.gated_from is not None and self.gated_from < end

    @property
    def draws_greedily(self) -> bool:
        """It takes the largest logit, once single ones are adjusted."""
        sampling = self.sampling
        return sampling.greedy and not sampling.has_penalties and sampling.logprobs is None


@dataclass(frozen=True, kw_only=True)
class SampledRows:
    """The S sequences of a step that sample."""

    slots_S: Tensor  # int64
    next_index_S: Tensor  # int64: sequence index of the token to draw
    host_slots_S: tuple[int, ...]
    host_next_index_S: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class StepInputs(SampledRows):
    """A step on the device. S sequences of the R sample."""

    token_ids_T: Tensor
    positions_AT: Tensor
    metadata: AttentionMetadata
    last_rows_S: Tensor  # int64: the step row whose logits are sampled


@dataclass(frozen=True)
class HostStep:
    """A step's sequences, on the host."""

    slots_R: Int64
    starts_R: Int64
    counts_R: Int64
    query_starts: Int64  # R + 1
    samples_R: npt.NDArray[np.bool_]
    is_gated: bool = False  # some token of it

    @property
    def lengths_R(self) -> Int64:
        return self.starts_R + self.counts_R

    @property
    def last_rows_S(self) -> Int64:
        return self.query_starts[1:][self.samples_R] - 1

    @property
    def next_index_S(self) -> Int64:
        return self.lengths_R[self.samples_R]

    def most_blocks(self, block_size: int) -> int:
        return -(-int(self.lengths_R.max()) // block_size)

    def inputs(
        self,
        *,
        token_ids_T: Tensor,
        positions_AT: Tensor,
        query_starts: Tensor,
        sequence_lengths: Tensor,
        block_tables: Tensor,
        slot_mapping: Tensor,
        slots_S: Tensor,
        last_rows_S: Tensor,
        next_index_S: Tensor,
        gate_T1: Tensor | None,
    ) -> StepInputs:
        """With what the device made of it."""
        metadata = AttentionMetadata(
            query_starts=query_starts,
            sequence_lengths=sequence_lengths,
            block_tables=block_tables,
            slot_mapping=slot_mapping,
            max_query_length=int(self.counts_R.max()),
            max_sequence_length=int(self.lengths_R.max()),
            host_query_starts=tuple(self.query_starts.tolist()),
            host_sequence_lengths=tuple(self.lengths_R.tolist()),
            gate_T1=gate_T1,
        )
        return StepInputs(
            token_ids_T=token_ids_T,
            positions_AT=positions_AT,
            metadata=metadata,
            slots_S=slots_S,
            last_rows_S=last_rows_S,
            next_index_S=next_index_S,
            host_slots_S=tuple(self.slots_R[self.samples_R].tolist()),
            host_next_index_S=tuple(self.next_index_S.tolist()),
        )


class RequestTable:
    """Rows live from admission to release. All writes go to the device in stream order, so a step may be
    built from tokens that the step before it has yet to draw. `gated`: it tells which tokens stand at or
    behind the first picture of their sequence. `kernels`: do what else torch's operations do."""

    def __init__(
        self,
        *,
        vocab_size: int,
        num_axes: int,
        max_sequences: int,
        max_length: int,
        block_size: int,
        device: torch.device,
        gated: bool = False,
        kernels: TableKernels | None = None,
    ) -> None:
        self.device = device
        self.kernels = kernels
        self.vocab_size = vocab_size
        self.block_size = block_size
        self.max_length = max_length
        self.rows: dict[int, Row] = {}
        self.max_sequences = max_sequences
        max_blocks = -(-max_length // block_size)
        # One more than the longest: the token drawn after the last computed one has a place.
        self.token_ids = torch.zeros(max_sequences, max_length + 1, dtype=torch.int32, device=device)
        self.positions = torch.zeros(num_axes, max_sequences, max_length, dtype=torch.float32, device=device)
        self.block_tables = torch.zeros(max_sequences, max_blocks, dtype=torch.int32, device=device)
        self.num_prompt = torch.zeros(max_sequences, dtype=torch.int64, device=device)
        self.position_delta = torch.zeros(max_sequences, dtype=torch.float32, device=device)
        self.seed = torch.zeros(max_sequences, dtype=torch.int64, device=device)
        self.top_k = torch.zeros(max_sequences, dtype=torch.int64, device=device)
        self.floats = torch.zeros(max_sequences, len(FLOATS), dtype=torch.float32, device=device)
        self.gated_from: Tensor | None = None
        if gated:
            self.gated_from = torch.full((max_sequences,), NEVER, dtype=torch.int32, device=device)

    def turn_over(self, released: Sequence[int], admissions: Sequence[Admission]) -> None:
        """Frees and takes slots, on the host only: whatever fails later in the step, slots are as the plan
        says."""
        for slot in released:
            self.rows.pop(slot, None)  # unknown if the plan that admitted it failed on the way
        for admission in admissions:
            assert admission.slot not in self.rows, f"slot {admission.slot} is taken"
            self.rows[admission.slot] = Row(
                admission.sampling,
                admission.stop_token_ids,
                admission.num_prompt_tokens,
                len(admission.token_ids),
                _plain_from(admission),
                _last_position(admission),
                None if self.gated_from is None else admission.gated_from,
            )

    def write(self, admissions: Sequence[Admission], sequences: Sequence[SequenceStep]) -> None:
        """`write_admissions`, then `append_blocks`."""
        if self.kernels is None:
            self.write_admissions(admissions)
            self.append_blocks(admissions, sequences)
            return
        tokens = [self._checked_tokens(admission) for admission in admissions]
        appended = self._append(admissions, sequences)
        if tokens or appended:
            self.kernels.write(self, admissions, tokens, appended)

    def write_admissions(self, admissions: Sequence[Admission]) -> None:
        """Writes everything but the blocks, which `append_blocks` brings."""
        if not admissions:
            return
        for admission in admissions:
            self._write_tokens(admission)
        slots = self.to_device(np.array([a.slot for a in admissions], dtype=np.int64))
        integers = [(a.num_prompt_tokens, signed_seed(a.seed), a.sampling.top_k) for a in admissions]
        columns = self.to_device(np.array(integers, dtype=np.int64))
        for target, column in zip((self.num_prompt, self.seed, self.top_k), columns.unbind(1), strict=True):
            target[slots] = column
        deltas = np.array([a.position_delta for a in admissions], dtype=np.float32)
        self.position_delta[slots] = self.to_device(deltas)
        floats = [float_params(a.sampling) for a in admissions]
        self.floats[slots] = self.to_device(np.array(floats, dtype=np.float32))
        if self.gated_from is not None:
            gated = [NEVER if a.gated_from is None else a.gated_from for a in admissions]
            self.gated_from[slots] = self.to_device(np.array(gated, dtype=np.int32))

    def _write_tokens(self, admission: Admission) -> None:
        slot, tokens = admission.slot, self._checked_tokens(admission)
        self.token_ids[slot, : len(tokens)] = self.to_device(tokens)
        positions = self.to_device(admission.positions_AL.astype(np.float32))
        self.positions[:, slot, : admission.num_prompt_tokens] = positions

    def _checked_tokens(self, admission: Admission) -> Int32:
        slot, num_prompt, num_tokens = admission.slot, admission.num_prompt_tokens, len(admission.token_ids)
        assert 0 <= slot < self.max_sequences, f"slot {slot} of {self.max_sequences}"
        assert 0 < num_prompt <= num_tokens <= self.max_length + 1
        assert admission.positions_AL.shape == (self.positions.shape[0], num_prompt)
        # A quarter of the time that np.array takes for a list.
        tokens = np.frombuffer(array("i", admission.token_ids), dtype=np.int32)
        assert tokens.min() >= 0, "a token id is negative"
        assert tokens.max() < self.vocab_size, "a token id is outside the vocabulary"
        return tokens

    def append_blocks(self, admissions: Sequence[Admission], sequences: Sequence[SequenceStep]) -> None:
        """Appends the blocks of admissions, then those of the step's sequences."""
        entries = [
            (slot, first_column + i, block)
            for slot, first_column, block_ids in self._append(admissions, sequences)
            for i, block in enumerate(block_ids)
        ]
        if entries:
            slots, columns, blocks = self.to_device(np.array(entries, dtype=np.int64).T.copy()).unbind(0)
            self.block_tables[slots, columns] = blocks.int()

    def _append(self, admissions: Sequence[Admission], sequences: Sequence[SequenceStep]) -> list[Appended]:
        """On the host's side."""
        bringing = [(a.slot, a.block_ids) for a in admissions if a.block_ids]
        bringing += [(s.slot, s.new_block_ids) for s in sequences if s.new_block_ids]
        appended = []
        for slot, block_ids in bringing:
            row = self.rows[slot]
            appended.append(Appended(slot, row.num_blocks, block_ids))
            row.num_blocks += len(block_ids)
            assert row.num_blocks <= self.block_tables.shape[1], f"block table of slot {slot} is full"
        return appended

    def step_inputs(self, sequences: Sequence[SequenceStep]) -> StepInputs:
        """Gathers the step's tokens, positions and block addresses; no work per token on the host's side of a
        device."""
        self._check(sequences)
        triples = np.array([(s.slot, s.start, s.num_tokens) for s in sequences], dtype=np.int64)
        slots_R, starts_R, counts_R = np.ascontiguousarray(triples.T)
        query_starts = np.concatenate([np.zeros(1, dtype=np.int64), counts_R.cumsum()])
        samples_R = np.array([s.samples for s in sequences])
        step = HostStep(slots_R, starts_R, counts_R, query_starts, samples_R, self.is_gated(sequences))
        if self.kernels is not None:
            return self.kernels.gather(self, step)
        return self.gather_on_host(step) if self.device.type == "cpu" else self.gather_on_device(step)

    def gather_on_device(self, step: HostStep) -> StepInputs:
        num_rows, num_tokens = len(step.slots_R), int(step.query_starts[-1])
        sampled = (step.slots_R[step.samples_R], step.last_rows_S, step.next_index_S)
        rows = (step.slots_R, step.starts_R, step.query_starts, step.lengths_R)
        packed = self.to_device(np.concatenate([*rows, *sampled]))
        sizes = [num_rows, num_rows, num_rows + 1, num_rows, *map(len, sampled)]
        slots_R, starts_R, query_starts_R, lengths_R, slots_S, last_rows_S, next_index_S = torch.split(
            packed, sizes
        )
        row_T = torch.repeat_interleave(query_starts_R.diff(), output_size=num_tokens)
        slot_T = slots_R[row_T]
        index_T = torch.arange(num_tokens, device=self.device) + (starts_R - query_starts_R[:-1])[row_T]
        block_T = self.block_tables[slot_T, index_T // self.block_size].long()
        prompt_AT = self.positions[:, slot_T, index_T]
        generated_T = index_T + self.position_delta[slot_T]
        return step.inputs(
            token_ids_T=self.token_ids[slot_T, index_T].long(),
            positions_AT=torch.where(index_T < self.num_prompt[slot_T], prompt_AT, generated_T),
            query_starts=query_starts_R.int(),
            sequence_lengths=lengths_R.int(),
            block_tables=self.block_tables[slots_R, : step.most_blocks(self.block_size)],
            slot_mapping=block_T * self.block_size + index_T % self.block_size,
            slots_S=slots_S,
            last_rows_S=last_rows_S,
            next_index_S=next_index_S,
            gate_T1=self.gate(slot_T, index_T) if step.is_gated else None,
        )

    def is_gated(self, sequences: Sequence[SequenceStep]) -> bool:
        """Whether a picture adapter takes part in the step."""
        if self.gated_from is None:
            return False
        return any(self.rows[step.slot].is_gated(step.start + step.num_tokens) for step in sequences)

    def gate(self, slot_T: Tensor, index_T: Tensor) -> Tensor:
        """[T, 1] float32 of the tokens at these indices: see `AttentionMetadata`."""
        assert self.gated_from is not None, "this table has no gates"
        return (index_T >= self.gated_from[slot_T]).float().unsqueeze(1)

    def gather_on_host(self, step: HostStep) -> StepInputs:
        """The same where the table lies in the host's memory: NumPy's calls cost a fraction of torch's."""
        row_T = np.repeat(np.arange(len(step.slots_R)), step.counts_R)
        slot_T = step.slots_R[row_T]
        index_T = np.arange(len(row_T)) + (step.starts_R - step.query_starts[:-1])[row_T]
        tables, tokens = self.block_tables.numpy(), self.token_ids.numpy()
        block_T = tables[slot_T, index_T // self.block_size].astype(np.int64)
        prompt_AT = self.positions.numpy()[:, slot_T, index_T]
        generated_T = index_T.astype(np.float32) + self.position_delta.numpy()[slot_T]
        made = {
            "token_ids_T": tokens[slot_T, index_T].astype(np.int64),
            "positions_AT": np.where(index_T < self.num_prompt.numpy()[slot_T], prompt_AT, generated_T),
            "query_starts": step.query_starts.astype(np.int32),
            "sequence_lengths": step.lengths_R.astype(np.int32),
            "block_tables": tables[step.slots_R, : step.most_blocks(self.block_size)],
            "slot_mapping": block_T * self.block_size + index_T % self.block_size,
            "slots_S": step.slots_R[step.samples_R],
            "last_rows_S": step.last_rows_S,
            "next_index_S": step.next_index_S,
        }
        tensors = {name: torch.from_numpy(array) for name, array in made.items()}
        gate_T1 = self.gate(torch.from_numpy(slot_T), torch.from_numpy(index_T)) if step.is_gated else None
        return step.inputs(**tensors, gate_T1=gate_T1)

    def pack_decodes(self, sequences: Sequence[SequenceStep]) -> np.ndarray:
        """[4, R] int32 of a step that computes and samples one token of each: slot, its index, a block to
        append (0: none), that block's column. The host's rows are as after the step."""
        packed = []
        for step in sequences:
            row, new_blocks = self.rows[step.slot], step.new_block_ids
            packed.append((step.slot, step.start, new_blocks[0] if new_blocks else 0, row.num_blocks))
            row.num_blocks += len(new_blocks)
            assert row.num_blocks <= self.block_tables.shape[1], f"block table of slot {step.slot} is full"
        self._check(sequences)
        for step in sequences:
            self.rows[step.slot].num_known_tokens = step.start + 2
        return np.array(packed, dtype=np.int32).T.copy()

    def draws_plainly(self, slot: int, next_index: int) -> bool:
        plain_from = self.rows[slot].plain_from
        return plain_from is not None and next_index >= plain_from

    def write_sampled(self, inputs: SampledRows, token_S: Tensor) -> None:
        if self.kernels is None:
            self.token_ids[inputs.slots_S, inputs.next_index_S] = token_S.int()
        else:
            self.kernels.write_sampled(self, inputs, token_S)
        self.note_sampled(inputs.host_slots_S, inputs.host_next_index_S)

    def note_sampled(self, slots: Sequence[int], next_index: Sequence[int]) -> None:
        """For a sampler that writes its tokens into the table itself."""
        for slot, index in zip(slots, next_index, strict=True):
            self.rows[slot].num_known_tokens = index + 1

    @torch.inference_mode()
    def rehearse(self) -> None:
        """So that no step waits for a kernel to be compiled or loaded. On the thread of the steps."""
        if self.kernels is not None:
            self.kernels.rehearse(self)

    def to_device(self, array: np.ndarray) -> Tensor:
        return to_device(array, self.device)

    def _check(self, sequences: Sequence[SequenceStep]) -> None:
        assert len({s.slot for s in sequences}) == len(sequences), "a slot occurs twice in a step"
        for step in sequences:
            row, end = self.rows[step.slot], step.start + step.num_tokens
            assert step.num_tokens > 0
            assert end <= row.num_known_tokens, f"slot {step.slot}: token {end} is not known yet"
            assert end <= min(row.num_blocks * self.block_size, self.max_length), (
                f"slot {step.slot}: no block"
            )
            assert not step.samples or end == row.num_known_tokens, f"slot {step.slot} samples too early"


def _plain_from(admission: Admission) -> int | None:
    sampling = admission.sampling
    filters = not sampling.greedy and (sampling.top_p < 1.0 or sampling.top_k or sampling.min_p > 0.0)
    if filters or sampling.has_penalties or sampling.logit_bias or sampling.logprobs is not None:
        return None
    forbids = admission.stop_token_ids or sampling.stop_token_ids
    return admission.num_prompt_tokens + (sampling.min_tokens if forbids else 0)


def _last_position(admission: Admission) -> float:
    positions_AL, delta = admission.positions_AL, admission.position_delta
    if delta > 0 or delta % 1 or admission.num_prompt_tokens + delta < 0 or positions_AL.min() < 0:
        return math.inf
    if positions_AL.dtype.kind == "f" and (positions_AL % 1).any():
        return math.inf
    return float(positions_AL.max())


def float_params(sampling: SamplingParams) -> tuple[float, ...]:
    return (
        sampling.temperature,
        sampling.top_p,
        sampling.min_p,
        sampling.presence_penalty,
        sampling.frequency_penalty,
        sampling.repetition_penalty,
    )
