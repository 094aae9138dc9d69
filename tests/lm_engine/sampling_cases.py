"""The kernels of sampling against the plain sampler, on the GPU if there is one, else in Triton's
interpreter. Collected through test_triton_steps.py."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from contracts.params import SamplingParams
from lm_engine.plan import Admission
from lm_engine.request_table import RequestTable, SampledRows
from lm_engine.row_sampler import RowSampler
from lm_engine.sampler import (
    AskedRows,
    LogitChange,
    RowParams,
    filter_floor,
    log_probabilities,
    needs_of,
    penalise,
)
from lm_engine.triton import sampling
from lm_engine.triton.sampling import RowsStep, TritonDraws
from tests.lm_engine.random_decoder import tiny_decoder
from tests.lm_engine.stepping import Host

torch.set_num_threads(1)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCABULARY = 4500  # chunks of 2048: two full, one partial
ENDS = (7, 11)


def table_of(kinds, vocabulary=VOCABULARY, max_length=48):
    """One sequence of each kind: prompts of 3 tokens and 2 to 30 more, of few tokens that repeat."""
    table = RequestTable(
        vocab_size=vocabulary,
        num_axes=1,
        max_sequences=len(kinds) + 1,
        max_length=max_length,
        block_size=16,
        device=DEVICE,
    )
    admissions = []
    for slot, sampling_params in enumerate(kinds):
        tokens = np.random.default_rng(slot).integers(0, min(9, vocabulary), 5 + slot % 28).tolist()
        positions = np.zeros((1, 3))
        admissions.append(
            Admission(slot, tokens, 3, positions, 0, sampling_params, 2**62 * slot + slot, (1,), ENDS)
        )
    table.turn_over((), admissions)
    table.write_admissions(admissions)
    return table


def rows_of(table, slots):
    next_index = [table.rows[slot].num_known_tokens for slot in slots]
    return SampledRows(
        slots_S=torch.tensor(slots, device=DEVICE),
        next_index_S=torch.tensor(next_index, device=DEVICE),
        host_slots_S=tuple(slots),
        host_next_index_S=tuple(next_index),
    )


def some_logits(num_rows, vocabulary=VOCABULARY, *, seed=0, scale=4.0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(num_rows, vocabulary, generator=generator) * scale).to(DEVICE)


def both(kinds, logits_SV, slots=None):
    """What the plain sampler makes of the rows, and what the kernels do, beside the tables they write to."""
    found = []
    for kernels in (False, True):
        table = table_of(kinds, logits_SV.shape[1])
        rows = rows_of(table, slots or list(range(len(kinds))))
        draws = TritonDraws(table) if kernels else None
        sampled = RowSampler(table, draws=draws)(rows, logits_SV.clone())
        if draws is not None:
            assert_clean(draws)
        found.append((sampled, table))
    return found


def assert_same(kinds, logits_SV, slots=None):
    (plain, plain_table), (ours, table) = both(kinds, logits_SV, slots)
    assert ours.token_R.tolist() == plain.token_R.tolist()
    assert ours.valid_R.bool().tolist() == plain.valid_R.tolist()
    assert torch.equal(table.token_ids, plain_table.token_ids)
    assert [row.num_known_tokens for row in table.rows.values()] == [
        row.num_known_tokens for row in plain_table.rows.values()
    ]
    if plain.logprobs is None:
        assert ours.logprobs is None
        return ours
    for mine, theirs in zip(ours.logprobs.tensors, plain.logprobs.tensors, strict=True):
        assert mine.shape == theirs.shape
        torch.testing.assert_close(mine.double(), theirs.double(), atol=2e-5, rtol=1e-6)
    return ours


def assert_clean(draws):
    for counted in (draws._workspace.arrivals, draws._workspace.num_values, draws._counts_PV):
        assert counted is None or not counted.any()


# --- whole draws --------------------------------------------------------------------------------------------
FILTERS = [
    SamplingParams(temperature=t, top_k=k, top_p=p, min_p=m)
    for t in (1.0, 0.3)
    for k in (0, 1, 20, 300, 10_000)
    for p in (1.0, 0.8, 1e-6)
    for m in (0.0, 0.05)
]
FILTERS = (FILTERS * 7)[::7]  # so that a part of them has some of everything
KINDS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.0, repetition_penalty=1.4, logprobs=3),
    SamplingParams(temperature=0.7, top_k=20, top_p=0.8, repetition_penalty=1.05),
    SamplingParams(temperature=1.2, top_p=0.9, presence_penalty=0.5, frequency_penalty=0.25),
    SamplingParams(temperature=1.0, min_p=0.02, logprobs=0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.9, top_p=0.95, logprobs=20),
    SamplingParams(temperature=1.0, top_k=50, frequency_penalty=-0.4, logit_bias=((3, 4.0), (4499, 6.5))),
    SamplingParams(temperature=1e-30, top_k=3, min_tokens=40, logprobs=1),
    SamplingParams(temperature=1.0, top_p=0.7, min_tokens=40, logit_bias=((7, 90.0), (5, -3.0))),
]


@pytest.mark.parametrize("seed", range(3))
def test_rows_of_all_kinds_are_drawn_as_by_the_sampler(seed):
    assert_same(KINDS, some_logits(len(KINDS), seed=seed))


@pytest.mark.parametrize(("scale", "kinds"), [(4.0, FILTERS[:20]), (0.5, FILTERS[20:40])])
def test_filters_draw_as_by_the_sampler(scale, kinds):
    """Peaked and flat."""
    assert_same(kinds, some_logits(len(kinds), seed=5, scale=scale))


@pytest.mark.parametrize("vocabulary", [1, 5, 97, 2048, 2049])
def test_other_vocabularies(vocabulary):
    kinds = [k for k in KINDS if not k.logit_bias and not k.min_tokens] + FILTERS[:9]
    assert_same(kinds, some_logits(len(kinds), vocabulary, seed=2))


def test_a_large_vocabulary():
    """As many chunks as a real model's, and tokens of the last of them drawn."""
    kinds = [KINDS[2], KINDS[6], SamplingParams(top_k=50, logprobs=20, seed=3)]
    logits_SV = some_logits(len(kinds), 151_936, seed=4, scale=2.0)
    logits_SV[:, 151_900:] += 6.0
    assert max(assert_same(kinds, logits_SV).token_R.tolist()) >= 151_900


