"""Graphs of one kind share memory: together they hold about what the largest one needs."""

from __future__ import annotations

import pytest
import torch

from contracts.capture import GraphPool, graph_bytes
from tests.vocoder.random_code2wav import random_code2wav, tiny_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
MIB = 1 << 20


def test_smaller_graphs_fit_into_the_largest_one_s_memory():
    device = torch.device("cuda", 0)
    pool, before, kept = GraphPool(device), graph_bytes(device), []
    for size in range(16, 0, -1):
        x = torch.ones(size * MIB, device=device)

        def run(x=x):
            return ((x + 1) * 2).sum()

        run()
        kept.append((x, *pool.capture(run)))
    assert graph_bytes(device) - before <= (2 * 4 * 16 + 64) * MIB  # not the sum of sixteen
    for x, graph, result in kept:
        graph.replay()
        assert result.item() == 4 * x.numel()


def test_a_vocoder_s_graphs_take_little_more_than_one():
    device = torch.device("cuda", 0)
    before = graph_bytes(device)
    vocoder = random_code2wav(tiny_config(), device="cuda:0")
    assert vocoder.capture_graphs() == 35
    assert graph_bytes(device) - before <= 60 * MIB  # without sharing each has a block or more of 2 MiB


def test_a_pool_captures_again_after_a_capture_that_failed():
    device = torch.device("cuda", 0)
    pool, x = GraphPool(device), torch.ones(1000, device=device)
    first, _ = pool.capture(lambda: x + 1)  # a pool lasts as long as a graph of it
    with pytest.raises(RuntimeError):
        pool.capture(lambda: (x + 1).cpu())
    with pytest.raises(ZeroDivisionError):
        pool.capture(lambda: (x + 1, 1 / 0))
    graph, result = pool.capture(lambda: x + 2)
    first.replay()
    graph.replay()
    assert result.sum().item() == 3000
