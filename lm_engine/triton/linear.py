"""Linears: the library's for many rows, our own for few, where reading the weights is all the work.

Shapes: M rows, I inputs, O outputs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor
from torch.nn import functional

from lm_engine.triton.jit.linear import gemv, skinny_gemm
from lm_engine.triton.launch import (
    dot_precision,
    interpreted,
    launch,
    launch_options,
    next_power,
    prefetches,
    shared_memory_bytes,
)

MAX_SKINNY_ROWS = 64
_MAX_TILES = 1 << 14  # of a split linear
_NUM_PROCESSORS = 132
_OTHER_SHARED_BYTES = 16 << 10
_AHEAD_BYTES = 16 << 20  # of the next linear's weights; comes while attention computes, stays in the L2
_ROWS_PIECE, _PIECE, _LEAST_PIECE = 4096, 512, 128  # bytes that are asked for at once
_MANY_OUTPUTS = 1 << 15


@dataclass(frozen=True)
class Blocks:
    """Tile sizes of one launch. One row: `programs` of each multiprocessor stride over the outputs. More
    rows: the inputs are cut into `splits` parts."""

    outputs: int
    inputs: int
    num_warps: int
    num_stages: int = 1
    splits: int = 1
    programs: int = 1


@dataclass(frozen=True)
class FirstRows:
    """What is asked for of a gated weight ahead of its product with one row, whose programs stride over tiles
    of whole rows: the first of either half. Every warp of the first `programs` asks for `piece` bytes of
    each."""

    piece: int = 0  # 0: nothing is asked for
    programs: int = 0
    half_bytes: int = 0

    @classmethod
    def of(cls, weight_OI: Tensor | None, num_programs: int, num_warps: int) -> FirstRows:
        if weight_OI is None or not _can_ask_for(weight_OI):
            return cls()
        half_bytes = weight_OI.numel() * weight_OI.element_size() // 2
        num_pieces = min(_AHEAD_BYTES // 2, half_bytes) // _ROWS_PIECE
        programs = min(num_pieces // num_warps, num_programs)
        return cls(_ROWS_PIECE, programs, half_bytes) if programs else cls()


@dataclass(frozen=True)
class FirstColumns:
    """What is asked for of a weight ahead of its product with several rows, whose programs begin at once at
    the first columns of their outputs: `piece` bytes of each output, `block` of them by a program."""

    piece: int = 0  # 0: nothing is asked for
    block: int = 1

    @classmethod
    def of(cls, weight_OI: Tensor | None, num_programs: int, num_warps: int) -> FirstColumns:
        if weight_OI is None or not _can_ask_for(weight_OI):
            return cls()
        num_outputs, num_inputs = weight_OI.shape
        piece = min(_AHEAD_BYTES // num_outputs, _PIECE) // _LEAST_PIECE * _LEAST_PIECE
        if piece == 0 or num_inputs * weight_OI.element_size() < piece:
            return cls()
        threads = 32 * num_warps
        return cls(piece, threads * next_power(triton.cdiv(num_outputs, num_programs * threads)))


@dataclass(frozen=True)
class Norm:
    """An RMS norm of the input, fused in."""

    weight_I: Tensor
    eps: float


class TritonLinear:
    """Keeps the weight as it came, [O, I]. `arrivals`: zeros before and after each launch."""

    def __init__(
        self, weight_OI: Tensor, bias_O: Tensor | None, float32_output: bool, arrivals: Tensor
    ) -> None:
        assert weight_OI.dim() == 2
        assert weight_OI.is_contiguous()
        assert bias_O is None or bias_O.shape == weight_OI.shape[:1]
        self.out_features, self.in_features = weight_OI.shape
        self.weight_OI = weight_OI
        self.bias_O = bias_O
        self.float32_output = float32_output
        self._arrivals = arrivals

    def __call__(self, x_TI: Tensor) -> Tensor:
        x_MI = x_TI.reshape(-1, self.in_features)
        if 0 < x_MI.shape[0] <= MAX_SKINNY_ROWS:
            return self.fused(x_MI.contiguous()).view(*x_TI.shape[:-1], self.out_features)
        y_TO = functional.linear(x_TI, self.weight_OI, self.bias_O)
        return y_TO.float() if self.float32_output else y_TO

    def fused(
        self,
        x_MI: Tensor,
        *,
        norm: Norm | None = None,
        residual_MO: Tensor | None = None,
        gated: bool = False,
        blocks: Blocks | None = None,
        next_gated: TritonLinear | None = None,
    ) -> Tensor:
        """Linear of at most MAX_SKINNY_ROWS rows. `norm`: of x, for one row only. `gated`: the outputs are
        [gate; up] and silu(gate) · up is returned. With `residual_MO` the result is added into it, and it is
        returned. `next_gated`: the gated linear of as many rows that comes next, whose weights this one asks
        for while it waits."""
        num_rows = x_MI.shape[0]
        num_outputs = self.out_features // 2 if gated else self.out_features
        assert x_MI.is_contiguous()
        assert x_MI.shape == (num_rows, self.in_features)
        assert 0 < num_rows <= MAX_SKINNY_ROWS
        assert not (gated and self.bias_O is not None)
        out_MO = residual_MO
        if out_MO is None:
            dtype = torch.float32 if self.float32_output else x_MI.dtype
            out_MO = torch.empty(num_rows, num_outputs, dtype=dtype, device=x_MI.device)
        assert out_MO.shape == (num_rows, num_outputs)
        assert out_MO.is_contiguous()
        blocks = blocks or choose_blocks(x_MI, num_outputs, gated)
        ahead_OI = None if next_gated is None or not prefetches(x_MI.device) else next_gated.weight_OI
        if num_rows == 1:
            self._launch_row(x_MI, norm, residual_MO, out_MO, gated, blocks, ahead_OI)
        else:
            assert norm is None, "a norm is fused for one row only"
            self._launch_rows(x_MI, residual_MO, out_MO, gated, blocks, ahead_OI)
        return out_MO

    def _launch_row(
        self,
        x_1I: Tensor,
        norm: Norm | None,
        residual_1O: Tensor | None,
        out_1O: Tensor,
        gated: bool,
        blocks: Blocks,
        ahead_OI: Tensor | None,
    ) -> None:
        num_outputs = out_1O.shape[1]
        num_programs = min(triton.cdiv(num_outputs, blocks.outputs), blocks.programs * _NUM_PROCESSORS)
        ahead = FirstRows.of(ahead_OI, num_programs, blocks.num_warps)
        launch(
            gemv,
            (num_programs,),
            x_1I,
            self.weight_OI,
            self.bias_O,
            None if norm is None else norm.weight_I,
            residual_1O,
            out_1O,
            ahead_OI if ahead.piece else None,
            num_outputs,
            0.0 if norm is None else norm.eps,
            K=self.in_features,
            BLOCK_N=blocks.outputs,
            BLOCK_K=next_power(self.in_features),
            NORM=norm is not None,
            BIAS=self.bias_O is not None,
            RESIDUAL=residual_1O is not None,
            GATED=gated,
            AHEAD_BYTES=ahead.piece,
            AHEAD_PROGRAMS=ahead.programs,
            AHEAD_HALF=ahead.half_bytes,
            NUM_WARPS=blocks.num_warps,
            num_warps=blocks.num_warps,
            **launch_options(x_1I.device),
        )

    def _launch_rows(
        self,
        x_MI: Tensor,
        residual_MO: Tensor | None,
        out_MO: Tensor,
        gated: bool,
        blocks: Blocks,
        ahead_OI: Tensor | None,
    ) -> None:
        num_rows, num_outputs = out_MO.shape
        num_tiles = triton.cdiv(num_outputs, blocks.outputs)
        block_m = max(next_power(num_rows), 16)
        parts = None
        if blocks.splits > 1:
            assert not gated
            assert num_tiles <= self._arrivals.shape[0]
            shape = (num_tiles, blocks.splits, blocks.outputs, block_m)
            parts = torch.empty(shape, dtype=torch.float32, device=x_MI.device)
        num_programs = num_tiles * blocks.splits
        ahead = FirstColumns.of(ahead_OI, num_programs, blocks.num_warps)
        own_bytes, own_pieces = (
            first_of_tile(self.weight_OI, blocks, gated) if prefetches(x_MI.device) else (0, 1)
        )
        launch(
            skinny_gemm,
            (num_tiles, blocks.splits),
            x_MI,
            self.weight_OI,
            self.bias_O,
            residual_MO,
            out_MO,
            parts,
            self._arrivals,
            ahead_OI if ahead.piece else None,
            num_rows,
            num_outputs,
            K=self.in_features,
            BLOCK_M=block_m,
            BLOCK_N=blocks.outputs,
            BLOCK_K=blocks.inputs,
            SPLITS=blocks.splits,
            BIAS=self.bias_O is not None,
            RESIDUAL=residual_MO is not None,
            GATED=gated,
            PRECISION=dot_precision(x_MI.dtype),
            OWN_BYTES=own_bytes,
            OWN_PIECES=own_pieces,
            AHEAD_BYTES=ahead.piece,
            AHEAD_ROWS=ahead_OI.shape[0] if ahead_OI is not None and ahead.piece else 1,
            AHEAD_ROW_BYTES=ahead_OI.shape[1] * ahead_OI.element_size() if ahead_OI is not None else 0,
            AHEAD_BLOCK=ahead.block,
            num_warps=blocks.num_warps,
            num_stages=blocks.num_stages,
            **launch_options(x_MI.device),
        )


def first_of_tile(weight_OI: Tensor, blocks: Blocks, gated: bool) -> tuple[int, int]:
    """Bytes of a piece that a program asks for of its own weights, and pieces of each row: one a thread. (0,
    1): nothing. With several programs a multiprocessor, one reads while another waits."""
    pieces = 32 * blocks.num_warps // (blocks.outputs * (2 if gated else 1))
    row_bytes = weight_OI.shape[1] * weight_OI.element_size()
    takes = weight_OI.shape[0] <= _MANY_OUTPUTS and pieces > 0 and row_bytes >= _PIECE
    return (_PIECE, pieces) if takes and _can_ask_for(weight_OI) else (0, 1)


def _can_ask_for(weight_OI: Tensor) -> bool:
    """Rows, and halves of all rows, begin at multiples of 16 bytes."""
    return weight_OI.data_ptr() % 16 == 0 and weight_OI.shape[1] * weight_OI.element_size() % 16 == 0


def make_arrivals(device: torch.device) -> Tensor:
    return torch.zeros(_MAX_TILES, dtype=torch.int32, device=device)


def choose_blocks(x_MI: Tensor, num_outputs: int, gated: bool) -> Blocks:
    """As measured on an H200; programs must be a few for each of its 132 multiprocessors."""
    num_rows, num_inputs = x_MI.shape
    if interpreted():
        return Blocks(64, 64, 1, splits=1 if gated else 2)
    if num_rows == 1:
        if num_inputs > 4096:
            return Blocks(2, 0, 16, programs=1)
        if gated:
            return Blocks(2, 0, 4, programs=4)
        return Blocks(4, 0, 4, programs=8 if num_outputs > 16384 else 4)
    inputs = 256 // x_MI.element_size()
    if gated:
        return _with_stages(4, Blocks(128, inputs // 2, 8), x_MI, num_tiles=2)
    if num_outputs > 16384:
        return _with_stages(4, Blocks(64, inputs, 4), x_MI)
    if num_inputs > 4096 or num_outputs <= 2048:
        return _with_stages(6, Blocks(64, inputs, 4, splits=4), x_MI)
    return _with_stages(4, Blocks(64, inputs, 4, splits=2), x_MI)


def _with_stages(wanted: int, blocks: Blocks, x_MI: Tensor, num_tiles: int = 1) -> Blocks:
    """As many of the wanted stages as the device's shared memory holds beside a little of everything else."""
    rows = num_tiles * blocks.outputs + max(next_power(x_MI.shape[0]), 16)
    stage_bytes = rows * blocks.inputs * x_MI.element_size()
    fitting = (shared_memory_bytes(x_MI.device) - _OTHER_SHARED_BYTES) // stage_bytes
    return replace(blocks, num_stages=max(1, min(wanted, fitting)))
