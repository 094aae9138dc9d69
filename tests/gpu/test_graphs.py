"""Decode steps by CUDA graph: the tokens of the same steps run one kernel after another."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from contracts.params import SamplingParams
from lm_engine.decoder import Decoder
from lm_engine.graphs import StepKind, graph_for, step_kinds
from lm_engine.layers.selection import select_kernels
from lm_engine.model import RopeConfig
from lm_engine.passes import TOKEN_SIZES
from tests.lm_engine.random_decoder import RandomSource, tiny_config
from tests.lm_engine.stepping import TIMEOUT_S, Host, greedy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PLAIN = [greedy(), SamplingParams(temperature=0.7), SamplingParams(temperature=1.3, min_tokens=3), greedy()]
OTHER = [
    SamplingParams(temperature=0.8, top_k=20),
    greedy(logprobs=2),
    SamplingParams(temperature=1.0, frequency_penalty=0.7),
]


@pytest.fixture(scope="module", params=[1, 3], ids=["rope", "mrope"])
def decoder(request):
    section = None if request.param == 1 else (4, 2, 2)
    inv_freq = tuple(1e4 ** (-p / 8) for p in range(8))
    config = tiny_config(
        head_dim=16,
        hidden_size=64,
        intermediate_size=96,
        qkv_bias=True,
        rope=RopeConfig(1e4, inv_freq, mrope_section=section),
    )
    device = torch.device("cuda")
    return Decoder(config, RandomSource(device=device), select_kernels("triton", device, torch.float32))


def generate(decoder, kinds, *, graphs, num_steps=40, kv_dtype="auto", later=False):
    """Every sequence's tokens and log-probabilities; all steps are submitted ahead of all results."""
    with Host(decoder, block_size=16, max_length=160, cuda_graphs=graphs, kv_dtype=kv_dtype) as host:
        if later:
            assert host.runner.capture_between_steps()
        counts = []
        for slot, kind in enumerate(kinds):
            tokens = np.random.default_rng(slot).integers(0, 97, 5 + 13 * slot).tolist()
            counts.append((slot, len(tokens)))
            host.admit(slot, tokens, sampling=kind, seed=slot, delta=2 - slot, stop_token_ids=(1, 2))
        futures = [host.submit(*counts)]
        futures += [host.submit(*((slot, 1) for slot, _ in counts)) for _ in range(num_steps)]
        results = [future.result(TIMEOUT_S) for future in futures]
        if graphs:
            assert host.runner._graphs._captured
            assert host.runner._passes._captured
        if later:
            host.runner._backlog.join()
            assert not host.runner._graphs.missing()
            assert set(host.runner._passes._captured) == set(host.runner._passes.shapes)
        table = host.runner.table.token_ids.cpu()
    assert not any(result.failed_slots for result in results)
    drawn = {slot: [s.token_id for r in results for s in r.sampled if s.slot == slot] for slot, _ in counts}
    for slot, length in counts:
        assert table[slot, length : length + num_steps + 1].tolist() == drawn[slot]
    logprobs = [s.logprobs.chosen for r in results for s in r.sampled if s.logprobs is not None]
    return drawn, logprobs


@pytest.mark.parametrize("kinds", [PLAIN[:1], PLAIN[:3], PLAIN, [*PLAIN, *OTHER]], ids=["1", "3", "4", "7"])
def test_a_graph_draws_what_the_kernels_draw(decoder, kinds):
    """Batches that fill their graph and one that does not; rows with more than a temperature among them."""
    expected, expected_logprobs = generate(decoder, kinds, graphs=False)
    found, found_logprobs = generate(decoder, kinds, graphs=True)
    assert found == expected
    np.testing.assert_allclose(found_logprobs, expected_logprobs, atol=1e-4)


def test_graphs_captured_between_steps_draw_the_same(decoder, monkeypatch):
    """A graph after each step, in the largest of which the others run meanwhile."""
    monkeypatch.setattr("lm_engine.backlog.FIRST_REST_S", 0.0)
    monkeypatch.setattr("lm_engine.backlog.SHARE", 1.0)
    kinds = [*PLAIN, *OTHER]
    expected, expected_logprobs = generate(decoder, kinds, graphs=False)
    found, found_logprobs = generate(decoder, kinds, graphs=True, later=True)
    assert found == expected
    np.testing.assert_allclose(found_logprobs, expected_logprobs, atol=1e-4)


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="needs e4m3"
)
def test_a_graph_draws_the_same_from_a_quantised_cache(decoder):
    expected, _ = generate(decoder, PLAIN, graphs=False, kv_dtype="fp8")
    found, _ = generate(decoder, PLAIN, graphs=True, kv_dtype="fp8")
    assert found == expected


def test_a_turn_in_a_long_conversation(decoder, monkeypatch):
    """Keys in parts, planned on the device, in a graph that other steps share; and not in parts."""
    found = []
    for graphs, parts in ((False, None), (False, decoder.attention._parts), (True, decoder.attention._parts)):
        monkeypatch.setattr(decoder.attention, "_parts", parts)
        with Host(decoder, block_size=16, max_length=2048, cuda_graphs=graphs) as host:
            for slot, length in enumerate((1400, 600, 40)):
                tokens = np.random.default_rng(slot).integers(0, 97, length).tolist()
                host.admit(slot, tokens, sampling=greedy(logprobs=1), delta=slot)
            steps = [((0, 900), (1, 600)), ((0, 250), (1, 1), (2, 40)), ((0, 250), (1, 1), (2, 1))]
            steps += [((1, 1), (0, 1), (2, 1))]
            results = [host.step(*step) for step in steps]
        found.append([(s.slot, s.token_id, s.logprobs.chosen) for r in results for s in r.sampled])
    for other in found[1:]:
        assert [one[:2] for one in other] == [one[:2] for one in found[0]]
        np.testing.assert_allclose([x[2] for x in other], [x[2] for x in found[0]], atol=1e-4)


def test_all_graphs_are_captured_ahead(decoder):
    with Host(decoder, block_size=16, max_length=160) as host:
        assert host.runner.capture_graphs() == 4 + len(TOKEN_SIZES)  # 1, 2, 4, 8 decodes
        assert host.runner.capture_graphs() == 4 + len(TOKEN_SIZES)


def test_infinite_logits_fail_their_row_alone(decoder):
    with Host(decoder, block_size=16, max_length=160) as host:
        for slot in range(2):
            host.admit(slot, [1, 2, 3])
        first = host.step((0, 3), (1, 3))
        host.kv.values[0, host.runner.table.block_tables[1, 0]] = torch.nan
        result = host.step((0, 1), (1, 1))
        assert first.failed_slots == ()
        assert result.failed_slots == (1,)
        assert host.step((0, 1)).failed_slots == ()


def test_batches_round_up():
    kinds, counts = step_kinds(50, gated=False), (1, 3, 8, 9, 33, 41, 49, 50)
    assert [graph_for(StepKind(n), kinds, ()).size for n in counts] == [1, 4, 8, 16, 40, 48, 50, 50]