@pytest.mark.parametrize(
    "kinds",
    [
        [SamplingParams(logprobs=2)],
        [SamplingParams(min_p=0.1)],
        [SamplingParams(top_k=9)],
        KINDS[1:2],
        KINDS[9:],
    ],
    ids=["logprobs", "min_p", "top_k", "penalties", "changes"],
)
def test_a_row_alone_asks_for_what_it_needs(kinds):
    assert_same(kinds, some_logits(1, seed=3))


def test_a_row_is_drawn_alike_in_any_batch():
    logits_SV = some_logits(len(KINDS), seed=9)
    table = table_of(KINDS)
    draws = TritonDraws(table)
    sampler = RowSampler(table, draws=draws)
    order = [4, 9, 1, 7, 0, 3, 2, 8, 6, 5]

    def drawn(slots):
        return sampler(rows_of(table_of(KINDS), slots), logits_SV[slots].clone()).token_R.tolist()

    together = drawn(list(range(len(KINDS))))
    assert [drawn([slot])[0] for slot in range(len(KINDS))] == together
    assert drawn(order) == [together[slot] for slot in order]
    assert_clean(draws)


def test_rows_that_are_not_finite_are_flagged_and_harm_no_other():
    kinds = [SamplingParams(temperature=0.8, top_k=5, top_p=0.9, logprobs=2, seed=i) for i in range(6)]
    kinds += [SamplingParams(top_p=0.9), SamplingParams(min_p=0.3), SamplingParams(temperature=0.0)] * 2
    logits_SV = some_logits(len(kinds), seed=1)
    logits_SV[1, 4400] = torch.nan
    logits_SV[2, 3] = torch.inf
    logits_SV[3] = -torch.inf
    logits_SV[6, 0], logits_SV[7, 9], logits_SV[8, 8] = torch.inf, torch.nan, torch.nan
    logits_SV[9], logits_SV[10] = torch.nan, -torch.inf
    (plain, _), (ours, _) = both(kinds, logits_SV)
    assert ours.valid_R.tolist() == [1, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 1]
    assert ours.token_R.tolist() == plain.token_R.tolist()
    for mine, theirs in zip(ours.logprobs.tensors[:3], plain.logprobs.tensors[:3], strict=True):
        torch.testing.assert_close(mine[[0, 4, 5]].double(), theirs[[0, 4, 5]].double(), atol=2e-5, rtol=0)
    assert ours.logprobs.chosen_Q[1:4].tolist() == plain.logprobs.chosen_Q[1:4].tolist()
    assert ours.logprobs.rank_Q[1:3].tolist() == [1, 1]
    assert ours.logprobs.top_values_QK[1:3].tolist() == [[-9999.0] * 2] * 2


