"""The runner: any schedule gives the same tokens; steps overlap, fail alone, and leave nothing behind."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from contracts.params import SamplingParams
from lm_engine.attention.reference import SequenceAttention
from lm_engine.plan import SequenceStep, SpanPiece
from lm_engine.sampler import Needs, RowParams, sample
from tests.lm_engine.random_decoder import tiny_decoder
from tests.lm_engine.stepping import TIMEOUT_S, Host, greedy
from tests.lm_engine.test_sampler import reference_penalise

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def decoder():
    return tiny_decoder()


def prompt(length, seed=0):
    return np.random.default_rng(seed).integers(0, 97, length).tolist()


def alone(decoder, tokens, count, sampling=None, **more):
    with Host(decoder) as host:
        host.admit(0, tokens, sampling=sampling, **more)
        return host.generate(0, count)


KINDS = [
    greedy(),
    SamplingParams(temperature=0.8, top_k=20),
    SamplingParams(temperature=1.2, top_p=0.9),
    SamplingParams(temperature=1.0, min_p=0.02, frequency_penalty=0.7),
    greedy(repetition_penalty=1.5, presence_penalty=0.5),
    SamplingParams(temperature=1.0, logit_bias=((3, 4.0), (9, -50.0))),
    SamplingParams(temperature=1.0, min_tokens=5),
]


def test_sequences_of_all_kinds_together_equal_each_alone(decoder):
    """Continuous batching: staggered arrival, chunked prefills, sampling of every kind in one batch."""
    lengths = [3, 17, 9, 30, 5, 12, 8]
    prompts = [prompt(length, seed) for seed, length in enumerate(lengths)]
    stops = (0, 5, 11)
    expected = [
        alone(decoder, tokens, 10, kind, seed=50 + i, stop_token_ids=stops)
        for i, (tokens, kind) in enumerate(zip(prompts, KINDS, strict=True))
    ]
    drawn = {i: [] for i in range(7)}
    with Host(decoder) as host:
        for step in range(40):
            if step < 7:
                host.admit(step, prompts[step], sampling=KINDS[step], seed=50 + step, stop_token_ids=stops)
            plan = []
            for slot, sequence in host.sequences.items():
                if len(drawn[slot]) < 10:
                    plan.append((slot, min(4 + step % 3, sequence.num_known - sequence.num_computed)))
            if not plan:
                break
            for sampled in host.step(*plan).sampled:
                drawn[sampled.slot].append(sampled.token_id)
    assert [drawn[i] for i in range(7)] == expected


def test_the_next_step_runs_before_the_last_result_is_known(decoder):
    """A whole generation is submitted without looking at one result."""
    sampling = SamplingParams(temperature=1.0, frequency_penalty=0.5)
    expected = [alone(decoder, prompt(6, s), 12, sampling, seed=s) for s in (1, 2)]
    with Host(decoder) as host:
        for slot in (1, 2):
            host.admit(slot, prompt(6, slot), sampling=sampling, seed=slot)
        futures = [host.submit((1, 6), (2, 6))]
        futures += [host.submit((2, 1), (1, 1)) for _ in range(11)]
        results = [future.result(TIMEOUT_S) for future in futures]
    assert [r.step_id for r in results] == list(range(12))
    for slot in (1, 2):
        tokens = [s.token_id for r in results for s in r.sampled if s.slot == slot]
        assert tokens == expected[slot - 1]


def test_submit_does_not_wait_and_order_is_kept(decoder):
    with Host(decoder) as host:
        gate = threading.Event()
        forward = host.model.inner.forward
        host.model.inner = _Gated(decoder, forward, gate)
        host.admit(0, prompt(5))
        futures = [host.submit((0, 5)), host.submit((0, 1))]
        assert not any(future.done() for future in futures)
        gate.set()
        assert [f.result(TIMEOUT_S).step_id for f in futures] == [0, 1]


class _Gated:
    def __init__(self, decoder, forward, gate):
        self.decoder, self.gated_forward, self.gate = decoder, forward, gate

    def embed(self, token_ids):
        return self.decoder.embed(token_ids)

    def logits(self, hidden):
        return self.decoder.logits(hidden)

    def forward(self, *args):
        assert self.gate.wait(TIMEOUT_S)
        return self.gated_forward(*args)


class TorchGraphs:
    """What graphs promise the runner, in torch operations on any device."""

    max_rows = 8

    def __init__(self, runner):
        self.runner, self.num_replays = runner, 0

    def replay(self, packed_4R, *, gated=False):
        self.num_replays += 1
        table, model = self.runner.table, self.runner.model
        for slot, _, block, column in packed_4R.T.tolist():
            if block:
                table.block_tables[slot, column] = block
        steps = [SequenceStep(slot, start, 1, (), False) for slot, start in packed_4R[:2].T.tolist()]
        inputs = table.step_inputs(steps)
        hidden_RH = model.forward(
            model.embed(inputs.token_ids_T),
            inputs.positions_AT,
            self.runner.kv,
            self.runner.attention,
            inputs.metadata,
            None,
        )
        logits_RV = model.logits(hidden_RH)
        slots, next_index = torch.from_numpy(packed_4R[:2].astype(np.int64)) + torch.tensor([[0], [1]])
        nothing = torch.zeros(len(slots))
        row_params = RowParams(
            table.floats[slots, 0], nothing + 1, nothing, table.top_k[slots], table.seed[slots], next_index
        )
        sampled = sample(logits_RV.clone(), row_params, Needs(random=True))
        table.token_ids[slots, next_index] = sampled.token_R.int()
        return logits_RV, sampled


def test_replayed_decodes_draw_what_launched_ones_draw(decoder):
    """Whatever the sampling: the graph draws for all, rows that need more are drawn again."""
    kinds, stops = [greedy(), SamplingParams(temperature=0.9), *KINDS, greedy(logprobs=2)], (0, 5, 11)
    chosen = [[0], [0, 1], [1, 0, 8], list(range(1, 9))]
    for members in chosen:
        tokens = {False: [], True: []}
        for replays in (False, True):
            with Host(decoder) as host:
                if replays:
                    host.runner._graphs = graphs = TorchGraphs(host.runner)
                for slot, kind in enumerate(members):
                    host.admit(
                        slot,
                        prompt(3 + 2 * slot, slot),
                        sampling=kinds[kind],
                        seed=slot,
                        stop_token_ids=stops,
                    )
                futures = [host.submit(*((slot, 3 + 2 * slot) for slot in range(len(members))))]
                order = [*range(1, len(members)), 0]
                futures += [host.submit(*((slot, 1) for slot in order)) for _ in range(9)]
                tokens[replays] = [future.result(TIMEOUT_S) for future in futures]
        assert graphs.num_replays == 9
        assert [r.sampled for r in tokens[True]] == [r.sampled for r in tokens[False]]


def test_only_steps_of_decodes_are_replayed(decoder):
    with Host(decoder) as host:
        host.runner._graphs = graphs = TorchGraphs(host.runner)
        host.admit(0, prompt(9))
        host.step((0, 8))
        host.step((0, 1))  # the prompt's last token is a decode like any other
        assert graphs.num_replays == 1
        host.admit(1, prompt(1))
        host.step((0, 1), (1, 1))
        assert graphs.num_replays == 1
        graphs.max_rows = 1
        host.step((0, 1), (1, 1))
        assert graphs.num_replays == 1
        host.step((0, 1))
        assert graphs.num_replays == 2


def test_a_preempted_sequence_goes_on_with_the_same_tokens(decoder):
    """Recompute: the slot is released and taken again with the generated tokens; penalties and the draw
    counter go on."""
    sampling = SamplingParams(temperature=1.0, presence_penalty=1.0, min_tokens=9)
    stops = tuple(range(0, 97, 2))
    expected = alone(decoder, prompt(7), 14, sampling, seed=4, stop_token_ids=stops)
    with Host(decoder) as host:
        host.admit(0, prompt(7), sampling=sampling, seed=4, stop_token_ids=stops)
        first = host.generate(0, 5)
        host.release(0)
        host.admit(1, prompt(9, 8))
        host.generate(1, 3)
        host.admit(3, prompt(7) + first, num_prompt=7, sampling=sampling, seed=4, stop_token_ids=stops)
        host.step((3, 4), (1, 1))
        second = host.generate(3, 9)
    assert first + second == expected


def test_prefix_blocks_and_block_copies(decoder):
    """A second sequence starts on the first one's full blocks and a copy of its partial one."""
    tokens = prompt(22)
    expected = alone(decoder, [*tokens, 1, 2, 3], 6)
    with Host(decoder, block_size=4) as host:
        host.admit(0, tokens)
        host.step((0, 22))
        table = host.runner.table.block_tables[0, :6].tolist()
        copy = host.free.pop()
        host.copies = [(table[5], copy)]
        host.admit(1, [*tokens, 1, 2, 3], block_ids=(*table[:5], copy), num_computed=22)
        # The first goes on writing into the block that was copied.
        host.step((0, 1), (1, 3))
        host.step((0, 1), (1, 1))
        result = [host.runner.table.token_ids[1, 25].item(), host.runner.table.token_ids[1, 26].item()]
        result += host.generate(1, 4)
        assert host.generate(0, 2) == alone(decoder, tokens, 5)[3:]
    assert result == expected


