"""Training by the clock: a stage is given seconds, and its learning rate follows the share of them spent."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from math import cos, pi
from pathlib import Path

import torch

SAY_EVERY_S = 20.0
SAVE_EVERY_S = 60.0


class Clock:
    """`fraction` goes from 0 to 1. Prints a line now and then, and keeps them all in a file."""

    def __init__(self, stage: str, seconds: float, log: Path) -> None:
        self.stage, self.seconds = stage, seconds
        self._log = log
        self._saved_s = 0.0
        self._start = self._said = time.monotonic()
        self.step = 0

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._start

    def time_to_save(self) -> bool:
        """True now and then, so that a run that is stopped leaves something."""
        due = self.elapsed_s - self._saved_s > SAVE_EVERY_S
        if due:
            self._saved_s = self.elapsed_s
        return due

    @property
    def fraction(self) -> float:
        return min(self.elapsed_s / self.seconds, 1.0)

    def tick(self, figures: Mapping[str, torch.Tensor | float]) -> bool:
        """Counts a step; whether there is time for another."""
        self.step += 1
        done = self.fraction >= 1.0
        if done or self.step == 1 or time.monotonic() - self._said >= SAY_EVERY_S:
            self._said = time.monotonic()
            line = {"stage": self.stage, "step": self.step, "s": round(self.elapsed_s, 1)}
            line |= {
                name: round(float(torch.as_tensor(value).detach()), 4) for name, value in figures.items()
            }
            self.say(line)
        return not done

    def say(self, line: dict[str, object]) -> None:
        text = json.dumps(line)
        print(text, flush=True)
        with self._log.open("a") as file:
            file.write(text + "\n")


def learning_rate(fraction: float, top: float, *, warm: float = 0.03, bottom: float = 0.03) -> float:
    """Up in a straight line, down along a cosine."""
    if fraction < warm:
        return top * max(fraction / warm, 0.01)
    return top * (bottom + (1 - bottom) * 0.5 * (1 + cos(pi * (fraction - warm) / (1 - warm))))


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Also of a step that is recorded, which reads the rate where it lies."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def new_optimizer(
    parameters: list[torch.nn.Parameter], betas: tuple[float, float], weight_decay: float
) -> torch.optim.AdamW:
    """On a GPU one that can be recorded."""
    if parameters[0].device.type != "cuda":
        return torch.optim.AdamW(parameters, betas=betas, weight_decay=weight_decay)
    rate = torch.zeros((), device=parameters[0].device)
    return torch.optim.AdamW(
        parameters, lr=rate, betas=betas, weight_decay=weight_decay, fused=True, capturable=True
    )


class Clip:
    """One step of an optimizer, its gradient held to a few times what gradients have been of late."""

    TIMES, DECAY = 2.0, 0.98

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        self._parameters = parameters
        self._usual = torch.zeros((), device=parameters[0].device)  # 0: not known yet

    def step(self, optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> torch.Tensor:
        """The norm before it was clipped. A gradient that is not finite changes nothing."""
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        norm: torch.Tensor = torch.stack(torch._foreach_norm(gradients)).norm()
        usual = torch.where(self._usual > 0, self._usual, norm)
        limit = self.TIMES * usual
        scale = torch.where(norm.isfinite(), (limit / (norm + 1e-12)).clamp(max=1.0), torch.zeros_like(norm))
        for gradient in gradients:
            gradient.nan_to_num_(0.0, 0.0, 0.0)
        torch._foreach_mul_(gradients, scale)
        seen = torch.minimum(norm, limit).nan_to_num(0.0, 0.0, 0.0)
        self._usual.copy_(usual.lerp(seen, 1 - self.DECAY).nan_to_num(0.0, 0.0, 0.0).detach())
        optimizer.step()
        return norm.detach()
