"""The sampler against plain per-row references, and its random numbers against the documented hash."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from contracts.params import SamplingParams
from lm_engine.random import gumbel_noise, signed_seed
from lm_engine.sampler import (
    Adjustments,
    LogprobsWanted,
    Needs,
    Penalties,
    RowParams,
    filter_floor,
    log_probabilities,
    needs_of,
    penalise,
    sample,
)

torch.set_num_threads(1)
MASK_64, MASK_32 = 2**64 - 1, 2**32 - 1


def row_params(params: list[SamplingParams], positions=None) -> RowParams:
    count = len(params)
    return RowParams(
        temperature_R=torch.tensor([p.temperature for p in params]),
        top_p_R=torch.tensor([p.top_p for p in params]),
        min_p_R=torch.tensor([p.min_p for p in params]),
        top_k_R=torch.tensor([p.top_k for p in params]),
        seed_R=torch.tensor([signed_seed(p.seed or 0) for p in params]),
        position_R=torch.tensor(positions if positions is not None else [0] * count),
    )


def draw(logits_RV, params, positions=None):
    return sample(logits_RV.clone(), row_params(params, positions), needs_of(params)).token_R.tolist()


# --- the hash -----------------------------------------------------------------------------------------------
def reference_gumbel(seed: int, position: int, token: int) -> float:
    def mix64(x):
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK_64
        return x ^ (x >> 31)

    def mix32(x):
        x = ((x ^ (x >> 16)) * 0x7FEB352D) & MASK_32
        x = ((x ^ (x >> 15)) * 0x846CA68B) & MASK_32
        return x ^ (x >> 16)

    key = mix64((mix64(seed & MASK_64) + (position + 1) * 0x9E3779B97F4A7C15) & MASK_64)
    h = mix32(mix32((token + (key & MASK_32)) & MASK_32) ^ (key >> 32))
    return -math.log(-math.log1p(-((h >> 1) + 0.5) / 2**31))


def test_noise_is_the_documented_hash():
    seeds, positions = [0, 1, -1, 2**63, 2**64 - 1, 123456789012345], [0, 7, 31, 5, 100000, 2]
    noise_RV = gumbel_noise(
        torch.tensor([signed_seed(s) for s in seeds]), torch.tensor(positions), torch.arange(200)[None]
    )
    for row, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
        expected = [reference_gumbel(seed, position, token) for token in range(200)]
        np.testing.assert_allclose(noise_RV[row].numpy(), expected, rtol=1e-4, atol=1e-5)


def test_noise_is_finite_and_gumbel_distributed():
    noise = gumbel_noise(torch.arange(4), torch.arange(4), torch.arange(250_000)[None]).flatten().double()
    assert noise.isfinite().all()
    assert abs(noise.mean() - 0.5772156649) < 0.005  # Euler's constant; standard error 0.0013
    assert abs(noise.var() - math.pi**2 / 6) < 0.015
    rows = noise.view(4, -1)
    correlation = torch.corrcoef(rows) - torch.eye(4)
    assert correlation.abs().max() < 0.01


def test_a_drawn_token_depends_on_seed_and_position_alone():
    """Batch, order, neighbours of other kinds, candidates or full vocabulary: nothing changes a draw."""
    generator = torch.Generator().manual_seed(1)
    logits_RV = torch.randn(12, 1500, generator=generator) * 3
    kinds = [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 5},
        {"temperature": 1.3, "top_p": 0.8},
        {"temperature": 1.0, "min_p": 0.05},
        {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "min_p": 0.01},
        {"temperature": 0.0},
    ]
    params = [SamplingParams(**kinds[i % 6], seed=1000 + i) for i in range(12)]
    positions = [17 * i for i in range(12)]
    together = draw(logits_RV, params, positions)
    alone = [draw(logits_RV[i : i + 1], params[i : i + 1], positions[i : i + 1])[0] for i in range(12)]
    assert together == alone
    order = torch.randperm(12, generator=generator).tolist()
    shuffled = draw(logits_RV[order], [params[i] for i in order], [positions[i] for i in order])
    assert shuffled == [together[i] for i in order]
    moved = draw(logits_RV, params, [p + 1 for p in positions])
    reseeded = [SamplingParams(**kinds[i % 6], seed=2000 + i) for i in range(12)]
    assert moved != together
    assert draw(logits_RV, reseeded, positions) != together
    assert [moved[i] for i in (5, 11)] == [together[i] for i in (5, 11)]  # greedy rows


@pytest.mark.parametrize("counter", ["seeds", "positions"])
@pytest.mark.parametrize(
    "kind",
    [
        {"temperature": 1.0},
        {"temperature": 0.6, "top_k": 7},
        {"temperature": 1.5, "top_p": 0.7},
        {"temperature": 1.0, "min_p": 0.2, "top_p": 0.95},
    ],
)
def test_draws_follow_the_filtered_distribution(counter, kind):
    """Chi-square of 40,000 draws against exact probabilities, over consecutive seeds or positions."""
    count, size = 40_000, 24
    logits_V = torch.linspace(-2, 2, size)[torch.randperm(size, generator=torch.Generator().manual_seed(2))]
    params = row_params([SamplingParams(**kind)])
    rows = torch.arange(count)
    tiled = RowParams(
        *(t.expand(count) for t in (params.temperature_R, params.top_p_R, params.min_p_R, params.top_k_R)),
        seed_R=rows if counter == "seeds" else torch.full((count,), 42),
        position_R=rows if counter == "positions" else torch.full((count,), 9),
    )
    needs = needs_of([SamplingParams(**kind)])
    tokens = sample(logits_V.expand(count, size).clone(), tiled, needs).token_R
    probabilities = reference_filter(logits_V.numpy(), SamplingParams(**kind))
    observed = np.bincount(tokens.numpy(), minlength=size)
    assert observed[probabilities == 0].sum() == 0
    kept = probabilities > 0
    expected = probabilities[kept] * count
    chi_square = ((observed[kept] - expected) ** 2 / expected).sum()
    freedom = kept.sum() - 1
    assert chi_square < freedom + 5 * math.sqrt(2 * freedom)


# --- filters ------------------------------------------------------------------------------------------------
def reference_filter(logits_V: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Probabilities after temperature, min-p, top-k, top-p of one row; ties with the last kept are kept."""
    logits = logits_V.astype(np.float32) / np.float32(params.temperature)
    kept = np.ones(len(logits), bool)
    if params.min_p > 0:
        kept &= logits >= logits.max() + np.log(np.float32(params.min_p))
    if params.top_k > 0:
        kept &= logits >= np.sort(logits)[::-1][min(params.top_k, len(logits)) - 1]
    if params.top_p < 1:
        mass = np.where(kept, np.exp((logits - logits.max()).astype(np.float64)), 0)
        order = np.argsort(-logits, kind="stable")
        enough = np.searchsorted(np.cumsum(mass[order]), np.float32(params.top_p) * mass.sum())
        kept &= logits >= logits[order[enough]]
    mass = np.where(kept, np.exp((logits - logits.max()).astype(np.float64)), 0)
    return mass / mass.sum()


