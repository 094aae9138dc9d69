"""The noise that a stream's mels are made from: drawn piece by piece as if for the whole stream at once."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

# torch's generator on the host fills so many values at a time; pieces of whole blocks join to one draw.
BLOCK = 16


@dataclass(frozen=True, eq=False)
class Noise:
    """Rows [first, first + len(rows)) of it are there. Never changed, so that a failed decode draws again.

    On the host, so that every device hears the same.
    """

    generator_state: Tensor
    rows_TM: Tensor
    first: int

    @classmethod
    def seeded(cls, seed: int, mel_dim: int) -> Noise:
        return cls(torch.Generator().manual_seed(seed).get_state(), torch.empty(0, mel_dim), 0)

    @property
    def num_bytes(self) -> int:
        return self.generator_state.nbytes + self.rows_TM.nbytes

    def rows(self, first: int, end: int) -> Tensor:
        """[end - first, mel]; they have been drawn, and not been dropped."""
        assert self.first <= first <= end <= self.first + self.rows_TM.shape[0]
        return self.rows_TM[first - self.first : end - self.first]

    def drawn_to(self, end: int) -> Noise:
        num_new = end - self.first - self.rows_TM.shape[0]
        if num_new <= 0:
            return self
        mel_dim = self.rows_TM.shape[1]
        assert num_new * mel_dim % BLOCK == 0, f"{num_new} rows of {mel_dim} are no whole blocks"
        generator = torch.Generator()
        generator.set_state(self.generator_state)
        new_TM = torch.randn(1, num_new, mel_dim, generator=generator)[0]
        return Noise(generator.get_state(), torch.cat([self.rows_TM, new_TM]), self.first)

    def dropped_to(self, first: int) -> Noise:
        """Without the rows before `first`."""
        assert first >= self.first
        return replace(self, rows_TM=self.rows_TM[first - self.first :].clone(), first=first)
