"""Flow matching: integrates the transformer's velocity from noise to a mel, guided away from the voiceless
one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from vocoder.token2wav.dit import Dit, Voice


@dataclass(frozen=True)
class FlowConfig:
    num_times: int = 10  # the ends included
    guidance: float = 0.5
    sway: float = -1.0  # negative: smaller steps at the beginning


def times(config: FlowConfig) -> Tensor:
    uniform = torch.linspace(0, 1, config.num_times)
    return uniform + config.sway * (torch.cos(math.pi / 2 * uniform) - 1 + uniform)


def integrate(velocity: Callable[[Tensor, Tensor], Tensor], x: Tensor, times_T: Tensor) -> Tensor:
    """Kutta's 3/8 rule between neighbouring times."""
    for start, end in pairwise(times_T):
        h = end - start
        k1 = velocity(start, x)
        k2 = velocity(start + h / 3, x + h * k1 / 3)
        k3 = velocity(start + h * 2 / 3, x + h * (k2 - k1 / 3))
        k4 = velocity(end, x + h * (k1 - k2 + k3))
        x = x + h * (k1 + 3 * (k2 + k3) + k4) / 8
    return x


def sample_mel(
    dit: Dit, config: FlowConfig, noise_BTM: Tensor, codes_BN: Tensor, voices: list[Voice]
) -> Tensor:
    """[batch, frames, mel]; the rows do not see each other."""
    conditions = dit.frame_conditions(codes_BN, voices)
    rotation = dit.rotation(noise_BTM.shape[1], noise_BTM.device)

    def velocity(time: Tensor, x_BTM: Tensor) -> Tensor:
        guided, free = dit(torch.cat([x_BTM, x_BTM]), time, conditions, rotation).chunk(2)
        out: Tensor = guided + (guided - free) * config.guidance
        return out

    return integrate(velocity, noise_BTM, times(config).to(noise_BTM.device))