def test_all_forbidden_but_one():
    kinds = [SamplingParams(temperature=1.5, top_p=p, top_k=k, min_p=0.2) for p in (1.0, 0.4) for k in (0, 9)]
    logits_SV = torch.full((len(kinds), VOCABULARY), -torch.inf, device=DEVICE)
    logits_SV[:, 4321] = -7.0
    assert assert_same(kinds, logits_SV).token_R.tolist() == [4321] * len(kinds)


def test_padding_is_drawn_for_nobody():
    table = table_of(KINDS)
    before, draws = table.token_ids.clone(), TritonDraws(table)
    draws.rehearse()
    assert torch.equal(table.token_ids, before)
    assert_clean(draws)


def test_a_step_that_fails_halfway_leaves_nothing_to_the_next(monkeypatch):
    table, slots = table_of(KINDS), [1, 2, 3]
    draws, changed = TritonDraws(table), []
    for fails in (False, True, False):
        logits_SV = some_logits(3)
        with monkeypatch.context() as patch:
            if fails:
                patch.setattr(RowsStep, "find_floors", out_of_memory)
                with pytest.raises(MemoryError):
                    draws(asked_of(table, slots), logits_SV)
            else:
                draws(asked_of(table, slots), logits_SV)
                changed.append(logits_SV)
    assert torch.equal(*changed)
    assert_clean(draws)


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_nothing_waits_for_the_device():
    table, slots = table_of(KINDS), list(range(len(KINDS)))
    draws, logits_SV = TritonDraws(table), some_logits(len(KINDS))
    draws(asked_of(table, slots), logits_SV.clone())  # compiles, allocates
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        found = draws(asked_of(table, slots), logits_SV)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert found.valid_R.all()


def out_of_memory(step):
    assert step._draws._counts_PV.any()
    raise MemoryError


def asked_of(table, slots, changes=()):
    rows = [table.rows[slot] for slot in slots]
    return AskedRows(slots, [row.num_known_tokens for row in rows], [row.sampling for row in rows], changes)


# --- floors -------------------------------------------------------------------------------------------------
def floors_of(kinds, logits_SV):
    """By the kernels, and by the plain filter."""
    table, slots = table_of(kinds, logits_SV.shape[1]), list(range(len(kinds)))
    draws = TritonDraws(table)
    found = draws.step(asked_of(table, slots), logits_SV).find_floors().clone()
    assert_clean(draws)
    heat_S1 = torch.tensor([[max(p.temperature, 1e-5)] for p in kinds], device=DEVICE)
    scaled_SV = logits_SV / heat_S1
    temperature, top_p, min_p, *_ = table.floats[: len(kinds)].unbind(1)
    top_k, seed = table.top_k[: len(kinds)], table.seed[: len(kinds)]
    params = RowParams(temperature, top_p, min_p, top_k, seed, seed)
    plain, _ = filter_floor(scaled_SV.clone(), scaled_SV.amax(-1, keepdim=True), params, needs_of(kinds))
    return found, plain[:, 0], scaled_SV


def assert_same_survivors(kinds, logits_SV):
    found, plain, scaled_SV = floors_of(kinds, logits_SV)
    for row, kind in enumerate(kinds):
        mine, theirs = (floors[row] <= scaled_SV[row] for floors in (found, plain))
        assert torch.equal(mine, theirs), f"{kind}: {int(mine.sum())} survive, not {int(theirs.sum())}"


def test_ties_at_the_floor_are_kept():
    """Multiples of a quarter: hundreds of equals."""
    kinds = FILTERS[20:]
    assert_same_survivors(kinds, some_logits(len(kinds), seed=8, scale=8).round() / 4)


@pytest.mark.parametrize(("few", "listed"), [(128, 4096), (1, 4096), (16, 16)])
@pytest.mark.parametrize(("scale", "part"), [(0.01, 0), (1.0, 1), (30.0, 2)])
def test_floors_of_flat_and_peaked_rows(monkeypatch, few, listed, scale, part):
    """Also where the list is too short for what lies between the bounds."""
    monkeypatch.setattr(sampling, "_FEW", few)
    monkeypatch.setattr(sampling, "_LISTED", listed)
    kinds = FILTERS[20 * part : 20 * part + 14]
    assert_same_survivors(kinds, some_logits(len(kinds), seed=4, scale=scale))


