"""The vocoder on a CUDA device, by graphs on a stream of its own: the CPU's samples."""

from __future__ import annotations

import pytest
import torch

from tests.vocoder.random_code2wav import CODEBOOK, random_code2wav, tiny_config
from vocoder.model import VocoderRow

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def spoken(device):
    """Nine streams of 1 to 9 chunks: of one frame, then of two, and of three, which no graph holds."""
    vocoder = random_code2wav(tiny_config(), device=device)
    generator = torch.Generator().manual_seed(3)
    states, pcm = [vocoder.open() for _ in range(9)], [[] for _ in range(9)]
    for index, size in enumerate((1, 2, 2, 3, 1, 2, 4, 1, 8)):
        codes = torch.randint(0, CODEBOOK, (9, size, vocoder.num_code_groups), generator=generator)
        rows = [VocoderRow(states[i], codes[i], last=i == index) for i in range(index, 9)]
        for i, samples in enumerate(vocoder.decode(rows), index):
            pcm[i].append(samples)
    return [torch.cat(parts) for parts in pcm]


def test_the_devices_give_the_same_samples():
    for ours, expected in zip(spoken("cuda"), spoken("cpu"), strict=True):
        torch.testing.assert_close(ours, expected, atol=2e-4, rtol=0)


def test_all_graphs_are_captured_ahead():
    assert random_code2wav(tiny_config(), device="cuda").capture_graphs() == 35
