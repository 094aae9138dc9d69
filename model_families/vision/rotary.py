"""Axial rotary positions of a vision tower: a quarter of each head's pairs turn by row, a quarter by column.

Shapes: N patches, H heads, D head size, P = D/2 rotated pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from model_families.vision.packing import PatchGrid


@dataclass(frozen=True)
class Rotation:
    """float32 [N, 1, P] each."""

    cos: Tensor
    sin: Tensor

    def reorder(self, order_N: Tensor) -> Rotation:
        return Rotation(self.cos[order_N], self.sin[order_N])

    def apply(self, x_NHD: Tensor) -> Tensor:
        """Rotates pairs (p, p + D/2) in float32."""
        a, b = x_NHD.float().chunk(2, dim=-1)
        rotated = torch.cat([a * self.cos - b * self.sin, b * self.cos + a * self.sin], dim=-1)
        return rotated.to(x_NHD.dtype)


def axial_rotation(grid: PatchGrid, head_dim: int, theta: float, device: torch.device) -> Rotation:
    inv_freq = _inverse_frequencies(head_dim, theta, device)
    place_N2 = torch.from_numpy(np.stack([grid.row_N, grid.column_N], axis=1)).to(device).float()
    angle_NP = (place_N2[:, :, None] * inv_freq).flatten(1)
    return Rotation(angle_NP.cos().unsqueeze(1), angle_NP.sin().unsqueeze(1))


@cache  # a tower has one
def _inverse_frequencies(head_dim: int, theta: float, device: torch.device) -> Tensor:
    spatial = head_dim // 2
    with torch.inference_mode(False):
        exponents = torch.arange(0, spatial, 2, dtype=torch.float32, device=device) / spatial
        return 1.0 / theta**exponents