def test_a_reused_slot_keeps_nothing_of_its_last_owner(decoder):
    expected = alone(decoder, prompt(4, 2), 8, greedy(frequency_penalty=0.3))
    with Host(decoder) as host:
        host.admit(0, prompt(40, 1), sampling=SamplingParams(logit_bias=((1, 100.0),), min_p=0.5), delta=7)
        host.generate(0, 5)
        host.release(0)
        host.admit(0, prompt(4, 2), sampling=greedy(frequency_penalty=0.3))
        assert host.generate(0, 8) == expected


def test_a_failed_step_fails_its_future_and_no_other(decoder):
    expected = alone(decoder, prompt(10), 6)
    with Host(decoder) as host:
        host.admit(0, prompt(10))
        first = host.generate(0, 2)
        host.model.fail_next = True
        host.admit(1, prompt(3))
        failed = host.submit((1, 3))
        with pytest.raises(RuntimeError, match="on fire"):
            failed.result(TIMEOUT_S)
        host.release(1)
        assert first + host.generate(0, 4) == expected
        host.admit(1, prompt(10))  # the slot is free again
        assert host.generate(1, 6) == expected


def test_nan_logits_fail_their_row_alone(decoder):
    with Host(decoder) as host:
        host.admit(0, prompt(5), sampling=greedy(logprobs=2))
        host.admit(3, prompt(5), sampling=greedy(logprobs=2))
        host.model.poison_rows = [0]
        result = host.step((3, 5), (0, 5))
        assert result.failed_slots == (3,)
        assert result.sampled[1].token_id == alone(decoder, prompt(5), 1)[0]
        assert np.isfinite([result.sampled[0].logprobs.chosen, result.sampled[1].logprobs.chosen]).all()
        host.model.poison_rows = []
        assert host.step((0, 1)).failed_slots == ()