def kept_tokens(logits_RV, params):
    scaled_RV = logits_RV / torch.tensor([[p.temperature] for p in params])
    floor_R1, candidates = filter_floor(
        scaled_RV, scaled_RV.amax(-1, keepdim=True), row_params(params), needs_of(params)
    )
    kept_RV = scaled_RV >= floor_R1
    if candidates is not None:
        values_RK, ids_RK = candidates
        again_RV = torch.zeros_like(kept_RV).scatter(1, ids_RK, values_RK >= floor_R1)
        assert torch.equal(again_RV, kept_RV)
    return kept_RV


@pytest.mark.parametrize("size", [1, 9, 700, 3000])
def test_filters_keep_exactly_the_references_tokens(size):
    """Many ties (logits are multiples of a quarter), mixed kinds, vocabularies under and over the guess."""
    generator = torch.Generator().manual_seed(size)
    params = [
        SamplingParams(temperature=t, top_k=k, top_p=p, min_p=m)
        for t in (1.0, 0.5)
        for k in (0, 1, 3, 50, 10_000)
        for p in (1.0, 0.999, 0.5, 0.05)
        for m in (0.0, 0.1)
    ]
    logits_RV = (torch.randn(len(params), size, generator=generator) * 8).round() / 4
    kept_RV = kept_tokens(logits_RV, params)
    for row, row_kind in enumerate(params):
        expected = reference_filter(logits_RV[row].numpy(), row_kind) > 0
        np.testing.assert_array_equal(kept_RV[row].numpy(), expected, err_msg=str(row_kind))


