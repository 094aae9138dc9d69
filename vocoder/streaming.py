"""What causal layers carry from one chunk of a stream to the next, for a batch of streams.

Each layer reserves a slot of one flat vector per stream. A forward reads the old vectors and fills new
ones; the
streams take the new ones only when the whole forward has succeeded.

Void steps. A transposed convolution whose output is trimmed at the left gives, in a stream's first steps,
samples
that do not exist: `void` counts them from the stream's beginning, at the resolution of each level. Batched
rows keep
them, so that rows of all ages have one shape; they are held at zero, which is what a causal layer sees
before the
beginning.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor


@dataclass(frozen=True)
class Slot:
    start: int
    shape: tuple[int, ...]

    @property
    def stop(self) -> int:
        return self.start + prod(self.shape)


class StateLayout:
    """Hands out slots while a model is built."""

    def __init__(self) -> None:
        self.size = 0

    def reserve(self, *shape: int) -> Slot:
        slot = Slot(self.size, shape)
        self.size = slot.stop
        return slot


class StreamBatch:
    """The streams of one forward. `num_frames_B`: how many frames each had decoded before; `youngest`: no
    more than the least of them. `new_BS`: memory for the new vectors."""

    def __init__(
        self,
        layout: StateLayout,
        states_BS: Tensor,
        num_frames_B: Tensor,
        youngest: int,
        new_BS: Tensor | None = None,
    ) -> None:
        assert states_BS.shape == (len(num_frames_B), layout.size)
        self._old_BS = states_BS
        self.new_BS = torch.empty_like(states_BS) if new_BS is None else new_BS
        assert self.new_BS.shape == states_BS.shape
        self.num_frames_B = num_frames_B
        self._youngest = youngest

    def read(self, slot: Slot) -> Tensor:
        return self._old_BS[:, slot.start : slot.stop].view(-1, *slot.shape)

    def write(self, slot: Slot, value: Tensor) -> None:
        """Every slot is written exactly once per forward."""
        self.new_BS[:, slot.start : slot.stop].view(-1, *slot.shape).copy_(value)

    def blank_void(self, x_BCT: Tensor, level: Level) -> Tensor:
        """Zeroes, in place, the steps before each stream's beginning."""
        if self._youngest * level.steps_per_frame < level.void:
            step_T = torch.arange(x_BCT.shape[-1], device=x_BCT.device)
            void_B1 = level.void - self.num_frames_B[:, None] * level.steps_per_frame
            x_BCT.masked_fill_((step_T < void_B1)[:, None], 0)
        return x_BCT


@dataclass(frozen=True)
class Level:
    """A resolution inside a decoder."""

    steps_per_frame: int = 1
    void: int = 0

    def upsampled(self, kernel: int, stride: int) -> Level:
        """After a transposed convolution trimmed by kernel - stride at the left."""
        assert kernel >= stride >= 1
        return Level(self.steps_per_frame * stride, self.void * stride + kernel - stride)