def test_min_tokens_forbids_the_end_until_then(decoder):
    free = alone(decoder, prompt(6), 8)
    stops = (free[0], free[1])
    held = alone(decoder, prompt(6), 8, greedy(min_tokens=4), stop_token_ids=stops)
    assert not set(held[:4]) & set(stops)
    own = alone(decoder, prompt(6), 8, greedy(min_tokens=1, stop_token_ids=(free[0],)))
    assert own[0] != free[0]
    assert alone(decoder, prompt(6), 8, greedy(min_tokens=0), stop_token_ids=stops) == free


def test_penalties_tell_prompt_from_output(decoder):
    """Each token is the best of the model's own logits, penalised by hand from the history so far."""
    sampling = greedy(presence_penalty=1.5, frequency_penalty=0.6, repetition_penalty=1.3)
    tokens = [*range(0, 97, 2), *range(0, 40, 4)]
    with Host(decoder) as host:
        host.admit(2, tokens, sampling=sampling)
        drawn = host.generate(2, 15)
        logits_TV = torch.cat(host.model.logits_TV)[len(tokens) - 1 :].numpy()
    for i, token in enumerate(drawn):
        assert token == reference_penalise(logits_TV[i], tokens + drawn[:i], len(tokens), sampling).argmax()
    assert drawn != alone(decoder, tokens, 15)