def test_flat_nucleus_beyond_the_guess():
    """A nucleus of more than the guessed candidates needs the full order."""
    logits_RV = torch.linspace(0, 1, 2000).repeat(2, 1)
    params = [SamplingParams(top_p=0.9), SamplingParams(top_p=0.01)]
    kept_RV = kept_tokens(logits_RV, params)
    for row in range(2):
        np.testing.assert_array_equal(
            kept_RV[row].numpy(), reference_filter(logits_RV[row].numpy(), params[row]) > 0
        )


def test_ties_at_the_boundary_are_all_kept():
    logits_RV = torch.tensor([[1.0, 3.0, 2.0, 2.0, 2.0, 0.0]])
    assert kept_tokens(logits_RV, [SamplingParams(top_k=2)])[0].tolist() == [
        False,
        True,
        True,
        True,
        True,
        False,
    ]
    flat = torch.zeros(1, 6)
    assert kept_tokens(flat, [SamplingParams(top_p=0.3)])[0].all()


# --- greedy, penalties, bias --------------------------------------------------------------------------------
def test_all_greedy_is_argmax():
    logits_RV = torch.randn(5, 300, generator=torch.Generator().manual_seed(0))
    result = sample(logits_RV.clone(), row_params([SamplingParams(temperature=0.0)] * 5), Needs())
    assert torch.equal(result.token_R, logits_RV.argmax(-1))
    assert result.valid_R.all()
    assert result.logprobs is None


def test_tiny_temperature_is_greedy_and_finite():
    logits_RV = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)) * 20
    assert draw(logits_RV, [SamplingParams(temperature=1e-30)] * 3) == logits_RV.argmax(-1).tolist()


def reference_penalise(logits_V, tokens, num_prompt, params):
    logits = logits_V.copy()
    for token in set(tokens):
        logits[token] *= params.repetition_penalty if logits[token] <= 0 else 1 / params.repetition_penalty
    for token in set(tokens[num_prompt:]):
        count = tokens[num_prompt:].count(token)
        logits[token] -= params.frequency_penalty * count + params.presence_penalty
    return logits


def test_penalties_count_prompt_and_output_as_vllm_does():
    rng = np.random.default_rng(0)
    kinds = [
        SamplingParams(repetition_penalty=1.7),
        SamplingParams(presence_penalty=1.1),
        SamplingParams(frequency_penalty=-0.6),
        SamplingParams(presence_penalty=0.4, frequency_penalty=0.3, repetition_penalty=0.8),
    ]
    logits_PV = torch.from_numpy(rng.normal(size=(4, 20)).astype(np.float32))
    lengths, prompts = [9, 5, 12, 12], [4, 5, 3, 0]
    tokens_PL = torch.from_numpy(rng.integers(0, 20, (4, 12)))
    found = penalise(
        logits_PV.clone(),
        Penalties(
            rows_P=torch.arange(4),
            tokens_PL=tokens_PL,
            lengths_P=torch.tensor(lengths),
            num_prompt_P=torch.tensor(prompts),
            presence_P=torch.tensor([p.presence_penalty for p in kinds]),
            frequency_P=torch.tensor([p.frequency_penalty for p in kinds]),
            repetition_P=torch.tensor([p.repetition_penalty for p in kinds]),
        ),
    )
    for row in range(4):
        tokens = tokens_PL[row, : lengths[row]].tolist()
        expected = reference_penalise(logits_PV[row].numpy(), tokens, prompts[row], kinds[row])
        np.testing.assert_allclose(found[row].numpy(), expected, rtol=1e-5, atol=1e-6)


