"""A linear layer whose weight is stored in the panels that the C kernel streams.

Shapes: T tokens, I inputs, O outputs.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from lm_engine.native.library import DTYPE_CODES, CLinear, check, dtype_code

PANEL = 16  # output columns stored side by side; PANEL in kernels.h
ALIGNMENT_BYTES = 64
CHUNK_BYTES = 64 << 20


class PanelMemory:
    """Where a model's panels lie, one after the other in chunks of large pages. A chunk lives as long as
    the panels
    in it."""

    def __init__(self, library: ctypes.CDLL, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._library = library
        self._chunk_bytes = chunk_bytes
        self._rest = torch.empty(0, dtype=torch.uint8)

    def take(self, count: int, dtype: torch.dtype) -> Tensor:
        """`count` elements, uninitialised, on a cache line's boundary."""
        nbytes = -(-count * dtype.itemsize // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        if nbytes > len(self._rest):
            chunk = torch.empty(max(nbytes, self._chunk_bytes) + ALIGNMENT_BYTES, dtype=torch.uint8)
            self._library.advise_large_pages(chunk.data_ptr(), chunk.nbytes)
            self._rest = chunk[-chunk.data_ptr() % ALIGNMENT_BYTES :]
        taken, self._rest = self._rest[:nbytes], self._rest[nbytes:]
        return taken[: count * dtype.itemsize].view(dtype)


class NativeLinear:
    """Holds its own packed copy: the original weight may be freed. A row's result does not depend on the rows
    beside it: every output is one sum in the order of the inputs, accumulated in float32."""

    def __init__(
        self,
        library: ctypes.CDLL,
        memory: PanelMemory,
        weight_OI: Tensor,
        bias_O: Tensor | None,
        float32_output: bool,
    ) -> None:
        assert weight_OI.dim() == 2
        assert weight_OI.device.type == "cpu"
        assert bias_O is None or bias_O.shape == weight_OI.shape[:1]
        self.out_features, self.in_features = weight_OI.shape
        self.dtype = weight_OI.dtype
        self.float32_output = float32_output
        self._library, self._forward = library, library.linear_forward
        self._panels = _pack(library, weight_OI.detach(), memory)
        self._bias_O = None if bias_O is None else bias_O.detach().to(torch.float32, copy=True).contiguous()
        self._descriptor = CLinear(
            self._panels.data_ptr(),
            None if self._bias_O is None else self._bias_O.data_ptr(),
            self.in_features,
            self.out_features,
            dtype_code(weight_OI),
        )
        self.address = ctypes.addressof(self._descriptor)  # of what the C library knows of it

    def __call__(self, x_TI: Tensor) -> Tensor:
        assert x_TI.shape[-1] == self.in_features
        x_TI = x_TI.contiguous()
        dtype = torch.float32 if self.float32_output else x_TI.dtype
        y_TO = torch.empty(*x_TI.shape[:-1], self.out_features, dtype=dtype)
        rows = x_TI.numel() // self.in_features
        status = self._forward(
            self.address,
            x_TI.data_ptr(),
            dtype_code(x_TI),
            self.in_features,
            y_TO.data_ptr(),
            DTYPE_CODES[dtype],
            self.out_features,
            rows,
            torch.get_num_threads(),
        )
        check(status)
        return y_TO

    def gather(self, rows_T: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows of the original weight, [T, I]: an embedding table that is also the output projection is kept
        once. Raises IndexError for a row that is not there."""
        assert rows_T.dtype == torch.int64
        rows_T = rows_T.contiguous()
        y_TI = torch.empty(rows_T.numel(), self.in_features, dtype=dtype)
        wrong = self._library.gather_rows(
            self.address,
            rows_T.data_ptr(),
            rows_T.numel(),
            y_TI.data_ptr(),
            dtype_code(y_TI),
            torch.get_num_threads(),
        )
        if wrong >= 0:
            raise IndexError(f"row {int(rows_T.flatten()[wrong])} of {self.out_features}")
        return y_TI.view(*rows_T.shape, self.in_features)


def _pack(library: ctypes.CDLL, weight_OI: Tensor, memory: PanelMemory) -> Tensor:
    if weight_OI.stride(1) != 1:
        weight_OI = weight_OI.contiguous()
    outputs, inputs = weight_OI.shape
    panels = memory.take(-(-outputs // PANEL) * PANEL * inputs, weight_OI.dtype)
    library.pack_linear(
        weight_OI.data_ptr(),
        weight_OI.stride(0),
        panels.data_ptr(),
        dtype_code(weight_OI),
        outputs,
        inputs,
        torch.get_num_threads(),
    )
    return panels
