"""A tiny decoder with seeded random weights, made without any checkpoint."""

from __future__ import annotations

import torch

from lm_engine.decoder import Decoder
from lm_engine.layers.reference import ReferenceKernels
from lm_engine.model import DecoderConfig, RopeConfig


def tiny_config(**changes) -> DecoderConfig:
    rope = RopeConfig(theta=1e4, inv_freq=tuple(1e4 ** (-p / 4) for p in range(4)))
    fields = {
        "vocab_size": 97,
        "hidden_size": 24,
        "intermediate_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-6,
        "rope": rope,
        "max_position": 256,
    }
    return DecoderConfig(**{**fields, **changes})


class RandomSource:
    """The same weights for the same name, in whatever order they are taken."""

    def __init__(self, dtype=torch.float32, device="cpu") -> None:
        self.dtype = dtype
        self.device = torch.device(device)
        self.taken: list[str] = []

    def take(self, name, shape):
        self.taken.append(name)
        generator = torch.Generator().manual_seed(sum(name.encode()) * 7919 + len(name))
        weight = torch.randn(shape, generator=generator) * (0.3 if len(shape) == 1 else shape[-1] ** -0.5)
        return (weight + 1 if "norm" in name else weight).to(self.device, self.dtype)


def tiny_decoder(dtype=torch.float32, device="cpu", **changes) -> Decoder:
    return Decoder(tiny_config(**changes), RandomSource(dtype, device), ReferenceKernels())