def test_logprobs_come_for_those_who_asked(decoder):
    with Host(decoder) as host:
        for slot, wanted in enumerate((None, 0, 3)):
            host.admit(slot, prompt(5, slot), sampling=greedy(logprobs=wanted))
        result = host.step((2, 5), (0, 5), (1, 5))
        logits_TV = host.model.logits_TV[-1]
    three, none, zero = result.sampled
    assert [s.slot for s in result.sampled] == [2, 0, 1]
    assert none.logprobs is None
    assert zero.logprobs.top == ()
    expected_V = logits_TV[4].log_softmax(-1)
    assert len(three.logprobs.top) == 3
    assert three.logprobs.rank == 1
    assert three.logprobs.top[0] == (three.token_id, three.logprobs.chosen)
    assert abs(three.logprobs.chosen - expected_V.max().item()) < 1e-5


def test_chunks_that_end_nothing_sample_nothing(decoder):
    with Host(decoder) as host:
        host.admit(0, prompt(9))
        assert host.step((0, 4)).sampled == ()
        assert host.step().sampled == ()
        assert len(host.step((0, 5)).sampled) == 1


@pytest.mark.parametrize("plain", [True, False])
def test_plain_and_batched_attention_draw_the_same(decoder, plain):
    with Host(decoder, SequenceAttention() if plain else None) as host:
        host.admit(0, prompt(33), sampling=SamplingParams(temperature=1.0, top_p=0.9), seed=3)
        tokens = host.generate(0, 20)
    assert tokens == alone(decoder, prompt(33), 20, SamplingParams(temperature=1.0, top_p=0.9), seed=3)


def test_a_sequence_may_fill_the_table(decoder):
    with Host(decoder, max_length=16, block_size=4) as host:
        host.admit(0, prompt(14))
        tokens = host.generate(0, 3)  # computes 16 tokens, draws the 17th
    assert tokens == alone(decoder, prompt(14), 3)


def test_wrong_plans_are_refused(decoder):
    with Host(decoder, max_length=32) as host:
        host.admit(0, [1, 2, 97])
        with pytest.raises(AssertionError, match="vocabulary"):
            host.step((0, 3))
        host.release(0)
        host.admit(0, prompt(8))
        host.admit(1, prompt(8))
        piece = SpanPiece(1, 2, 4, torch.zeros(4, 24), 0)
        with pytest.raises(AssertionError, match="outside"):
            host.step((0, 8), (1, 4), pieces=(piece,))
        host.release(0)
        host.release(1)
        host.admit(0, prompt(8))
        piece = SpanPiece(0, 2, 4, torch.zeros(4, 23), 0)
        with pytest.raises(AssertionError, match="width"):
            host.step((0, 8), pieces=(piece,))
        host.release(0)
        host.admit(0, prompt(8))
        assert host.generate(0, 2) == alone(decoder, prompt(8), 2)


def test_a_copied_block_is_no_source(decoder):
    with Host(decoder) as host:
        host.copies = [(1, 2), (2, 3)]
        with pytest.raises(AssertionError, match="source and target"):
            host.step()


def test_embeddings_replace_tokens_only_where_told(decoder):
    """A piece made of the tokens' own embeddings changes nothing, wherever the chunks cut it."""
    tokens = prompt(20)
    own_LH = decoder.embed(torch.tensor(tokens))
    blank = [*tokens[:6], *[0] * 9, *tokens[15:]]
    with Host(decoder) as host:
        host.admit(0, blank)
        host.step((0, 8), pieces=(SpanPiece(0, 6, 2, own_LH, 6),))
        host.step((0, 3), pieces=(SpanPiece(0, 8, 3, own_LH[8:15].to(torch.bfloat16).float(), 0),))
        (logits,) = host.step_logits((0, 9), pieces=(SpanPiece(0, 11, 4, own_LH, 11),))
        host.admit(1, tokens)
        (expected,) = host.step_logits((1, 20))
    torch.testing.assert_close(logits, expected[11:], atol=0.05, rtol=0)
    assert logits.argmax(-1).tolist() == expected[11:].argmax(-1).tolist()


def test_close_finishes_what_was_submitted_and_ends_the_threads(decoder):
    before = set(threading.enumerate())
    host = Host(decoder)
    host.admit(0, prompt(5))
    future = host.submit((0, 5))
    host.runner.close()
    assert future.done()
    assert set(threading.enumerate()) <= before
    with pytest.raises(RuntimeError):
        host.submit((0, 1))
