"""A fused vision block against the plain one with the same weights."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from lm_engine.layers.selection import select_kernels
from model_families.vision.attention import GroupedAttention
from model_families.vision.fused import GATE_OF_ONE, FusedBlock, fuse_blocks
from model_families.vision.layers import Block, GatedMlp, Mlp, PackedSelfAttention, gelu_tanh
from model_families.vision.packing import Segments, pack_grids
from model_families.vision.rotary import axial_rotation

WIDTH, HEADS, INNER = 64, 2, 52  # an inner width that is no multiple of anything fast


def make_block(norm=nn.RMSNorm, gated=True) -> Block:
    torch.manual_seed(3)
    mlp = GatedMlp(WIDTH, INNER, functional.silu) if gated else Mlp(WIDTH, INNER, gelu_tanh)
    attention = PackedSelfAttention(WIDTH, HEADS, GroupedAttention())
    block = Block(norm(WIDTH, eps=1e-6), attention, norm(WIDTH, eps=1e-6), mlp)
    return block.requires_grad_(False).eval()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_fused_block_equals_the_plain_one(device: str):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    place = torch.device(device)
    block = make_block().to(place)
    grid = pack_grids([(1, 4, 6), (1, 2, 4)], 2)
    rotation = axial_rotation(grid, WIDTH // HEADS, 10000.0, place)
    segments = Segments(np.asarray(grid.frame_lengths_F), place)
    x = torch.randn(32, WIDTH, device=place)
    before = x.clone()
    expected = block(x, rotation, segments)
    choice = "auto" if device == "cuda" else "reference"
    found = FusedBlock(copy.deepcopy(block), select_kernels(choice, place, torch.float32))(
        x, rotation, segments
    )
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)
    assert torch.equal(x, before)


def test_a_column_of_ones_carries_the_bias_exactly():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        gate = torch.tensor(GATE_OF_ONE, dtype=dtype)
        assert functional.silu(gate) * torch.tensor(1 / GATE_OF_ONE, dtype=dtype) == 1


def test_a_block_behind_a_fused_one_adds_to_what_it_was_given():
    """And the whole is what the plain blocks give; the first one's input is left alone."""
    kernels = select_kernels("reference", torch.device("cpu"), torch.float32)
    plain = nn.ModuleList([make_block(), make_block(), make_block(gated=False), make_block()])
    fused = copy.deepcopy(plain)
    fuse_blocks(fused, kernels)
    assert [getattr(block, "_spends_input", None) for block in fused] == [False, True, None, False]
    grid = pack_grids([(1, 4, 6), (1, 2, 4)], 2)
    rotation = axial_rotation(grid, WIDTH // HEADS, 10000.0, torch.device("cpu"))
    segments = Segments(np.asarray(grid.frame_lengths_F), torch.device("cpu"))
    x = expected = found = torch.randn(32, WIDTH)
    before = x.clone()
    for block, other in zip(plain, fused, strict=True):
        expected, found = block(expected, rotation, segments), other(found, rotation, segments)
    torch.testing.assert_close(found, expected, atol=5e-5, rtol=5e-5)
    assert torch.equal(x, before)


def test_only_blocks_that_fit_are_fused():
    blocks = nn.ModuleList([make_block(), make_block(norm=nn.LayerNorm), make_block(gated=False)])
    fuse_blocks(blocks, select_kernels("reference", torch.device("cpu"), torch.float32))
    assert [type(block) for block in blocks] == [FusedBlock, Block, Block]
