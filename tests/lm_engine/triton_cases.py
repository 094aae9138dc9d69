"""The Triton kernels against formulas in float64 and the plain kernels, on the GPU if there is one, else in
Triton's interpreter. Collected through test_triton.py."""

from __future__ import annotations

import dataclasses
import itertools
from functools import partial

import numpy as np
import pytest
import torch

from contracts.errors import EngineError
from contracts.params import SamplingParams
from lm_engine.attention.quantised import dequantise
from lm_engine.attention.reference import SequenceAttention
from lm_engine.attention.triton import TritonAttention, choose_tile
from lm_engine.decoder import Decoder
from lm_engine.graphs import CapturedDecodes
from lm_engine.layers.kernels import HeadShape, QKNorm
from lm_engine.layers.reference import ReferenceKernels
from lm_engine.layers.rope import RotaryEmbedding
from lm_engine.layers.selection import select_kernels
from lm_engine.model import AdapterRanks, AttentionMetadata, MoeConfig, PagedKV, RopeConfig
from lm_engine.passes import CapturedPasses, PaddedPasses
from lm_engine.plan import Admission, SequenceStep
from lm_engine.request_table import RequestTable, SampledRows
from lm_engine.row_sampler import RowSampler
from lm_engine.sampler import Needs, RowParams, Sampled, needs_of, sample
from lm_engine.triton.codes import CodeBuffers, draw_first, draw_residual
from lm_engine.triton.experts import Shared, TritonExperts
from lm_engine.triton.kernels import TritonKernels
from lm_engine.triton.linear import Blocks, Norm, TritonLinear, choose_blocks, make_arrivals
from lm_engine.triton.packed import attend_packed
from lm_engine.triton.step import DecodeBuffers, draw, prepare_inputs
from tests.lm_engine.random_decoder import RandomSource, tiny_config
from tests.lm_engine.stepping import Host, greedy
from tests.lm_engine.test_attention import MIXES, Case, copy_of, quantise_cache

torch.set_num_threads(1)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = (torch.float32, torch.bfloat16) if DEVICE.type == "cuda" else (torch.float32,)
ROPE = RopeConfig(theta=1e4, inv_freq=tuple(1e4 ** (-p / 8) for p in range(8)))
MROPE = dataclasses.replace(ROPE, mrope_section=(4, 2, 2))
SPARSE = MoeConfig(
    num_experts=6,
    num_chosen=2,
    intermediate_size=16,
    normalise=True,
    shared_intermediate_size=24,
    dense_layers=frozenset({0}),
)
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2**-7}


@pytest.fixture(scope="module")
def kernels():
    return TritonKernels(DEVICE)


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def assert_near(found, expected, dtype):
    """Within a rounding of the value plus as much of the tensor's typical size."""
    expected = expected.double()
    assert found.shape == expected.shape
    bound = TOLERANCE[dtype] * (expected.abs() + expected.square().mean().sqrt() + 1e-6)
    error = (found.double() - expected).abs()
    assert bool((error <= bound).all()), f"worst {(error / bound).max().item():.2f} of the bound"


def assert_near_sum(found, expected, added, dtype):
    """Attention. Weights are rounded before they meet the values: an error is as large as all that is
    `added` up, signs left out, however much of it cancels out. Half a step for the weights, half for the
    result; what float32 adds to both."""
    bound = (TOLERANCE[dtype] + TOLERANCE[torch.float32]) * added
    error = (found.double() - expected).abs()
    assert bool((error <= bound).all()), f"worst {(error / bound).max().item():.2f} of the bound"


def exact_norm(x, weight, eps):
    x = x.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()


# --- layers -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [24, 64])
def test_norms(kernels, dtype, width):
    x, residual, weight = (
        normal(*s, seed=i, dtype=dtype) for i, s in enumerate([(3, width)] * 2 + [(width,)])
    )
    assert_near(kernels.rms_norm(x, weight, 1e-3), exact_norm(x, weight, 1e-3), dtype)
    total = x + residual
    normed, summed = kernels.add_rms_norm(x.clone(), residual, weight, 1e-3)
    assert summed is residual
    assert torch.equal(summed, total)
    assert_near(normed, exact_norm(total, weight, 1e-3), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [5, 1500])
