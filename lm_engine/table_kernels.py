"""The seam between the request table and kernels that move a step's inputs.

Shapes: T tokens of a step, S sequences that sample, A position axes, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lm_engine.model import AttentionBackend, AttentionMetadata, DecoderModel
from lm_engine.plan import Admission

if TYPE_CHECKING:
    from lm_engine.passes import PaddedInputs
    from lm_engine.request_table import HostStep, RequestTable, SampledRows, StepInputs

Int32: TypeAlias = npt.NDArray[np.int32]


class Appended(NamedTuple):
    """Blocks that join a sequence's."""

    slot: int
    first_column: int
    block_ids: tuple[int, ...]


class TableKernels(Protocol):
    """What a device has better than torch's operations for a table's reads and writes. All of it goes to the
    current stream and is waited for by nobody; the arguments are as the table has checked them."""

    def write(
        self,
        table: RequestTable,
        admissions: Sequence[Admission],
        tokens: Sequence[Int32],
        appended: Sequence[Appended],
    ) -> None:
        """Admissions, whose token ids are `tokens`, then blocks; one of them at least."""
        ...

    def gather(self, table: RequestTable, step: HostStep) -> StepInputs:
        """`RequestTable.gather_on_device`."""
        ...

    def write_sampled(self, table: RequestTable, rows: SampledRows, token_S: Tensor) -> None: ...

    def pad(
        self,
        inputs: PaddedInputs,
        hidden_TH: Tensor,
        positions_AT: Tensor,
        metadata: AttentionMetadata,
        num_tokens: int,
    ) -> None:
        """`PaddedInputs.write`."""
        ...

    def place(
        self,
        table: RequestTable,
        pieces: Sequence[tuple[int, Tensor]],
        hidden_TH: Tensor,
        deepstack_KTH: Tensor | None,
    ) -> None:
        """`place_rows`. The rows must stay as they are until the stream is past it."""
        ...

    def rehearse(self, table: RequestTable) -> None:
        """Does all of this once for no row: what is to be compiled or loaded is then."""
        ...


def place_rows(pieces: Sequence[tuple[int, Tensor]], hidden_TH: Tensor, deepstack_KTH: Tensor | None) -> None:
    """Embeddings of media into a step: pieces are the step row of the first and [L, H], or [L, (1 + K)·H]
    with deepstack features of K levels behind them, which go to `deepstack_KTH`; all of one dtype and
    device."""
    width = hidden_TH.shape[1]
    for first, rows_LW in pieces:
        length = len(rows_LW)
        hidden_TH[first : first + length] = rows_LW[:, :width]
        if deepstack_KTH is not None and rows_LW.shape[1] > width:
            levels_LKH = rows_LW[:, width:].reshape(length, -1, width)
            deepstack_KTH[:, first : first + length] = levels_LKH.transpose(0, 1)


def rehearse_spans(model: DecoderModel, table: RequestTable) -> None:
    """Places no row, as `TableKernels.rehearse` does the rest."""
    if table.kernels is None:
        return
    hidden_1H = model.embed(torch.zeros(1, dtype=torch.int64, device=table.device))
    levels = model.config.num_deepstack_levels
    deepstack_K1H = hidden_1H.new_zeros(levels, *hidden_1H.shape) if levels else None
    table.kernels.place(table, (), hidden_1H, deepstack_K1H)


def make_table_kernels(device: torch.device, attention: AttentionBackend) -> TableKernels | None:
    """Those that go with Triton's attention on a GPU; None: the table uses torch's operations, or NumPy's."""
    if device.type != "cuda" or attention.name != "triton":
        return None
    from lm_engine.triton.table import TritonTable

    return TritonTable()
