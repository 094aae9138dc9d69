"""Sparse MLPs against their formula in float64; the looped and the grouped experts agree."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from lm_engine.layers.kernels import ExpertWeights
from lm_engine.layers.mlp import (
    DenseMlp,
    GroupedExperts,
    LoopedExperts,
    SharedExpert,
    SparseMlp,
    sliced_experts,
    stack_experts,
    stacked_experts,
)
from lm_engine.layers.reference import ReferenceKernels
from lm_engine.native import native_kernels
from lm_engine.native.library import Unavailable

torch.set_num_threads(1)
HIDDEN, WIDTH, NUM_EXPERTS, CHOSEN = 32, 24, 7, 3


def normal(*shape, seed=0, dtype=torch.float32):
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * shape[-1] ** -0.5
    return noise.to(dtype)


def experts(dtype=torch.float32):
    return [
        ExpertWeights(
            normal(2 * WIDTH, HIDDEN, seed=10 + e, dtype=dtype),
            normal(HIDDEN, WIDTH, seed=50 + e, dtype=dtype),
        )
        for e in range(NUM_EXPERTS)
    ]


def exact_mlp(x, gate_up, down):
    gate, up = (x.double() @ gate_up.double().T).chunk(2, dim=-1)
    return (functional.silu(gate) * up) @ down.double().T


def native():
    kernels = native_kernels(torch.device("cpu"), torch.float32)
    if isinstance(kernels, Unavailable):
        pytest.skip(kernels.reason)
    return kernels


def looped(weights):
    return LoopedExperts(ReferenceKernels(), weights)


def stacked(weights):
    return stacked_experts(ReferenceKernels(), *stack_experts(weights))


def sliced(weights):
    return sliced_experts(native(), weights)


PATHS = [looped, stacked, sliced]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("num_tokens", [1, 2, 40])
def test_every_path_is_the_formula(path, num_tokens):
    x = normal(num_tokens, HIDDEN, seed=1) * 6
    scores = normal(num_tokens, NUM_EXPERTS, seed=2)
    weight, chosen = scores.softmax(-1).topk(CHOSEN)
    expected = torch.zeros(num_tokens, HIDDEN, dtype=torch.float64)
    for token in range(num_tokens):
        for e, w in zip(chosen[token].tolist(), weight[token].tolist(), strict=True):
            one = experts()[e]
            expected[token] += w * exact_mlp(x[token], one.gate_up_2IH, one.down_HI)
    found = path(experts())(x, chosen, weight)
    torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("path", PATHS)
def test_all_tokens_may_choose_the_same_experts(path):
    """Most experts have no row, the first and the last one among them in turn."""
    x = normal(5, HIDDEN, seed=3)
    for pair in ([0, 3, 1], [2, 6, 3]):
        chosen = torch.tensor(pair).expand(5, CHOSEN).contiguous()
        weight = torch.full((5, CHOSEN), 0.25)
        expected = sum(0.25 * exact_mlp(x, experts()[e].gate_up_2IH, experts()[e].down_HI) for e in pair)
        found = path(experts())(x, chosen, weight)
        torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("path", PATHS)
def test_a_token_does_not_depend_on_the_batch(path):
    run = path(experts())
    x, scores = normal(30, HIDDEN, seed=4), normal(30, NUM_EXPERTS, seed=5)
    weight, chosen = scores.softmax(-1).topk(CHOSEN)
    together = run(x, chosen, weight)
    alone = torch.cat([run(x[i : i + 1], chosen[i : i + 1], weight[i : i + 1]) for i in range(30)])
    torch.testing.assert_close(together, alone, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("path", [looped, stacked])
def test_half_precision_is_added_in_float32(path):
    weights = experts(torch.bfloat16)
    x = normal(9, HIDDEN, seed=6, dtype=torch.bfloat16)
    weight, chosen = normal(9, NUM_EXPERTS, seed=7).softmax(-1).topk(CHOSEN)
    found = path(weights)(x, chosen, weight)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, looped(weights)(x, chosen, weight), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("normalise", [True, False])
def test_routing_and_the_shared_expert(normalise):
    kernels = ReferenceKernels()
    router, gate = normal(NUM_EXPERTS, HIDDEN, seed=8) * 4, normal(1, HIDDEN, seed=9)
    shared = ExpertWeights(normal(40, HIDDEN, seed=11), normal(HIDDEN, 20, seed=12))
    mlp = SparseMlp(
        router=kernels.pack_linear(router, float32_output=True),
        experts=LoopedExperts(kernels, experts()),
        num_chosen=CHOSEN,
        normalise=normalise,
        shared=SharedExpert(
            DenseMlp(kernels, kernels.pack_linear(shared.gate_up_2IH), kernels.pack_linear(shared.down_HI)),
            kernels.pack_linear(gate, float32_output=True),
        ),
    )
    x = normal(6, HIDDEN, seed=13) * 6
    probability = (x.double() @ router.double().T).softmax(-1)
    expected = torch.sigmoid(x.double() @ gate.double().T) * exact_mlp(x, shared.gate_up_2IH, shared.down_HI)
    for token in range(6):
        best = probability[token].argsort(descending=True)[:CHOSEN]
        total = probability[token, best].sum() if normalise else 1.0
        for e in best.tolist():
            one = exact_mlp(x[token], experts()[e].gate_up_2IH, experts()[e].down_HI)
            expected[token] += probability[token, e] / total * one
    torch.testing.assert_close(mlp(x).double(), expected, atol=1e-6, rtol=1e-5)


def test_kernels_choose_their_path():
    assert isinstance(ReferenceKernels().pack_experts(experts()), LoopedExperts)
    assert isinstance(native().pack_experts(experts()), GroupedExperts)
