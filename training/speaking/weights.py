"""Checkpoints of training: safetensors in float16 or float32, in files small enough to be carried about."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

PART_BYTES = 15 << 20


def save_parts(folder: Path, name: str, tensors: dict[str, Tensor]) -> None:
    """`name-0.safetensors`, `name-1…`; float16. Replaces what was there."""
    parts: list[dict[str, Tensor]] = [{}]
    size = 0
    for key, tensor in tensors.items():
        half = tensor.detach().to("cpu", torch.float16).contiguous()
        if size + half.nbytes > PART_BYTES and parts[-1]:
            parts.append({})
            size = 0
        parts[-1][key] = half
        size += half.nbytes
    for index, part in enumerate(parts):
        scratch = folder / f".{name}-{index}"
        save_file(part, scratch)
        scratch.rename(folder / f"{name}-{index}.safetensors")


def load_parts(folder: Path, name: str) -> dict[str, Tensor]:
    """Float32. Empty when there is none."""
    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob(f"{name}-*.safetensors")):
        found |= {key: tensor.float() for key, tensor in load_file(path).items()}
    return found


class Average:
    """A moving average of a module's parameters."""

    def __init__(self, module: nn.Module, decay: float) -> None:
        self._module, self._decay = module, decay
        self.values = [p.detach().clone() for p in module.parameters()]
        self._steps = 0

    @torch.no_grad()
    def follow(self) -> None:
        self._steps += 1
        decay = min(self._decay, self._steps / (self._steps + 10))
        live = [p.detach() for p in self._module.parameters()]
        torch._foreach_lerp_(self.values, live, 1 - decay)

    def state(self) -> dict[str, Tensor]:
        """The module's, with the averages for its parameters."""
        names = (name for name, _ in self._module.named_parameters())
        return dict(self._module.state_dict()) | dict(zip(names, self.values, strict=True))

    @torch.no_grad()
    def apply(self) -> None:
        for parameter, value in zip(self._module.parameters(), self.values, strict=True):
            parameter.copy_(value)
