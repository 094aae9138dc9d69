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
    shared_memory_bytes,
)

MAX_SKINNY_ROWS = 64
_MAX_TILES = 1 << 14  # of a split linear
_NUM_PROCESSORS = 132
_OTHER_SHARED_BYTES = 16 << 10
_LEAST_OUTPUTS, _MOST_OUTPUTS = 32, 128  # of a tile
_LEAST_BLOCK = 64  # the tensor cores take so many weights' rows at once


@dataclass(frozen=True)
class Blocks:
    """Tile sizes of one launch. One row: `programs` of each multiprocessor stride over the outputs. More
    rows: the inputs are cut into `splits` parts, and outputs need not be a power of two."""

    outputs: int
    inputs: int
    num_warps: int
    num_stages: int = 1
    splits: int = 1
    programs: int = 1

    @property
    def padded_outputs(self) -> int:
        return max(next_power(self.outputs), _LEAST_BLOCK)


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
    ) -> Tensor:
        """Linear of at most MAX_SKINNY_ROWS rows. `norm`: of x, for one row only. `gated`: the outputs are
        [gate; up] and silu(gate) · up is returned. With `residual_MO` the result is added into it, and it is
        returned."""
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
        if num_rows == 1:
            self._launch_row(x_MI, norm, residual_MO, out_MO, gated, blocks)
        else:
            assert norm is None, "a norm is fused for one row only"
            self._launch_rows(x_MI, residual_MO, out_MO, gated, blocks)
        return out_MO

    def parts(self, x_MI: Tensor, blocks: Blocks | None = None) -> Tensor:
        """Of 2 to MAX_SKINNY_ROWS rows, for who adds up what it reads: float32 [S, M, O]."""
        num_rows = x_MI.shape[0]
        assert x_MI.is_contiguous()
        assert x_MI.shape == (num_rows, self.in_features)
        assert 1 < num_rows <= MAX_SKINNY_ROWS
        blocks = blocks or choose_blocks(x_MI, self.out_features, gated=False)
        shape = (blocks.splits, num_rows, self.out_features)
        sums_SMO = torch.empty(shape, dtype=torch.float32, device=x_MI.device)
        self._launch_rows(x_MI, None, sums_SMO, False, blocks)
        return sums_SMO

    def _launch_row(
        self,
        x_1I: Tensor,
        norm: Norm | None,
        residual_1O: Tensor | None,
        out_1O: Tensor,
        gated: bool,
        blocks: Blocks,
    ) -> None:
        num_outputs = out_1O.shape[1]
        num_programs = min(triton.cdiv(num_outputs, blocks.outputs), blocks.programs * _NUM_PROCESSORS)
        launch(
            gemv,
            (num_programs,),
            x_1I,
            self.weight_OI,
            self.bias_O,
            None if norm is None else norm.weight_I,
            residual_1O,
            out_1O,
            num_outputs,
            0.0 if norm is None else norm.eps,
            K=self.in_features,
            BLOCK_N=blocks.outputs,
            BLOCK_K=next_power(self.in_features),
            NORM=norm is not None,
            BIAS=self.bias_O is not None,
            RESIDUAL=residual_1O is not None,
            GATED=gated,
            num_warps=blocks.num_warps,
            **launch_options(x_1I.device),
        )

    def _launch_rows(
        self,
        x_MI: Tensor,
        residual_MO: Tensor | None,
        out: Tensor,
        gated: bool,
        blocks: Blocks,
    ) -> None:
        """`out`: [M, O], or [S, M, O] for the splits' own sums."""
        num_rows, num_outputs = out.shape[-2:]
        num_tiles = triton.cdiv(num_outputs, blocks.outputs)
        block_m = max(next_power(num_rows), 16)
        added_later = out.dim() == 3
        parts = None
        if blocks.splits > 1 and not added_later:
            assert not gated
            assert num_tiles <= self._arrivals.shape[0]
            shape = (num_tiles, blocks.splits, blocks.padded_outputs, block_m)
            parts = torch.empty(shape, dtype=torch.float32, device=x_MI.device)
        launch(
            skinny_gemm,
            (num_tiles, blocks.splits),
            x_MI,
            self.weight_OI,
            self.bias_O,
            residual_MO,
            out,
            parts,
            self._arrivals,
            num_rows,
            num_outputs,
            K=self.in_features,
            BLOCK_M=block_m,
            TILE_N=blocks.outputs,
            BLOCK_N=blocks.padded_outputs,
            BLOCK_K=blocks.inputs,
            SPLITS=blocks.splits,
            BIAS=self.bias_O is not None,
            RESIDUAL=residual_MO is not None,
            GATED=gated,
            ADDED_LATER=added_later,
            PRECISION=dot_precision(x_MI.dtype),
            num_warps=blocks.num_warps,
            num_stages=blocks.num_stages,
            **launch_options(x_MI.device),
        )


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
        # With a fourth there is no room for the attention behind qkv to come in and bring its keys.
        return Blocks(4, 0, 4, programs=8 if num_outputs > 16384 else 3)
    inputs = 256 // x_MI.element_size()
    if gated:
        return _of_a_wave(8, 4, inputs // 2, 1, x_MI, num_outputs, num_tiles=2)
    for splits in (4, 2):
        if num_outputs * splits <= _MOST_OUTPUTS * _NUM_PROCESSORS:
            return _of_a_wave(6, 3, inputs, splits, x_MI, num_outputs)
    return _with_stages(4, Blocks(64, inputs, 4), x_MI)


def _of_a_wave(
    stages: int,
    wide_stages: int,
    inputs: int,
    splits: int,
    x_MI: Tensor,
    num_outputs: int,
    num_tiles: int = 1,
) -> Blocks:
    """Tiles that give each multiprocessor one program, or as many as any other: those without would leave
    their share of the memory's bandwidth to others that have no use for it."""
    waves = triton.cdiv(num_outputs * splits, _MOST_OUTPUTS * _NUM_PROCESSORS)
    outputs = triton.cdiv(num_outputs * splits, waves * _NUM_PROCESSORS)
    outputs = max(_LEAST_OUTPUTS, triton.cdiv(outputs, 4) * 4)
    is_wide = outputs > _LEAST_BLOCK
    blocks = Blocks(outputs, inputs, 8 if is_wide else 4, splits=splits)
    return _with_stages(wide_stages if is_wide else stages, blocks, x_MI, num_tiles)


def _with_stages(wanted: int, blocks: Blocks, x_MI: Tensor, num_tiles: int = 1) -> Blocks:
    """As many of the wanted stages as the device's shared memory holds beside a little of everything else."""
    rows = num_tiles * blocks.padded_outputs + max(next_power(x_MI.shape[0]), 16)
    stage_bytes = rows * blocks.inputs * x_MI.element_size()
    fitting = (shared_memory_bytes(x_MI.device) - _OTHER_SHARED_BYTES) // stage_bytes
    return replace(blocks, num_stages=max(1, min(wanted, fitting)))
