"""The cache in e4m3: what it loses, and that it is written and read alike by every path."""

from __future__ import annotations

import pytest
import torch

from contracts.errors import EngineError
from lm_engine.attention.quantised import E4M3_MAX, MIN_EXPONENT, dequantise, quantise
from lm_engine.attention.reference import BatchedAttention, SequenceAttention
from lm_engine.memory import allocate_kv, capacity_of, check_kv_dtype
from lm_engine.native import Unavailable, native_kernels
from tests.lm_engine.random_decoder import tiny_config
from tests.lm_engine.test_attention import MIXES, Case

torch.set_num_threads(1)
BACKENDS = [SequenceAttention, BatchedAttention]


def test_a_value_is_within_a_sixteenth_of_itself_or_near_nothing():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(400, 128, generator=generator) * torch.randn(400, 1, generator=generator).exp() ** 9
    error = (dequantise(*quantise(x)).double() - x.double()).abs()
    most = x.double().abs().amax(dim=1, keepdim=True)
    assert (error <= torch.maximum(x.double().abs() / 16, most * 2**-17)).all()
    root = error.square().mean().sqrt() / x.double().square().mean().sqrt()
    assert root < 0.03


def test_exponents_are_the_least_that_hold_the_largest_value():
    largest = torch.tensor([448.0, 448.0 + 2**-15, 449.0, 1.75, 1.76, 2.0**-100, 0.0, 2.0**-140, 3e38])
    values, exponents = quantise(torch.stack([largest, largest / 3], dim=1))
    assert exponents.tolist() == [0, 1, 1, -8, -7, -108, MIN_EXPONENT, MIN_EXPONENT, 120]
    assert values.float().abs().max() <= E4M3_MAX
    whole = torch.tensor([448.0, 1.75, 2.0**-100, 0.0])
    assert torch.equal(dequantise(*quantise(whole[:, None]))[:, 0], whole)


def test_what_is_not_finite_stays_so():
    read = dequantise(*quantise(torch.tensor([[torch.nan, 1.0], [torch.inf, 1.0]])))
    assert not read.isfinite()[:, 0].any()


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_attention_reads_what_is_stored(mix, backend):
    """Against the same attention in float64."""
    case = Case(MIXES[mix], block_size=4)
    found, kv = case.attend(backend(), quantised=True)
    case.q_TND = case.q_TND.double()
    expected, expected_kv = case.attend(SequenceAttention(), quantised=True)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=0)
    for ours, plain in zip(kv.layered, expected_kv.layered, strict=True):
        assert torch.equal(ours, plain)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_error_of_attention(backend):
    """Root of the mean squares against attention that is not quantised, in parts of its output's."""
    case = Case(MIXES["mixed"], block_size=4, head_dim=64)
    exact = case.dense()
    found, _ = case.attend(backend(), quantised=True)
    error = (found.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert 0.005 < error < 0.05


@pytest.mark.parametrize("backend", BACKENDS)
def test_writes_only_the_steps_slots_of_its_layer(backend):
    case = Case(MIXES["mixed"], block_size=4)
    _, before = case.attend(SequenceAttention(), quantised=True)
    slots = case.metadata.slot_mapping
    case.k_TGD, case.v_TGD = case.k_TGD * 3, case.v_TGD * 5
    _, after = case.attend(backend(), quantised=True)
    for old, new in zip(before.layered, after.layered, strict=True):
        assert torch.equal(old[0], new[0])
        changed = (old[1] != new[1]).flatten(0, 1).flatten(1).any(dim=1)
        assert set(changed.nonzero().flatten().tolist()) <= set(slots.tolist())
    assert torch.equal(after.keys[1].flatten(0, 1)[slots].float(), quantise(case.k_TGD)[0].float())


def test_a_block_takes_half_the_bytes():
    config = tiny_config(head_dim=128)
    kv = allocate_kv(config, 3, 16, torch.bfloat16, torch.device("cpu"), "fp8")
    held = sum(tensor.nbytes for tensor in kv.layered)
    assert held == config.kv_bytes_per_token(torch.bfloat16, "fp8") * 16 * 3
    assert held / (config.kv_bytes_per_token(torch.bfloat16) * 16 * 3) == 129 / 256
    sizes = {"kv_bytes": 1 << 20, "block_size": 16, "context_length": 64}
    plain = capacity_of(config, torch.bfloat16, **sizes)
    assert capacity_of(config, torch.bfloat16, kv_dtype="fp8", **sizes).num_blocks >= int(
        1.9 * plain.num_blocks
    )


def test_what_cannot_read_it_refuses():
    kernels = native_kernels(torch.device("cpu"), torch.float32)
    if isinstance(kernels, Unavailable):
        pytest.skip(kernels.reason)
    check_kv_dtype(kernels.attention, "auto", "thinker")
    with pytest.raises(EngineError, match=r"stage\.thinker\.kv_dtype = 'fp8': the native attention"):
        check_kv_dtype(kernels.attention, "fp8", "thinker")
