"""Rotary angles of a step's positions, plain and multimodal.

Shapes: A position axes, T tokens, P = D/2 rotated pairs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lm_engine.model import RopeConfig


class RotaryEmbedding:
    """Gives cos and sin [T, P] of every token from its position on each axis: float32, contiguous, scaled."""

    def __init__(self, config: RopeConfig, device: torch.device) -> None:
        self.scaling = config.attention_scaling
        self.inv_freq_P = torch.tensor(config.inv_freq, dtype=torch.float32, device=device)
        axes = position_axes(config)
        self.axis_P = None if axes is None else torch.tensor(axes, device=device)

    def __call__(self, positions_AT: Tensor) -> tuple[Tensor, Tensor]:
        assert positions_AT.shape[0] == self.num_axes
        if self.axis_P is None:
            positions_T1 = positions_AT[0].float().unsqueeze(-1)
            angles_TP = positions_T1 * self.inv_freq_P
        else:
            angles_TP = positions_AT.float().index_select(0, self.axis_P).t() * self.inv_freq_P
        cos_TP, sin_TP = angles_TP.cos(), angles_TP.sin()
        if self.scaling != 1.0:
            cos_TP, sin_TP = cos_TP * self.scaling, sin_TP * self.scaling
        return cos_TP.contiguous(), sin_TP.contiguous()

    @property
    def num_axes(self) -> int:
        return 1 if self.axis_P is None else 3


def position_axes(config: RopeConfig) -> list[int] | None:
    """The axis (t, h, w) that turns each pair; None for plain RoPE.

    Sections in a row (Qwen2-VL): all pairs of t, then h, then w. Interleaved (Qwen3-VL): t h w t h w …, as
    long as h and w have pairs left, then t.
    """
    if config.mrope_section is None:
        return None
    num_pairs = len(config.inv_freq)
    if not config.mrope_interleaved:
        assert sum(config.mrope_section) == num_pairs, "mrope_section does not cover the head"
        return [axis for axis, count in enumerate(config.mrope_section) for _ in range(count)]
    axes = [0] * num_pairs
    for axis in (1, 2):
        for pair in range(axis, min(3 * config.mrope_section[axis], num_pairs), 3):
            axes[pair] = axis
    return axes