def test_silu_mul(kernels, dtype, width):
    gate_up = normal(2, 2 * width, dtype=dtype)
    gate, up = gate_up.double().chunk(2, dim=-1)
    assert_near(kernels.silu_mul(gate_up), gate * torch.sigmoid(gate) * up, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_norm", [True, False])
@pytest.mark.parametrize("heads", [HeadShape(4, 2, 8), HeadShape(3, 1, 20)])
def test_split_rope(kernels, dtype, with_norm, heads):
    qkv, angles = normal(3, heads.width, dtype=dtype), normal(3, heads.head_dim // 2, seed=3)
    weights = [normal(heads.head_dim, seed=seed, dtype=dtype) for seed in (4, 5)]
    norm = QKNorm(*weights, 1e-6) if with_norm else None
    found = kernels.split_rope(qkv.clone(), heads, angles.cos(), angles.sin(), norm)
    expected = ReferenceKernels().split_rope(qkv.clone(), heads, angles.cos(), angles.sin(), norm)
    for ours, plain in zip(found, expected, strict=True):
        assert_near(ours, plain, dtype)


LONG_ROPE = RopeConfig(theta=1e6, inv_freq=tuple(1e6 ** (-p / 10) for p in range(10)), attention_scaling=1.2)


@pytest.mark.parametrize("rope", [ROPE, MROPE, LONG_ROPE], ids=["one axis", "three axes", "scaled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_turns_are_those_of_torch(kernels, rope, dtype):
    """In a larger buffer; far from the start, where an argument reduced by a rounded π would show."""
    rotary = RotaryEmbedding(rope, DEVICE)
    positions = torch.tensor([[0, 1, 17, 4095, 131071, 9], [0, 2, 90, 3, 5, 9], [0, 7, 8, 1e5, 2, 9]])
    positions = positions[: rotary.num_axes].to(DEVICE, dtype)
    for step in (positions[:, :5], positions[:, 1:2], positions[:1].expand(rotary.num_axes, -1)):
        for found, expected in zip(kernels.turns(rotary, step), rotary(step), strict=True):
            assert found.shape == expected.shape == (step.shape[1], len(rope.inv_freq))
            assert found.dtype == torch.float32
            torch.testing.assert_close(found, expected, atol=2**-23 * rotary.scaling, rtol=2**-22)


# --- sparse layers ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "normalise"), [(1, True), (2, False), (21, True)])
def test_sparse_layers_of_few_tokens(kernels, dtype, num_tokens, normalise):
    """More pairs than experts and fewer; an expert with more pairs than a tile holds."""
    num_experts, hidden, width, num_chosen = 12, 48, 40, 3
    gate_up = normal(num_experts, 2 * width, hidden, seed=1, dtype=dtype) * hidden**-0.5
    down = normal(num_experts, hidden, width, seed=2, dtype=dtype) * width**-0.5
    x, logits = normal(num_tokens, hidden, seed=3, dtype=dtype), normal(num_tokens, num_experts, seed=4)
    logits[:, 5] += 4  # nearly all choose it
    residual, shared_y = (normal(num_tokens, hidden, seed=s, dtype=dtype) for s in (5, 6))
    shared = Shared(shared_y, normal(num_tokens, 1, seed=7)) if normalise else None
    weight, chosen = logits.double().softmax(-1).topk(num_chosen)
    if normalise:
        weight /= weight.sum(-1, keepdim=True)
    gate, up = torch.einsum("th,tkih->tki", x.double(), gate_up.double()[chosen]).chunk(2, -1)
    inner = (gate * torch.sigmoid(gate) * up).to(dtype).double()
    expected = torch.einsum("tki,tkhi,tk->th", inner, down.double()[chosen], weight)
    if dtype == torch.float32:
        experts = TritonExperts(gate_up, down, None)
        assert_near(experts(x, chosen, weight.float()), expected, dtype)
    if shared is not None:
        expected += torch.sigmoid(shared.gate_T1.double()) * shared_y.double()
    expected += residual.double()
    TritonExperts(gate_up, down, None).add_routed(x, logits, num_chosen, normalise, shared, residual)
    assert_near(residual, expected, dtype)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_routing_without_a_finite_logit_stays_inside(kernels):
    experts = TritonExperts(normal(5, 16, 16), normal(5, 16, 8), None)
    residual = torch.zeros(2, 16, device=DEVICE)
    logits = torch.full((2, 5), torch.nan, device=DEVICE)
    logits[1] = -torch.inf
    experts.add_routed(normal(2, 16), logits, 3, True, None, residual)
    assert residual.isnan().all()


# --- linears ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 2, 19])
@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(48, 40), (32, 17)])
@pytest.mark.parametrize("gated", [True, False])
def test_linear_with_all_that_is_fused_in(dtype, num_rows, num_inputs, num_outputs, gated):
    x = normal(num_rows, num_inputs, dtype=dtype)
    weight = normal((1 + gated) * num_outputs, num_inputs, seed=1, dtype=dtype) * num_inputs**-0.5
    bias = None if gated else normal(num_outputs, seed=2, dtype=dtype)
    norm_weight, residual = (
        normal(num_inputs, seed=3, dtype=dtype),
        normal(num_rows, num_outputs, seed=4, dtype=dtype),
    )
    norm = Norm(norm_weight, 1e-3) if num_rows == 1 else None
    normed = x.double() if norm is None else exact_norm(x, norm_weight, 1e-3)
    expected = normed @ weight.double().T
    if gated:
        gate, up = expected.chunk(2, dim=-1)
        expected = gate * torch.sigmoid(gate) * up
    else:
        expected += bias.double()
    expected += residual.double()
    before = x.clone()
    arrivals = make_arrivals(DEVICE)
    linear = TritonLinear(weight, bias, False, arrivals)
    blocks = Blocks(64, 32, 4, 3, splits=1 if gated else 2) if DEVICE.type == "cuda" else None
    found = linear.fused(x, norm=norm, residual_MO=residual, gated=gated, blocks=blocks)
    assert found is residual
    assert torch.equal(x, before)
    assert not arrivals.any()
    assert_near(found, expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("splits", [1, 3])
def test_tiles_of_outputs_that_are_no_power_of_two(dtype, gated, splits):
    """A tile leaves the next one's outputs alone: they would get the bias twice."""
    if gated and splits > 1:
        pytest.skip("is not split")
    x, weight = normal(19, 200, dtype=dtype), normal(96, 200, seed=1, dtype=dtype) * 0.07
    bias, residual = normal(96, seed=2, dtype=dtype), normal(19, 96, seed=3, dtype=dtype)
    expected = x.double() @ weight.double().T
    if gated:
        gate, up = expected.chunk(2, dim=-1)
        expected = gate * torch.sigmoid(gate) * up
    else:
        expected += bias.double() + residual.double()
    arrivals = make_arrivals(DEVICE)
    linear = TritonLinear(weight, None if gated else bias, False, arrivals)
    blocks = Blocks(20, 64, 4, 2, splits)
    found = linear.fused(x, residual_MO=None if gated else residual, gated=gated, blocks=blocks)
    assert not arrivals.any()
    assert_near(found, expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_outputs", [96, 90])
def test_parts_of_a_linear_add_up_to_it(dtype, num_outputs):
    x, weight = normal(19, 200, dtype=dtype), normal(num_outputs, 200, seed=1, dtype=dtype) * 0.07
    bias = normal(num_outputs, seed=2, dtype=dtype)
    linear = TritonLinear(weight, bias, False, make_arrivals(DEVICE))
    parts = linear.parts(x, Blocks(40, 64, 4, 2, 3))
    assert parts.shape == (3, 19, num_outputs)
    assert_near(parts.sum(0), x.double() @ weight.double().T + bias.double(), dtype)


@pytest.mark.parametrize("rows", [2, 8, 32, 64])
@pytest.mark.parametrize(("outputs", "inputs", "gated"), [(2560, 2048, False), (11008, 2048, True)])
def test_as_many_tiles_as_multiprocessors(monkeypatch, rows, outputs, inputs, gated):
    monkeypatch.setattr("lm_engine.triton.linear.interpreted", lambda: False)
    monkeypatch.setattr("lm_engine.triton.linear.shared_memory_bytes", lambda device: 227 << 10)
    x_MI = torch.empty(rows, inputs, dtype=torch.bfloat16, device="meta")
    blocks = choose_blocks(x_MI, outputs, gated)
    assert 120 < -(-outputs // blocks.outputs) * blocks.splits <= 132


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 3, 70])
def test_a_plain_linear_for_few_rows_and_many(kernels, dtype, num_rows):
    x, weight = normal(num_rows, 32, dtype=dtype), normal(24, 32, seed=1, dtype=dtype)
    for float32_output in (True, False):
        found = kernels.pack_linear(weight, float32_output=float32_output)(x)
        assert found.dtype == (torch.float32 if float32_output else dtype)
        assert_near(found, x.double() @ weight.double().T, dtype)
    assert kernels.pack_linear(weight)(x[:0]).shape == (0, 24)


# --- attention ----------------------------------------------------------------------------------------------
LENGTHS = {
    **MIXES,
    "decodes": [(5, 1), (0, 1), (131, 1), (32, 1), (31, 1)],
    # Of decodes and chunks, some split and some not; a tile that begins where a part does.
    "long": [(300, 20), (515, 1), (0, 37), (37, 3), (2, 1), (257, 64), (260, 1)],
}
# Tiles whole, in the shortest parts, in longer ones, and in no more than so many.
MIXED_PROGRAMS = ((None, False), (264, False), (48, False), (48, True))


def on_device(case):
    moved = {
        name: value.to(DEVICE)
        for name, value in vars(case.metadata).items()
        if isinstance(value, torch.Tensor)
    }
    case.metadata = AttentionMetadata(**{**vars(case.metadata), **moved})
    keys, values = case.kv.keys.to(DEVICE), case.kv.values.to(DEVICE)
    case.kv = dataclasses.replace(case.kv, keys=keys, values=values)
    case.history = [[part.to(DEVICE) for part in parts] for parts in case.history]
    case.q_TND, case.k_TGD, case.v_TGD = (x.to(DEVICE) for x in (case.q_TND, case.k_TGD, case.v_TGD))
    return case


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mix", ["mixed", "decodes", "long"])
@pytest.mark.parametrize(("heads", "groups", "head_dim", "block_size"), [(6, 2, 16, 16), (4, 4, 24, 32)])
@pytest.mark.parametrize("programs", MIXED_PROGRAMS)
def test_mixed_attention_equals_dense(dtype, mix, heads, groups, head_dim, block_size, programs):
    shape = {"heads": heads, "groups": groups, "head_dim": head_dim, "block_size": block_size, "dtype": dtype}
    case = on_device(Case(LENGTHS[mix], **shape))
    found, kv = case.attend(TritonAttention(DEVICE, mixed_programs=programs[0], mixed_at_once=programs[1]))
    assert_near(found, case.dense(), dtype)
    _, expected_kv = case.attend(SequenceAttention())
    assert torch.equal(kv.keys, expected_kv.keys)
    assert torch.equal(kv.values, expected_kv.values)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [1, 7, 64, 100, 290])
def test_mixed_attention_of_a_window_equals_dense(dtype, window):
    """Shorter than a chunk and longer, than a tile of queries or keys, than what has been computed before."""
    case = on_device(Case(LENGTHS["long"], block_size=16, head_dim=16, dtype=dtype, window=window))
    found, _ = case.attend(TritonAttention(DEVICE))
    assert_near(found, case.dense(), dtype)


def test_layers_of_a_step_may_differ_in_their_windows():
    """Some in parts, others whole."""
    case, attention = on_device(Case(LENGTHS["long"], block_size=16, head_dim=16)), TritonAttention(DEVICE)
    for window in (None, 70, None):
        case.kv.windows = (None, window)
        found, _ = case.attend(attention)
        assert_near(found, case.dense(), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mix", ["mixed", "decodes", "one decode"])
@pytest.mark.parametrize(("heads", "groups", "head_dim", "with_norm"), [(6, 2, 16, True), (3, 1, 24, False)])
def test_from_the_projection_through_rotation_and_cache(dtype, mix, heads, groups, head_dim, with_norm):
    """Both fused paths: chunks in one launch, decodes with split keys. Twice: counters must come back."""
    case = Case(LENGTHS[mix], block_size=16, heads=heads, groups=groups, head_dim=head_dim, dtype=dtype)
    _check_from_the_projection(on_device(case), HeadShape(heads, groups, head_dim), with_norm)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [1, 2, 31, 32, 33, 70, 131, 132, 133])
def test_decodes_see_no_more_than_a_window(dtype, window):
    """Rows shorter than it, as long and longer; one split and several, cut within a tile and at its end."""
    case = Case(LENGTHS["decodes"], block_size=16, head_dim=16, dtype=dtype, window=window)
    _check_from_the_projection(on_device(case), HeadShape(6, 2, 16), with_norm=False)


def _check_from_the_projection(case, shape, with_norm):
    dtype, head_dim = case.q_TND.dtype, shape.head_dim
    num_tokens = len(case.q_TND)
    qkv, angles = normal(num_tokens, shape.width, dtype=dtype), normal(num_tokens, head_dim // 2, seed=3)
    weights = [normal(head_dim, seed=seed, dtype=dtype) for seed in (4, 5)]
    norm = QKNorm(*weights, 1e-6) if with_norm else None
    plain, ours = ReferenceKernels(), TritonAttention(DEVICE)
    turned = plain.split_rope(qkv.clone(), shape, angles.cos(), angles.sin(), norm)
    case.q_TND, case.k_TGD, case.v_TGD = turned
    expected = case.dense().flatten(1)
    _, expected_kv = case.attend(SequenceAttention())
    for _ in range(2):
        kv = copy_of(case.kv)
        rows = (qkv.clone(), shape, angles.cos(), angles.sin(), norm)
        found = ours.rotate_and_attend(*rows, kv, 1, case.metadata)
        assert_near(found, expected, dtype)
        assert_near(kv.keys, expected_kv.keys, dtype)
        assert torch.equal(kv.values, expected_kv.values)
    assert not ours._arrivals.any()


@pytest.mark.parametrize(
    ("head_dim", "block_size"), [(64, 16), (80, 32), (96, 64), (128, 32), (256, 16), (256, 64)]
)
@pytest.mark.parametrize(
    "lengths", [[(70, 20), (33, 1), (0, 9)], [(70, 1), (129, 1)]], ids=["mixed", "decodes"]
)
def test_heads_and_pages_of_all_sizes(head_dim, block_size, lengths):
    case = on_device(Case(lengths, block_size=block_size, heads=4, groups=2, head_dim=head_dim))
    assert_near(case.attend(TritonAttention(DEVICE))[0], case.dense(), torch.float32)
    num_tokens, shape = len(case.q_TND), HeadShape(4, 2, head_dim)
    qkv_TX = torch.cat([case.q_TND, case.k_TGD, case.v_TGD], dim=1).flatten(1)
    ones_TP = torch.ones(num_tokens, head_dim // 2, device=DEVICE)
    unturned = (shape, ones_TP, torch.zeros_like(ones_TP), None)
    found_TX = TritonAttention(DEVICE).rotate_and_attend(qkv_TX, *unturned, case.kv, 1, case.metadata)
    assert_near(found_TX.view(case.q_TND.shape), case.dense(), torch.float32)


@pytest.mark.parametrize("programs", MIXED_PROGRAMS)
def test_a_padded_step_leaves_zeros_where_there_is_no_sequence(programs):
    """Rows of no tokens before and behind; lengths that the host does not know. Another step in the same
    buffers afterwards: its plan is a new one."""
    num_tokens, num_rows = 160, 12
    attention = TritonAttention(DEVICE, mixed_programs=programs[0], mixed_at_once=programs[1])
    cases = [
        on_device(Case(lengths, block_size=16, heads=6, groups=2, head_dim=16))
        for lengths in (LENGTHS["long"], [(400, 90), (3, 1)])
    ]
    starts = torch.zeros(num_rows + 1, dtype=torch.int32, device=DEVICE)
    lengths = torch.zeros(num_rows, dtype=torch.int32, device=DEVICE)
    tables = torch.zeros(num_rows, 64, dtype=torch.int32, device=DEVICE)
    slots = torch.zeros(num_tokens, dtype=torch.int64, device=DEVICE)
    padded = AttentionMetadata(starts, lengths, tables, slots, num_tokens, 1024, (), (), padded=True)
    for case in cases:
        num_used, found = len(case.q_TND), case.metadata
        rows = torch.arange(len(found.sequence_lengths)) + (1 if case is cases[1] else 0)
        starts.fill_(num_used)
        starts[: rows[0] + 1] = 0
        starts[rows + 1] = found.query_starts[1:]
        lengths.zero_()
        lengths[rows] = found.sequence_lengths
        tables[rows, : found.block_tables.shape[1]] = found.block_tables
        slots.zero_()
        slots[:num_used] = found.slot_mapping
        x_TGD = normal(num_tokens, 2, 16)
        q_TND, k_TGD, v_TGD = normal(num_tokens, 6, 16), x_TGD.clone(), x_TGD.clone()
        q_TND[:num_used], k_TGD[:num_used], v_TGD[:num_used] = case.q_TND, case.k_TGD, case.v_TGD
        out_TND = attention.attend(q_TND, k_TGD, v_TGD, case.kv, 1, padded)
        assert_near(out_TND[:num_used], case.dense(), torch.float32)
        assert not out_TND[num_used:].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [80, 72, 32])
def test_packed_attention_equals_dense(dtype, head_dim):
    """Segments shorter and longer than a tile, out of a fused projection."""
    lengths = (5, 16, 1, 37) if DEVICE.type == "cpu" else (5, 64, 1, 300, 128)
    starts = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int()
    q, k, v = normal(sum(lengths), 3, 2, head_dim, dtype=dtype).unbind(1)
    found = attend_packed(q, k, v, starts, max(lengths))
    expected, added = (torch.empty_like(found, dtype=torch.float64) for _ in range(2))
    for first, end in itertools.pairwise(starts.tolist()):
        part = slice(first, end)
        scores = torch.einsum("nhd,mhd->hnm", q[part].double(), k[part].double()) / head_dim**0.5
        expected[part] = torch.einsum("hnm,mhd->nhd", scores.softmax(-1), v[part].double())
        added[part] = torch.einsum("hnm,mhd->nhd", scores.softmax(-1), v[part].double().abs())
    assert_near_sum(found, expected, added, dtype)


HAS_FP8 = DEVICE.type == "cpu" or torch.cuda.get_device_capability() >= (8, 9)


@pytest.mark.skipif(not HAS_FP8, reason="needs a GPU that reads e4m3")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mix", ["mixed", "decodes", "one decode", "long"])
@pytest.mark.parametrize(
    ("heads", "groups", "head_dim", "with_norm", "window"),
    [(6, 2, 16, True, None), (3, 1, 24, False, None), (6, 2, 16, False, 40)],
)
def test_a_quantised_cache_is_written_and_read(dtype, mix, heads, groups, head_dim, with_norm, window):
    """Against attention in float64 over what the plain path stores; and no further from unquantised attention
    than that."""
    sizes = {"heads": heads, "groups": groups, "head_dim": head_dim}
    case = on_device(Case(LENGTHS[mix], block_size=16, dtype=dtype, window=window, **sizes))
    case.kv.keys[0], case.kv.values[0] = 0, 0
    shape = HeadShape(heads, groups, head_dim)
    num_tokens = len(case.q_TND)
    qkv, angles = normal(num_tokens, shape.width, dtype=dtype), normal(num_tokens, head_dim // 2, seed=3)
    weights = [normal(head_dim, seed=seed, dtype=dtype) for seed in (4, 5)]
    norm = QKNorm(*weights, 1e-6) if with_norm else None
    plain, ours = ReferenceKernels(), TritonAttention(DEVICE)
    assert "fp8" in ours.kv_dtypes
    turned = plain.split_rope(qkv.clone(), shape, angles.cos(), angles.sin(), norm)
    case.q_TND, case.k_TGD, case.v_TGD = turned
    exact = case.dense().flatten(1)
    kv = quantise_cache(case.kv)
    rows = (qkv.clone(), shape, angles.cos(), angles.sin(), norm)
    found = ours.rotate_and_attend(*rows, kv, 1, case.metadata)
    _, expected_kv = case.attend(SequenceAttention(), quantised=True)
    assert torch.equal(kv.value_exponents, expected_kv.value_exponents)
    assert torch.equal(kv.values.view(torch.uint8), expected_kv.values.view(torch.uint8))
    # A rotation that rounds the other way may choose the next value, or the next power of two.
    ours_k, plain_k = (dequantise(c.keys, c.key_exponents) for c in (kv, expected_kv))
    assert (ours_k != plain_k).float().mean() < (0.001 if dtype is torch.float32 else 0.05)
    assert ((ours_k - plain_k).abs() <= plain_k.abs() / 7 + 1e-3).all()
    case.kv, case.q_TND = kv, case.q_TND.double()
    stored_v = dequantise(kv.values, kv.value_exponents).double()
    stored = PagedKV(ours_k.double(), stored_v, windows=kv.windows)
    slots = case.metadata.slot_mapping
    new = [cache[1].flatten(0, 1)[slots] for cache in (stored.keys, stored.values)]
    expected = SequenceAttention().attend(case.q_TND, *new, stored, 1, case.metadata).flatten(1)
    new[1], stored = new[1].abs(), dataclasses.replace(stored, values=stored.values.abs())
    added = SequenceAttention().attend(case.q_TND, *new, stored, 1, case.metadata).flatten(1)
    assert_near_sum(found, expected, added, dtype)
    error = (found.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert error < 0.06
    assert not ours._arrivals.any()


@pytest.mark.skipif(not HAS_FP8, reason="needs a GPU that reads e4m3")
def test_a_decode_attends_to_its_own_key_as_it_is_stored():
    """So that computing the token again, in a chunk that reads it from the cache, gives the same."""
    shape = HeadShape(4, 2, 16)
    one = on_device(Case([(20, 1)], block_size=16, heads=4, groups=2, head_dim=16))
    qkv, angles = normal(2, shape.width, seed=2), normal(2, 8, seed=3)
    attention, first = TritonAttention(DEVICE), quantise_cache(one.kv)
    table = {"query_starts": torch.tensor([0, 2], dtype=torch.int32, device=DEVICE), "max_query_length": 2}
    length = torch.tensor([21], dtype=torch.int32, device=DEVICE)
    last = one.metadata.slot_mapping
    before = one.metadata.block_tables[0, 19 // 16].long() * 16 + 19 % 16
    chunk = dataclasses.replace(
        one.metadata,
        **table,
        sequence_lengths=length,
        slot_mapping=torch.cat([before[None], last]),
        host_query_starts=(0, 2),
    )
    whole = attention.rotate_and_attend(qkv.clone(), shape, angles.cos(), angles.sin(), None, first, 1, chunk)
    alone = attention.rotate_and_attend(
        qkv[1:].clone(), shape, angles[1:].cos(), angles[1:].sin(), None, first, 1, one.metadata
    )
    assert_near(alone, whole[1:].double(), torch.float32)


def test_decodes_are_split_where_programs_are_few():
    splits = [
        choose_tile(pairs, length, 128).splits for pairs, length in ((2, 8192), (64, 8192), (1024, 8192))
    ]
    assert splits[0] > splits[1] > splits[2] == 1
    assert choose_tile(2, 1, 128).splits == 1


# --- the whole decoder --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "changes",
    [
        {"qkv_bias": True},
        {"qk_norm": True, "rope": MROPE},
        {"moe": SPARSE},
        {"kept_hidden_layer": 1},
        {"windows": (None, 9)},
    ],
)
@pytest.mark.parametrize("mix", ["decodes", "mixed"])
def test_the_decoder_equals_that_of_the_plain_kernels(kernels, changes, mix):
    """Decodes go the fused way, mixed steps layer by layer."""
    config = tiny_config(**{"head_dim": 16, "rope": ROPE, **changes})
    source = RandomSource(device=DEVICE)
    plain, ours = (Decoder(config, source, k) for k in (ReferenceKernels(), kernels))
    case = on_device(Case(LENGTHS[mix], block_size=16, heads=4, groups=2, head_dim=16))
    assert kernels.fused_pass.takes(case.metadata) == (mix == "decodes")
    num_tokens = len(case.q_TND)
    token_ids = torch.arange(num_tokens, device=DEVICE) % config.vocab_size
    axes = torch.arange(1, 1 + config.num_position_axes, device=DEVICE)
    positions = torch.arange(num_tokens, device=DEVICE)[None] * axes[:, None]
    outputs, caches, blocks = [], [], case.kv.keys.shape[1:3]
    for decoder in (plain, ours):
        kv = copy_of(case.kv)
        kv.hidden, kv.windows = case.kv.keys.new_zeros(*blocks, 24), config.windows
        hidden = decoder.forward(decoder.embed(token_ids), positions, kv, decoder.attention, case.metadata)
        outputs.append(decoder.logits(hidden))
        caches.append(kv)
    assert caches[0].hidden.any() == (config.kept_hidden_layer is not None)
    assert_near(caches[1].hidden, caches[0].hidden, torch.float32)
    assert_near(outputs[1], outputs[0], torch.float32)
    assert_near(caches[1].keys, caches[0].keys, torch.float32)


@pytest.mark.parametrize(
    ("mix", "ranks"),
    [
        ("decodes", AdapterRanks(q=3, k=2, v=4, o=3, gate=2, up=1, down=5)),
        ("one decode", AdapterRanks(v=2, up=3)),
    ],
)
def test_an_adapter_adds_what_it_adds_to_the_plain_kernels(kernels, mix, ranks):
    """The fused way as well, and nothing for tokens whose gate is 0."""
    config = tiny_config(head_dim=16, rope=ROPE, picture_adapter=ranks)
    source = RandomSource(device=DEVICE)
    plain, ours = (Decoder(config, source, k) for k in (ReferenceKernels(), kernels))
    case = on_device(Case(LENGTHS[mix], block_size=16, heads=4, groups=2, head_dim=16))
    num_tokens = len(case.q_TND)
    positions = torch.arange(num_tokens, device=DEVICE)
    token_ids, found = positions % config.vocab_size, []
    gates = [None, *((positions % 2 == rest).float()[:, None] for rest in (0, 1))]
    for decoder, gate_T1 in itertools.product((plain, ours), gates):
        kv = PagedKV(case.kv.keys.clone(), case.kv.values.clone())
        metadata = dataclasses.replace(case.metadata, gate_T1=gate_T1)
        found.append(
            decoder.forward(decoder.embed(token_ids), positions[None], kv, decoder.attention, metadata)
        )
    for theirs, mine in zip(found[:3], found[3:], strict=True):
        assert_near(mine, theirs, torch.float32)
    ungated = found[3] - found[4]
    if mix == "decodes":  # each sequence for itself
        torch.testing.assert_close(ungated[1::2], torch.zeros_like(ungated[1::2]), atol=1e-5, rtol=0)
    assert ungated[0].abs().max() > 0.1


def test_a_decode_step_in_a_graph_takes_its_gates_from_the_table(kernels):
    num_rows = 3
    config = tiny_config(head_dim=16, rope=ROPE, picture_adapter=AdapterRanks(q=2, down=3))
    decoder, drawn = Decoder(config, RandomSource(device=DEVICE), kernels), []
    for in_graph in (False, True):
        with Host(decoder, block_size=16, max_sequences=8, cuda_graphs=False) as host:
            if in_graph:
                host.runner._graphs = Replays(decoder, host)
            for slot in range(num_rows):
                host.admit(slot, list(range(1, 8)), gated_from=3 if slot % 2 == 0 else None)
            host.step(*((slot, 7) for slot in range(num_rows)))
            results = [host.step(*((slot, 1) for slot in range(num_rows))) for _ in range(2)]
            results.append(host.step((1, 1)))
            drawn.append([token.token_id for result in results for token in result.sampled])
    assert host.runner._graphs.gated == [True, True, False]
    assert drawn[0] == drawn[1]


class Replays:
    """A graph's step without the graph, padded as it is."""

    max_rows = 8

    def __init__(self, decoder, host):
        self.gated = []
        self.decodes = CapturedDecodes(decoder, decoder.attention, host.kv, host.runner.table)

    def replay(self, packed_4R, *, gated=False):
        self.gated.append(gated)
        num_rows = packed_4R.shape[1]
        buffers = DecodeBuffers.allocate(4, self.decodes._table, gated=gated)
        buffers.packed_4R.copy_(pad(packed_4R, 4))
        logits_RV = self.decodes._run(buffers)
        token_R, valid_R = buffers.results_2R[:, :num_rows].unbind(0)
        return logits_RV[:num_rows], Sampled(token_R, valid_R, None)


def record(run):
    """As a CUDA graph: what is recorded has run once, and a replay writes to the result's first place."""
    result = run().clone()
    return lambda: result.copy_(run()), result


@pytest.mark.parametrize("passes", [PaddedPasses, partial(CapturedPasses, record=record)])
def test_a_padded_step_draws_what_the_exact_one_draws(kernels, passes):
    """Prompts in chunks beside decodes, at the sizes that graphs are captured in, on first use too."""
    config = tiny_config(head_dim=16, qkv_bias=True, rope=MROPE)
    decoder = Decoder(config, RandomSource(device=DEVICE), kernels)
    drawn = []
    for padded in (False, True):
        # Longer than a tile of keys: padded steps may split them, exact ones of so few do not.
        with Host(decoder, block_size=16, max_length=128, max_sequences=4, cuda_graphs=False) as host:
            runner = host.runner
            if padded:
                runner._passes = passes(decoder, decoder.attention, host.kv, runner.table)
            results = []
            for slot, length in enumerate((6, 3, 20)):
                host.admit(slot, list(range(1, length + 1)), sampling=greedy(logprobs=1), delta=slot)
            results.append(host.step((0, 6), (1, 3), (2, 7)))
            results.append(host.step((1, 1), (2, 13), (0, 1)))
            results.append(host.step((2, 1), (0, 1)))
            drawn.append([(s.slot, s.token_id, s.logprobs.chosen) for r in results for s in r.sampled])
    plain, ours = ([(slot, token) for slot, token, _ in found] for found in drawn)
    assert ours == plain
    np.testing.assert_allclose([x[2] for x in drawn[1]], [x[2] for x in drawn[0]], atol=1e-4)


def test_foreign_attention_goes_with_the_kernels(kernels):
    decoder = Decoder(tiny_config(head_dim=16, rope=ROPE), RandomSource(device=DEVICE), kernels)
    case = on_device(Case(LENGTHS["one decode"], block_size=16, heads=4, groups=2, head_dim=16))
    token_ids = torch.arange(len(case.q_TND), device=DEVICE)
    outputs = []
    for attention in (decoder.attention, SequenceAttention()):
        kv = PagedKV(case.kv.keys.clone(), case.kv.values.clone())
        outputs.append(
            decoder.forward(decoder.embed(token_ids), token_ids[None], kv, attention, case.metadata)
        )
    assert_near(outputs[1], outputs[0], torch.float32)


# --- the ends of a decode step ------------------------------------------------------------------------------
VOCABULARY = 4500  # chunks of 2048: two full, one partial
KINDS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=1.5),
    SamplingParams(temperature=0.0),
]


def filled_table(num_axes, block_size=4):
    """Prompts of 3, 8, 13 and 18 tokens in slots 5, 4, 3, 2; each has one more token."""
    table = RequestTable(
        vocab_size=VOCABULARY,
        num_axes=num_axes,
        max_sequences=6,
        max_length=32,
        block_size=block_size,
        device=DEVICE,
    )
    admissions = []
    for i, sampling in enumerate(KINDS):
        length = 3 + 5 * i
        tokens = np.random.default_rng(i).integers(0, VOCABULARY, length + 1).tolist()
        positions = np.arange(length) * np.arange(1, num_axes + 1)[:, None]
        blocks = tuple(range(1 + 8 * i, 1 + 8 * i + -(-length // block_size)))
        seed = 2**63 + i if i % 2 else i
        admissions.append(Admission(5 - i, tokens, length, positions, 2 - i, sampling, seed, blocks))
    table.turn_over((), admissions)
    table.write_admissions(admissions)
    table.append_blocks(admissions, ())
    return table


def decode_steps(table):
    """Computes the token after each prompt; slot 4's and no other's fills a new block."""
    steps = []
    for i in range(len(KINDS)):
        start = 3 + 5 * i
        new = () if table.rows[5 - i].num_blocks * table.block_size > start else (60,)
        steps.append(SequenceStep(5 - i, start, 1, new, samples=True))
    assert [len(step.new_block_ids) for step in steps] == [0, 1, 0, 0]
    return steps


def pad(packed_4R, size):
    padded = np.zeros((4, size), dtype=np.int32)
    padded[0] = -1
    padded[:, : packed_4R.shape[1]] = packed_4R
    return torch.from_numpy(padded).to(DEVICE)


@pytest.mark.parametrize("num_axes", [1, 3])
def test_decode_inputs_are_those_of_the_plain_table(num_axes):
    plain, table = filled_table(num_axes), filled_table(num_axes)
    steps = decode_steps(plain)
    plain.append_blocks((), steps)
    expected = plain.step_inputs(steps)
    buffers = DecodeBuffers.allocate(6, table)
    buffers.packed_4R.copy_(pad(table.pack_decodes(steps), 6))
    buffers.token_ids_R.fill_(-7)
    prepare_inputs(buffers, table)
    metadata, wanted = buffers.metadata, expected.metadata
    assert torch.equal(table.block_tables, plain.block_tables)
    assert torch.equal(buffers.token_ids_R[:4], expected.token_ids_T)
    assert torch.equal(buffers.positions_AR[:, :4], expected.positions_AT)
    assert torch.equal(metadata.sequence_lengths[:4], wanted.sequence_lengths)
    assert torch.equal(metadata.slot_mapping[:4], wanted.slot_mapping)
    for row, length in enumerate(wanted.host_sequence_lengths):
        num_blocks = -(-length // table.block_size)
        assert torch.equal(metadata.block_tables[row, :num_blocks], wanted.block_tables[row, :num_blocks])
    # Padding computes token 0 into the scratch block.
    assert buffers.token_ids_R[4:].tolist() == [0, 0]
    assert metadata.sequence_lengths[4:].tolist() == [1, 1]
    assert metadata.slot_mapping[4:].tolist() == [0, 0]


def test_tokens_are_drawn_as_by_the_sampler():
    table = filled_table(1)
    steps = decode_steps(table)
    packed_4R = table.pack_decodes(steps)
    logits_RV = normal(6, VOCABULARY) * 2
    logits_RV[3, 4400] = torch.nan
    slots_S = torch.tensor([step.slot for step in steps], device=DEVICE)
    next_index_S = torch.tensor([step.start + 1 for step in steps], device=DEVICE)
    temperature_S, top_p_S, min_p_S, *_ = table.floats[slots_S].unbind(1)
    params = RowParams(
        temperature_S, top_p_S, min_p_S, table.top_k[slots_S], table.seed[slots_S], next_index_S
    )
    expected = sample(logits_RV[:4].clone(), params, Needs(random=True))
    buffers = DecodeBuffers.allocate(6, table)
    buffers.packed_4R.copy_(pad(packed_4R, 6))
    before = table.token_ids.clone()
    arrivals = torch.zeros(8, dtype=torch.int32, device=DEVICE)
    for _ in range(2):
        buffers.results_2R.fill_(-7)
        draw(logits_RV, buffers, table, arrivals)
        assert buffers.results_2R[0, :4].tolist() == expected.token_R.tolist()
        assert buffers.results_2R[1].tolist() == [1, 1, 1, 0, 1, 1]
        assert not arrivals.any()
    assert len(set(expected.token_R.tolist())) == 4
    before[slots_S, next_index_S] = expected.token_R.int()
    assert torch.equal(table.token_ids, before)


CODE_KINDS = [
    SamplingParams(temperature=0.0, repetition_penalty=1.3),
    SamplingParams(temperature=0.9, top_k=7, repetition_penalty=1.05),
    SamplingParams(temperature=1.3, top_p=0.6, presence_penalty=0.4, frequency_penalty=0.3),
    SamplingParams(temperature=0.8, min_p=0.2),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=1.1, top_k=20, top_p=0.8, min_p=0.05),
]


def code_table():
    """One sequence of each kind: a prompt of 3 codes and 4 to 9 more."""
    table = RequestTable(
        vocab_size=NUM_CODES, num_axes=1, max_sequences=6, max_length=32, block_size=16, device=DEVICE
    )
    admissions = [
        Admission(
            i, np.random.default_rng(i).integers(0, 12, 7 + i).tolist(), 3, np.zeros((1, 3)), 0, s, i, (i,)
        )
        for i, s in enumerate(CODE_KINDS)
    ]
    table.turn_over((), admissions)
    table.write_admissions(admissions)
    return table


NUM_CODES = 45


@pytest.mark.parametrize("seed", range(2))
def test_codes_are_drawn_as_by_the_sampler(seed):
    table, num_rows = code_table(), len(CODE_KINDS)
    slots = list(range(num_rows))
    next_index = [7 + i for i in slots]
    logits = normal(num_rows + 1, NUM_CODES, seed=seed) * 2
    suppressed = torch.zeros(NUM_CODES, device=DEVICE)
    suppressed[[3, 30]] = -torch.inf
    rows = SampledRows(
        slots_S=torch.tensor(slots, device=DEVICE),
        next_index_S=torch.tensor(next_index, device=DEVICE),
        host_slots_S=tuple(slots),
        host_next_index_S=tuple(next_index),
    )
    expected = RowSampler(table)(rows, logits[:-1] + suppressed)
    packed = np.array([[*slots, -1], [*(n - 1 for n in next_index), 0], [0] * 7, [0] * 7], dtype=np.int32)
    buffers = CodeBuffers.allocate(torch.from_numpy(packed).to(DEVICE), NUM_CODES)
    before = table.token_ids.clone()
    found = draw_first(logits, suppressed, buffers, table)
    assert found[:-1].tolist() == expected.token_R.tolist()
    assert buffers.valid_R.tolist() == [1] * 7
    before[slots, next_index] = expected.token_R.int()
    assert torch.equal(table.token_ids, before)

    residual, group_seed = SamplingParams(temperature=0.9, top_k=9, top_p=0.8), -(2**61) + seed
    inner = normal(num_rows + 1, 30, seed=seed + 9) * 2
    inner[4, 2], inner[5, 1] = torch.nan, torch.inf
    greedy_S = table.floats[slots, 0] == 0
    ones_S = torch.ones(num_rows, device=DEVICE)
    params = RowParams(
        torch.where(greedy_S, 0.0, ones_S * 0.9),
        ones_S * 0.8,
        ones_S * 0,
        torch.full_like(rows.slots_S, 9),
        table.seed[slots] + group_seed,
        rows.next_index_S,
    )
    expected = sample(inner[:-1].clone(), params, needs_of([residual]))
    found = draw_residual(inner, buffers, table, residual, group_seed)
    assert found[:-1].tolist() == expected.token_R.tolist()
    assert buffers.valid_R.tolist() == [1, 1, 1, 1, 0, 0, 1]
    assert torch.equal(table.token_ids, before)


def test_selection_by_name():
    assert select_kernels("triton", DEVICE, torch.float32).name == "triton"
    with pytest.raises(EngineError, match="triton"):
        select_kernels("triton", torch.device("meta"), torch.float32)
    with pytest.raises(EngineError, match="float64"):
        select_kernels("triton", DEVICE, torch.float64)
