"""The runner on a CUDA device: the CPU's tokens, a launch that never waits, measured memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from contracts.params import SamplingParams
from lm_engine.memory import StepLimits, allocate_kv, measure_capacity
from lm_engine.plan import SpanPiece
from lm_engine.random import gumbel_noise
from tests.lm_engine.random_decoder import tiny_decoder
from tests.lm_engine.stepping import TIMEOUT_S, Host, greedy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
KINDS = [
    greedy(logprobs=3),
    SamplingParams(temperature=0.8, top_k=20, logprobs=0),
    SamplingParams(temperature=1.2, top_p=0.9),
    SamplingParams(temperature=1.0, min_p=0.02, frequency_penalty=0.7),
    SamplingParams(temperature=1.0, top_k=30, top_p=0.8, logit_bias=((3, 4.0),), min_tokens=4),
]


def prompt(length, seed):
    return np.random.default_rng(seed).integers(0, 97, length).tolist()


def admit_all(host):
    for slot, kind in enumerate(KINDS):
        host.admit(slot, prompt(6 + 9 * slot, slot), sampling=kind, seed=slot, stop_token_ids=(1, 2))


def plans():
    """Chunked prefills that turn into decodes one after another."""
    return [
        [(0, 6), (1, 15), (2, 20)],
        [(0, 1), (2, 4), (3, 33), (1, 1)],
        [(4, 40), (0, 1), (1, 1), (2, 1), (3, 1)],
        [(4, 2), (0, 1), (1, 1), (2, 1), (3, 1)],
        *[[(slot, 1) for slot in range(5)]] * 12,
    ]


def run(device):
    """All plans submitted ahead of all results."""
    with Host(tiny_decoder(device=device)) as host:
        admit_all(host)
        futures = [host.submit(*plan) for plan in plans()]
        return [future.result(TIMEOUT_S) for future in futures]


def test_the_devices_draw_the_same_tokens():
    on_host, on_device = run("cpu"), run("cuda")
    for host_result, device_result in zip(on_host, on_device, strict=True):
        assert device_result.failed_slots == ()
        for ours, theirs in zip(device_result.sampled, host_result.sampled, strict=True):
            assert (ours.slot, ours.token_id) == (theirs.slot, theirs.token_id)
            if theirs.logprobs is not None:
                assert ours.logprobs.rank == theirs.logprobs.rank
                assert abs(ours.logprobs.chosen - theirs.logprobs.chosen) < 1e-4


def test_a_stream_of_its_own_draws_the_same_tokens_from_embeddings_of_another():
    drawn = []
    for own_stream in (False, True):
        encoder = torch.cuda.Stream()
        with Host(tiny_decoder(device="cuda"), own_stream=own_stream) as host:
            admit_all(host)
            host.admit(7, prompt(12, 9))
            futures = [host.submit(*plan) for plan in plans()]
            with torch.cuda.stream(encoder):
                embeddings = torch.linspace(-1, 1, 8 * 24, device="cuda").reshape(8, 24)
            encoder.synchronize()
            futures.append(host.submit((7, 12), pieces=(SpanPiece(7, 2, 8, embeddings, 0),)))
            del embeddings
            with torch.cuda.stream(encoder):
                torch.full(
                    (8, 24), torch.nan, device="cuda"
                )  # would take the memory, if it were free already
            futures.append(host.submit((7, 1)))
            drawn.append([[s.token_id for s in future.result(TIMEOUT_S).sampled] for future in futures])
    assert drawn[0] == drawn[1]


def test_noise_is_the_same_on_both():
    seeds, positions = torch.tensor([0, -1, 2**62]), torch.tensor([0, 5, 10**6])
    ids = torch.arange(100_000)[None]
    on_device = gumbel_noise(seeds.cuda(), positions.cuda(), ids.cuda()).cpu()
    torch.testing.assert_close(on_device, gumbel_noise(seeds, positions, ids), atol=1e-5, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_launching_never_waits_for_the_device():
    with Host(tiny_decoder(device="cuda")) as host:
        admit_all(host)
        host.step(*plans()[0])  # libraries and allocators start up
        embeddings = torch.zeros(8, 24, device="cuda")
        torch.cuda.synchronize()
        try:
            torch.cuda.set_sync_debug_mode("error")
            host.admit(7, prompt(12, 9))
            futures = [host.submit(*plan) for plan in plans()[1:]]
            futures.append(host.submit((7, 12), pieces=(SpanPiece(7, 2, 8, embeddings, 0),)))
            host.copies = [(1, 150)]
            futures.append(host.submit((7, 1)))
            results = [future.result(TIMEOUT_S) for future in futures]
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert len(results[-1].sampled) == 1


def test_measured_memory_holds_in_use():
    decoder = tiny_decoder(device="cuda")
    limits = StepLimits(max_step_tokens=512, max_sequences=16, context_length=1024)
    weights = torch.cuda.memory_allocated()
    budget = weights + (256 << 20)
    capacity = measure_capacity(decoder, decoder.attention, limits, budget_bytes=budget, block_size=16)
    assert capacity.peak_bytes > weights
    kv = allocate_kv(decoder.config, capacity.num_blocks, 16, torch.float32, decoder.device)
    assert budget - capacity.peak_bytes - capacity.block_bytes < kv.keys.nbytes + kv.values.nbytes
    assert torch.cuda.memory_allocated() + capacity.peak_bytes - weights <= budget + (1 << 20)
