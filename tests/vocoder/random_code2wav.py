"""A seeded code2wav small enough for tests, with PCM well inside [-1, 1]."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from vocoder.code2wav import Code2Wav, Code2WavConfig, Code2WavNetwork
from vocoder.graphs import Record, Replay
from vocoder.transformer import TransformerConfig

CODEBOOK = 32


def tiny_config(
    upsample_rates: tuple[int, ...] = (3, 2), upsampling_ratios: tuple[int, ...] = (2, 2), kv_heads: int = 2
) -> Code2WavConfig:
    transformer = TransformerConfig(
        hidden_size=16,
        intermediate_size=24,
        num_layers=2,
        num_heads=2,
        num_kv_heads=kv_heads,
        head_dim=8,
        window=5,
        rope_theta=10_000.0,
        norm_eps=1e-5,
        attention_bias=True,
    )
    return Code2WavConfig(
        transformer=transformer,
        codebook_size=CODEBOOK,
        num_code_groups=3,
        upsampling_ratios=upsampling_ratios,
        upsample_rates=upsample_rates,
        decoder_width=16,
        sample_rate=24_000,
    )


def fill_randomly(network: nn.Module, seed: int = 0) -> None:
    """Every tensor matters: no zero biases, no unit gains, convolutions that keep the scale."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in network.named_parameters():
            scale = 0.7 * tensor[0].numel() ** -0.5 if tensor.dim() > 1 else 0.2
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * scale)
            if name.endswith(("norm.weight", "frequency", "gain", "scale")):
                tensor.abs_().add_(0.5)
            if name.startswith("exit."):
                tensor.mul_(0.05)


def random_code2wav(
    config: Code2WavConfig, seed: int = 0, record: Record | None = None, device: str = "cpu"
) -> Code2Wav:
    network = Code2WavNetwork(config).requires_grad_(False)
    fill_randomly(network, seed)
    return Code2Wav(network.to(device), record)


def record(run: Callable[[], Tensor]) -> tuple[Replay, Tensor]:
    """As a CUDA graph: what is recorded has run once, and a replay writes to the result's first place."""
    result = run().clone()

    def replay() -> None:
        result.copy_(run())

    return replay, result