def test_bias_adds_and_forbids_before_everything_else():
    logits_RV = torch.tensor([[5.0, 4.0, 1.0], [5.0, 4.0, 1.0], [5.0, 4.0, 1.0]])
    adjustments = Adjustments(
        rows=torch.tensor([0, 1, 1]),
        tokens=torch.tensor([2, 0, 1]),
        values=torch.tensor([100.0, -torch.inf, -torch.inf]),
    )
    greedy = row_params([SamplingParams(temperature=0.0)] * 3)
    assert sample(logits_RV.clone(), greedy, Needs(), adjustments).token_R.tolist() == [2, 2, 0]
    hot = [SamplingParams(temperature=5.0, seed=i) for i in range(3)]
    result = sample(logits_RV.clone(), row_params(hot), needs_of(hot), adjustments)
    assert result.token_R.tolist()[1] == 2


# --- log-probabilities --------------------------------------------------------------------------------------
def test_logprobs_are_of_the_raw_logits():
    """Neither bias nor penalties nor temperature nor filters show in them."""
    logits_RV = torch.randn(3, 40, generator=torch.Generator().manual_seed(3))
    params = [SamplingParams(temperature=0.5, top_k=1, seed=i) for i in range(3)]
    adjustments = Adjustments(torch.tensor([0, 2]), torch.tensor([4, 4]), torch.tensor([50.0, 50.0]))
    wanted = LogprobsWanted(torch.tensor([0, 2]), 5)
    result = sample(logits_RV.clone(), row_params(params), needs_of(params), adjustments, None, wanted)
    exact_RV = logits_RV.double().log_softmax(-1)
    for row, source in enumerate((0, 2)):
        assert result.token_R[source] == 4
        assert abs(result.logprobs.chosen_Q[row] - exact_RV[source, 4]) < 1e-5
        assert result.logprobs.rank_Q[row] == 1 + (exact_RV[source] > exact_RV[source, 4]).sum()
        assert result.logprobs.top_ids_QK[row].tolist() == exact_RV[source].topk(5).indices.tolist()
        torch.testing.assert_close(
            result.logprobs.top_values_QK[row].double(), exact_RV[source].topk(5).values, atol=1e-5, rtol=0
        )


def test_logprobs_are_finite_and_ties_share_a_rank():
    raw_QV = torch.tensor([[0.0, -torch.inf, 0.0, -1e30], [torch.nan, 1.0, 2.0, 3.0]])
    found = log_probabilities(raw_QV, torch.tensor([2, 0]), 9)
    for tensor in found.tensors:
        assert tensor.isfinite().all()
    assert found.rank_Q[0] == 1
    assert found.top_values_QK[0].tolist()[-1] == -9999.0
    assert found.top_values_QK.shape == (2, 4)


def test_rows_of_nan_are_flagged_and_harm_no_other():
    logits_RV = torch.randn(3, 600, generator=torch.Generator().manual_seed(0))
    params = [SamplingParams(top_p=0.9, seed=i) for i in range(3)]
    clean = draw(logits_RV, params)
    logits_RV[1, 5] = torch.nan
    result = sample(logits_RV.clone(), row_params(params), needs_of(params))
    assert result.valid_R.tolist() == [True, False, True]
    assert 0 <= result.token_R[1] < 600
    assert [result.token_R[i] for i in (0, 2)] == [clean[0], clean[2]]


# --- the maximum --------------------------------------------------------------------------------------------
def test_the_first_of_equals_is_drawn_and_values_that_are_not_finite_are_no_token():
    rows = [
        [1.0, 3.0, 3.0, 2.0],
        [-1.0, -1.0, -2.0, -1.0],
        [0.0, math.nan, 5.0, 1.0],
        [0.0, 1.0, math.inf, 1.0],
    ]
    greedy = [SamplingParams(temperature=0.0)] * 4
    sampled = sample(torch.tensor(rows), row_params(greedy), needs_of(greedy))
    assert sampled.token_R.tolist() == [1, 0, 0, 0]
    assert sampled.valid_R.tolist() == [True, True, False, False]
