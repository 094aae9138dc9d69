"""The plain kernels against their formulas in float64, and the seam's promises."""

from __future__ import annotations

import pytest
import torch

from contracts.errors import EngineError
from lm_engine.layers.kernels import HeadShape, QKNorm
from lm_engine.layers.reference import ReferenceKernels
from lm_engine.layers.rope import RotaryEmbedding, position_axes
from lm_engine.layers.selection import select_kernels
from lm_engine.model import RopeConfig

CPU = torch.device("cpu")


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def exact_norm(x, weight, eps):
    x = x.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_rounds_once(dtype):
    x, weight = normal(5, 24, dtype=dtype) * 30, normal(24, seed=1, dtype=dtype)
    found = ReferenceKernels().rms_norm(x, weight, 1e-3)
    assert found.dtype == dtype
    torch.testing.assert_close(
        found, exact_norm(x, weight, 1e-3).to(dtype), atol=0, rtol=2e-6 if dtype is torch.float32 else 0.01
    )


def test_add_rms_norm_gives_norm_and_sum():
    x, residual, weight = normal(5, 24), normal(5, 24, seed=1), normal(24, seed=2)
    expected = x + residual
    normed, total = ReferenceKernels().add_rms_norm(x.clone(), residual.clone(), weight, 1e-6)
    assert torch.equal(total, expected)
    torch.testing.assert_close(normed.double(), exact_norm(expected, weight, 1e-6), atol=1e-5, rtol=0)


def test_silu_mul_takes_the_gate_first():
    gate, up = normal(3, 8), normal(3, 8, seed=1)
    found = ReferenceKernels().silu_mul(torch.cat([gate, up], dim=-1))
    torch.testing.assert_close(found, gate * torch.sigmoid(gate) * up)


@pytest.mark.parametrize("bias", [True, False])
def test_linear(bias):
    weight, bias_O, x = normal(7, 5), normal(7, seed=1) if bias else None, normal(2, 3, 5, seed=2)
    linear = ReferenceKernels().pack_linear(weight, bias_O)
    assert (linear.in_features, linear.out_features) == (5, 7)
    expected = x @ weight.T + (bias_O if bias else 0)
    torch.testing.assert_close(linear(x), expected)


def test_a_head_gives_float32_from_bfloat16():
    weight, x = normal(7, 5, dtype=torch.bfloat16), normal(3, 5, dtype=torch.bfloat16)
    assert ReferenceKernels().pack_linear(weight)(x).dtype == torch.bfloat16
    assert ReferenceKernels().pack_linear(weight, float32_output=True)(x).dtype == torch.float32


@pytest.mark.parametrize("with_norm", [True, False])
def test_split_rope_normalises_then_rotates_queries_and_keys(with_norm):
    heads = HeadShape(num_heads=4, num_kv_heads=2, head_dim=6)
    qkv = normal(5, heads.width)
    angles = normal(5, 3, seed=3)
    norm = QKNorm(normal(6, seed=4), normal(6, seed=5), 1e-6) if with_norm else None
    q, k, v = ReferenceKernels().split_rope(qkv.clone(), heads, angles.cos(), angles.sin(), norm)
    parts = qkv.view(5, 8, 6)
    assert torch.equal(v, parts[:, 6:])
    for found, part, weight in (
        (q, parts[:, :4], norm and norm.query_weight_D),
        (k, parts[:, 4:6], norm and norm.key_weight_D),
    ):
        plain = exact_norm(part, weight, 1e-6) if with_norm else part.double()
        # A rotation is a product of complex numbers.
        turned = torch.complex(plain[..., :3], plain[..., 3:]) * torch.exp(1j * angles.double())[:, None]
        expected = torch.cat([turned.real, turned.imag], dim=-1)
        torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=0)


def rope(section=None, interleaved=False, scaling=1.0, pairs=8):
    inv_freq = tuple(10.0 ** (-p / pairs) for p in range(pairs))
    return RopeConfig(1e1, inv_freq, scaling, section, interleaved)


def test_axes_of_sections():
    assert position_axes(rope()) is None
    assert position_axes(rope((2, 3, 3))) == [0, 0, 1, 1, 1, 2, 2, 2]
    assert position_axes(rope((4, 2, 2), interleaved=True)) == [0, 1, 2, 0, 1, 2, 0, 0]
    assert position_axes(rope((2, 3, 3), interleaved=True)) == [0, 1, 2, 0, 1, 2, 0, 1]
    with pytest.raises(AssertionError):
        position_axes(rope((2, 3, 2)))


def test_equal_positions_on_all_axes_are_plain_rope():
    positions = torch.tensor([0, 3, 50])
    plain = RotaryEmbedding(rope(), CPU)(positions[None])
    for interleaved in (False, True):
        multi = RotaryEmbedding(rope((2, 3, 3), interleaved), CPU)(positions.expand(3, 3))
        assert all(torch.equal(a, b) for a, b in zip(plain, multi, strict=True))


def test_attention_scaling_multiplies_cos_and_sin():
    positions = torch.tensor([[1, 2]])
    plain, scaled = (RotaryEmbedding(rope(scaling=s), CPU)(positions) for s in (1.0, 1.5))
    torch.testing.assert_close(scaled[0], 1.5 * plain[0])
    torch.testing.assert_close(scaled[1], 1.5 * plain[1])


def test_selection_by_name():
    assert select_kernels("reference", CPU, torch.float32).name == "reference"
    assert select_kernels("auto", torch.device("meta"), torch.float32).name == "reference"
    with pytest.raises(EngineError, match="native"):
        select_kernels("native", torch.device("meta"), torch.float32)
