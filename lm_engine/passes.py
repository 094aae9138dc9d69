"""CUDA graphs of the decoder's pass over a mixed step: all between the embeddings and the last hidden states.

Shapes: T tokens of the step, R rows of the request table, M blocks of a sequence, H hidden, A position axes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from lm_engine.capture import GraphRecorder
from lm_engine.graphs import can_capture
from lm_engine.model import AttentionBackend, AttentionMetadata, DecoderConfig, DecoderModel, PagedKV
from lm_engine.request_table import RequestTable

Replay = Callable[[], None]
Record = Callable[[Callable[[], Tensor]], tuple[Replay, Tensor]]

# Beyond the last, launching takes less time than computing.
TOKEN_SIZES = (
    *(16, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 576, 640, 704, 768, 896, 1024),
    *(1152, 1280, 1408, 1536, 1664, 1792, 1920, 2048),
)

# Of steps in which a picture adapter takes part: few beside the others.
GATED_TOKEN_SIZES = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)

# A step whose sequences are all this short, in tokens, has a graph of its own, where attention splits no
# keys; beyond so many tokens of a step it splits none anyway.
SHORT_LENGTH = 1024
MAX_SPLIT_TOKENS = 1024


class PassShape(NamedTuple):
    """What a graph is for: steps of so many tokens, padding included, over sequences of at most so many.
    `gated`: a picture adapter takes part."""

    num_tokens: int
    max_length: int
    gated: bool = False


def pass_shapes(max_tokens: int, max_length: int, *, gated: bool = False) -> list[PassShape]:
    """Of all steps up to `max_tokens`, the smallest first; `gated`: with those of an adapter."""
    plain = _plain_shapes(max_tokens, max_length)
    if not gated:
        return plain
    largest = plain[-1].num_tokens
    sizes = [size for size in GATED_TOKEN_SIZES if size < largest]
    return sorted([*plain, *(PassShape(size, max_length, True) for size in (*sizes, largest))])


def _plain_shapes(max_tokens: int, max_length: int) -> list[PassShape]:
    return [
        PassShape(num_tokens, length)
        for num_tokens in TOKEN_SIZES
        if num_tokens <= max_tokens
        for length in (
            (SHORT_LENGTH, max_length)
            if num_tokens <= MAX_SPLIT_TOKENS and max_length > SHORT_LENGTH
            else (max_length,)
        )
    ]


class PassModel(Protocol):
    """What a pass needs of a `DecoderModel`."""

    config: DecoderConfig

    def embed(self, token_ids_T: Tensor) -> Tensor: ...

    def forward(
        self,
        hidden_TH: Tensor,
        positions_AT: Tensor,
        kv: PagedKV,
        attention: AttentionBackend,
        metadata: AttentionMetadata,
    ) -> Tensor: ...


class MixedPasses(Protocol):
    """Called from one thread, on one stream."""

    def takes(self, num_tokens: int, deepstack_KTH: Tensor | None) -> bool: ...

    def run(self, hidden_TH: Tensor, positions_AT: Tensor, metadata: AttentionMetadata) -> Tensor:
        """As `DecoderModel.forward`; the result is valid until the next call."""
        ...

    def capture_all(self) -> int:
        """Captures what is not captured yet; returns the number of graphs."""
        ...

    def capture_next(self) -> bool:
        """Captures the largest that is not captured yet; False: all are."""
        ...


def make_passes(
    model: DecoderModel, attention: AttentionBackend, kv: PagedKV, table: RequestTable
) -> MixedPasses | None:
    """None where steps cannot be captured."""
    if not can_capture(model, attention):
        return None
    return CapturedPasses(model, attention, kv, table)


class PaddedInputs:
    """A step's inputs at fixed addresses, padded with tokens of no sequence: they attend to nothing and write
    into the scratch block."""

    def __init__(
        self, model: PassModel, table: RequestTable, max_tokens: int, width: int, dtype: torch.dtype
    ) -> None:
        device, num_rows = table.device, table.max_sequences
        self._kernels = table.kernels
        self.hidden_TH = torch.zeros(max_tokens, width, dtype=dtype, device=device)
        axes = model.config.num_position_axes
        self.positions_AT = torch.zeros(axes, max_tokens, dtype=table.positions.dtype, device=device)
        self.slots_T = torch.zeros(max_tokens, dtype=torch.int64, device=device)
        self.starts_R = torch.zeros(num_rows + 1, dtype=torch.int32, device=device)
        self.lengths_R = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self.tables_RM = torch.zeros_like(table.block_tables)
        self.gate_T1: Tensor | None = None
        if table.gated_from is not None:
            self.gate_T1 = torch.zeros(max_tokens, 1, dtype=torch.float32, device=device)

    def write(
        self, hidden_TH: Tensor, positions_AT: Tensor, metadata: AttentionMetadata, num_tokens: int
    ) -> None:
        if self._kernels is not None:
            self._kernels.pad(self, hidden_TH, positions_AT, metadata, num_tokens)
            return
        used, (num_rows, num_blocks) = hidden_TH.shape[0], metadata.block_tables.shape
        assert used <= num_tokens
        self.hidden_TH[:used].copy_(hidden_TH)
        self.hidden_TH[used:num_tokens].zero_()
        self.positions_AT[:, :used].copy_(positions_AT)
        self.slots_T[:used].copy_(metadata.slot_mapping)
        self.slots_T[used:num_tokens].zero_()
        self.starts_R[: num_rows + 1].copy_(metadata.query_starts)
        self.starts_R[num_rows + 1 :].fill_(used)
        self.lengths_R[:num_rows].copy_(metadata.sequence_lengths)
        self.lengths_R[num_rows:].zero_()
        self.tables_RM[:num_rows, :num_blocks].copy_(metadata.block_tables)
        if self.gate_T1 is not None and metadata.gate_T1 is not None:
            self.gate_T1[:used].copy_(metadata.gate_T1)
            self.gate_T1[used:num_tokens].zero_()

    def clear(self, shape: PassShape) -> None:
        """Nothing but padding, as of a step of no sequences."""
        metadata = self.metadata(shape)
        none = replace(
            metadata,
            query_starts=self.starts_R[:1],
            sequence_lengths=self.lengths_R[:0],
            block_tables=self.tables_RM[:0],
            slot_mapping=self.slots_T[:0],
            gate_T1=None if metadata.gate_T1 is None else metadata.gate_T1[:0],
        )
        self.write(self.hidden_TH[:0], self.positions_AT[:, :0], none, shape.num_tokens)

    def metadata(self, shape: PassShape) -> AttentionMetadata:
        """Of a step with every row of the table in it."""
        return AttentionMetadata(
            query_starts=self.starts_R,
            sequence_lengths=self.lengths_R,
            block_tables=self.tables_RM,
            slot_mapping=self.slots_T[: shape.num_tokens],
            max_query_length=shape.num_tokens,
            max_sequence_length=shape.max_length,
            host_query_starts=(),
            host_sequence_lengths=(),
            padded=True,
            gate_T1=self._gate(shape),
        )

    def _gate(self, shape: PassShape) -> Tensor | None:
        if not shape.gated:
            return None
        assert self.gate_T1 is not None, "the table has no gates"
        return self.gate_T1[: shape.num_tokens]


class PaddedPasses:
    """Runs the padded step without a graph: the plain path of `CapturedPasses`."""

    def __init__(
        self,
        model: PassModel,
        attention: AttentionBackend,
        kv: PagedKV,
        table: RequestTable,
        max_tokens: int = TOKEN_SIZES[-1],
    ) -> None:
        self._model, self._attention, self._kv = model, attention, kv
        probe_1H = model.embed(torch.zeros(1, dtype=torch.int64, device=table.device))
        width = probe_1H.shape[-1]
        self.shapes = pass_shapes(max_tokens, table.max_length, gated=table.gated_from is not None)
        self._inputs = PaddedInputs(model, table, self.shapes[-1].num_tokens, width, probe_1H.dtype)

    def takes(self, num_tokens: int, deepstack_KTH: Tensor | None) -> bool:
        return deepstack_KTH is None and num_tokens <= self.shapes[-1].num_tokens

    def run(self, hidden_TH: Tensor, positions_AT: Tensor, metadata: AttentionMetadata) -> Tensor:
        num_tokens, length = hidden_TH.shape[0], metadata.max_sequence_length
        gated = metadata.gate_T1 is not None
        fitting = (s for s in self.shapes if s.num_tokens >= num_tokens and s.max_length >= length)
        shape = next(s for s in fitting if s.gated == gated)
        self._prepare(shape)
        self._inputs.write(hidden_TH, positions_AT, metadata, shape.num_tokens)
        return self.forward(shape)[:num_tokens]

    def capture_all(self) -> int:
        return 0

    def capture_next(self) -> bool:
        return False

    def _prepare(self, shape: PassShape) -> None:
        """Called before the inputs of a step of this shape are written."""

    def clear(self, shape: PassShape) -> None:
        """Writes the inputs of a step of nothing."""
        self._inputs.clear(shape)

    def forward(self, shape: PassShape) -> Tensor:
        """Of what `run` has written, padded to `shape`, which must be one of `shapes`."""
        inputs, size = self._inputs, shape.num_tokens
        return self._model.forward(
            inputs.hidden_TH[:size],
            inputs.positions_AT[:, :size],
            self._kv,
            self._attention,
            inputs.metadata(shape),
        )


class CapturedPasses(PaddedPasses):
    """Borrows model, cache and table; their memory must stay where it is. `record` makes something replayable
    of a function that computes a tensor: a CUDA graph, if it is not told otherwise."""

    def __init__(
        self,
        model: PassModel,
        attention: AttentionBackend,
        kv: PagedKV,
        table: RequestTable,
        record: Record | None = None,
        max_tokens: int = TOKEN_SIZES[-1],
    ) -> None:
        super().__init__(model, attention, kv, table, max_tokens)
        self._record = record or CudaRecorder(table.device)
        self._captured: dict[PassShape, tuple[Replay, Tensor]] = {}

    def capture_all(self) -> int:
        while self.capture_next():
            pass
        return len(self._captured)

    @torch.inference_mode()
    def capture_next(self) -> bool:
        missing = set(self.shapes) - self._captured.keys()
        if missing:
            self._prepare(max(missing))
        return bool(missing)

    def _prepare(self, shape: PassShape) -> None:
        """Recording runs the step, which spends its input and writes the cache: so before the inputs are
        written, and with none."""
        if shape not in self._captured:
            self.clear(shape)
            self._captured[shape] = self._record(lambda: super(CapturedPasses, self).forward(shape))

    def forward(self, shape: PassShape) -> Tensor:
        replay, hidden_TH = self._captured[shape]
        replay()
        return hidden_TH


class CudaRecorder:
    def __init__(self, device: torch.device) -> None:
        self._recorder = GraphRecorder(device)

    def __call__(self, run: Callable[[], Tensor]) -> tuple[Replay, Tensor]:
        graph, result = self._recorder.record(run)
        return graph.replay, result