def test_a_flat_row_is_kept_whole():
    kinds = [SamplingParams(top_p=0.3), SamplingParams(top_k=2), SamplingParams(top_k=2, top_p=0.5)]
    found, plain, _ = floors_of(kinds, torch.full((3, VOCABULARY), 1.25, device=DEVICE))
    assert found.tolist() == plain.tolist() == [1.25] * 3


def test_the_largest_may_all_lie_in_groups_of_their_own():
    """The bound of the k-th largest is the k-th largest itself then."""
    logits_SV = some_logits(2, seed=7, scale=0.1)
    logits_SV[:, 32::64] += 5 + torch.arange(70, device=DEVICE) / 7
    logits_SV[0, 33] = 20.0
    assert_same_survivors([SamplingParams(top_k=20), SamplingParams(top_k=20)], logits_SV)


@pytest.mark.parametrize("scale", [0.3, 3.0])
def test_few_values_are_left_between_the_bounds_of_a_nucleus(scale):
    """Of a flat row too: thousands would be looked up one bit after the other."""
    kinds = [SamplingParams(top_p=p) for p in (0.1, 0.9, 0.999)]
    logits_SV, table = some_logits(3, seed=3, scale=scale), table_of(kinds)
    draws = TritonDraws(table)
    floors_S = draws.step(asked_of(table, [0, 1, 2]), logits_SV).find_floors()
    _, _, lower_S, upper_S, _ = draws._workspace.states[:15].view(5, 3)
    for row in range(3):
        assert lower_S[row] <= floors_S[row] < upper_S[row]
        between = (logits_SV[row] >= lower_S[row]) & (logits_SV[row] < upper_S[row])
        assert 0 < between.sum() < VOCABULARY / 50


def test_the_nucleus_is_that_of_exact_sums():
    """Against float64 of all values in order."""
    kinds = [SamplingParams(top_p=p) for p in (0.05, 0.5, 0.9, 0.99, 0.9999, 1 - 2**-24)]
    logits_SV = some_logits(len(kinds), seed=6, scale=2.0)
    found, _, _ = floors_of(kinds, logits_SV)
    for row, kind in enumerate(kinds):
        values, _ = logits_SV[row].double().sort(descending=True)
        reached = (values - values[0]).exp().cumsum(0)
        needed = reached[-1] * float(np.float32(kind.top_p))
        at = int((values.float() == found[row]).nonzero()[-1])
        slack = 1e-6 * reached[-1]
        assert reached[at] >= needed - slack
        assert at == 0 or reached[at - 1] < needed + slack


# --- what is changed ----------------------------------------------------------------------------------------
def test_changes_and_penalties_are_those_of_the_plain_sampler():
    """Bit for bit: the logits that are left."""
    kinds = [
        SamplingParams(temperature=0.0, repetition_penalty=1.7),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.0, presence_penalty=1.1, frequency_penalty=0.3, repetition_penalty=0.8),
        SamplingParams(temperature=0.0, frequency_penalty=-0.6),
    ]
    logits_SV = some_logits(4)
    logits_SV[2, 4] = -torch.inf
    changes = [LogitChange(0, 3, 2.5), LogitChange(3, 4499, -math.inf), LogitChange(2, 0, -100.0)]
    plain_SV = logits_SV.clone()
    for row, token, value in changes:
        plain_SV[row, token] += value
    table, slots = table_of(kinds), list(range(4))
    penalties = RowSampler(table)._penalties(rows_of(table, slots), kinds)
    plain_SV[penalties.rows_P] = penalise(plain_SV[penalties.rows_P], penalties)
    draws = TritonDraws(table)
    step = draws.step(asked_of(table, slots, changes), logits_SV)
    step.change()
    assert draws._counts_PV.any()
    step.find_floors()
    assert torch.equal(logits_SV, plain_SV)
    assert_clean(draws)


# --- log-probabilities --------------------------------------------------------------------------------------
@pytest.mark.parametrize("num_top", [0, 1, 20, 25])
def test_log_probabilities_are_those_of_the_models_own_logits(num_top):
    kinds = [SamplingParams(temperature=2.0, logprobs=num_top) for _ in range(3)]
    kinds[1] = SamplingParams(temperature=2.0, logprobs=0, logit_bias=((9, 50.0),), top_k=1)
    logits_SV = some_logits(3, seed=12).round()
    sampled = both(kinds, logits_SV)[1][0]
    assert sampled.token_R[1] == 9
    exact_SV = logits_SV.double().log_softmax(-1)
    token_S1 = sampled.token_R.long()[:, None]
    chosen_S1 = exact_SV.gather(1, token_S1)
    torch.testing.assert_close(sampled.logprobs.chosen_Q.double(), chosen_S1[:, 0], atol=1e-5, rtol=0)
    assert sampled.logprobs.rank_Q.tolist() == ((exact_SV > chosen_S1).sum(-1) + 1).tolist()
    values, ids = sampled.logprobs.top_values_QK, sampled.logprobs.top_ids_QK
    assert values.shape == ids.shape == (3, num_top)
    torch.testing.assert_close(values.double(), exact_SV.topk(num_top).values, atol=1e-5, rtol=0)
    torch.testing.assert_close(exact_SV.gather(1, ids), values.double(), atol=1e-5, rtol=0)
    assert all(len(set(row)) == num_top for row in ids.tolist())


def test_what_is_raised_to_the_least_log_probability_shares_its_rank():
    logits_SV = torch.full((1, 700), -3e4, device=DEVICE)
    logits_SV[0, 5], logits_SV[0, 6], logits_SV[0, 7] = 1.0, 0.0, -2e4
    kinds = [SamplingParams(temperature=0.0, logprobs=4, logit_bias=((9, 1e6),))]
    sampled = both(kinds, logits_SV)[1][0]
    expected = log_probabilities(logits_SV, sampled.token_R.long(), 4)
    assert sampled.token_R.tolist() == [9]
    assert sampled.logprobs.rank_Q.tolist() == expected.rank_Q.tolist() == [3]
    assert sampled.logprobs.chosen_Q.tolist() == [-9999.0]
    torch.testing.assert_close(sampled.logprobs.top_values_QK, expected.top_values_QK)


def test_a_sampler_for_all_orders_of_need():
    """The workspace grows, and what one step leaves does not show in the next."""
    table = table_of(KINDS)
    draws = TritonDraws(table)
    for slots in ([3], [2, 3], [6], list(range(10)), [1]):
        logits_SV = some_logits(len(slots), seed=len(slots))
        expected = RowSampler(table_of(KINDS))(rows_of(table_of(KINDS), slots), logits_SV.clone())
        rows = rows_of(table_of(KINDS), slots)
        found = RowSampler(table, draws=draws)(rows, logits_SV.clone())
        assert found.token_R.tolist() == expected.token_R.tolist()
        fresh = table_of(KINDS)
        table.token_ids.copy_(fresh.token_ids)
        assert_clean(draws)


# --- in a runner --------------------------------------------------------------------------------------------
def test_a_runner_draws_the_same_by_kernels():
    """Chunked prompts that turn into decodes, each step on what the one before wrote to the table; and rows
    that only the host has listed, as those of a graph."""
    drawn = []
    for kernels in (False, True):
        with Host(tiny_decoder(device=DEVICE)) as host:
            table = host.runner.table
            if kernels:
                host.runner._sample = RowSampler(table, draws=TritonDraws(table))
            for slot, kind in enumerate(SERVED):
                host.admit(slot, list(range(4 + slot)), sampling=kind, seed=slot, stop_token_ids=(1, 2))
            results = [host.step((0, 4), (1, 2)), host.step((1, 3), (2, 6), (0, 1), (3, 2))]
            results += [host.step(*((slot, 1) for slot in range(3))) for _ in range(4)]
            listed = [[2, 0], [table.rows[2].num_known_tokens, table.rows[0].num_known_tokens]]
            logits_SV = some_logits(2, 97)
            last = host.runner._launcher.submit(host.runner._sample.draw, *listed, logits_SV).result()
            tokens = [[(s.slot, s.token_id) for s in result.sampled] for result in results]
            drawn.append((tokens, last.token_R.tolist(), table.token_ids.tolist(), listed))
            assert table.rows[2].num_known_tokens == listed[1][0] + 1
    assert drawn[0] == drawn[1]


SERVED = [
    SamplingParams(temperature=0.9, top_k=20, top_p=0.8, repetition_penalty=1.2),
    SamplingParams(temperature=1.2, top_p=0.9, min_tokens=5, logit_bias=((3, 2.0),)),
    SamplingParams(temperature=0.0, frequency_penalty=0.8, presence_penalty=0.2, logprobs=2),
    SamplingParams(temperature=1.0),
]
