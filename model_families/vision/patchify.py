"""Pixels → patches on the encoder's device: rescale, normalise, cut; pictures are repeated in time.

Equal to what transformers' Qwen2-VL image and video processors make of the same resized pixels, in the same
order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from contracts.specs import ImageSpec, VideoSpec

CHANNELS = 3


class Patchifier:
    def __init__(self, spec: ImageSpec | VideoSpec, device: torch.device, dtype: torch.dtype) -> None:
        self._spec = spec
        self._device = device
        self._dtype = dtype
        # On the 0..255 scale, so that rescaling is part of the normalisation.
        self._mean = torch.tensor(spec.image_mean, device=device).mul(255).view(1, CHANNELS, 1, 1, 1)
        self._std = torch.tensor(spec.image_std, device=device).mul(255).view(1, CHANNELS, 1, 1, 1)

    @property
    def patch_width(self) -> int:
        return CHANNELS * self._spec.temporal_patch_size * self._spec.patch_size**2

    def __call__(self, items: Sequence[Tensor]) -> Tensor:
        """uint8 [height, width, 3] or, of a video, [frames, height, width, 3] each → [N, patch_width] of all
        items, in patch order.

        Copies to the device before it returns: the pixels may be overwritten then.
        """
        return torch.cat([self._patches(pixels.to(self._device)) for pixels in items])

    def _patches(self, pixels: Tensor) -> Tensor:
        repeats = 1 if pixels.dim() == 4 else self._spec.temporal_patch_size
        patches_NCTPP = self._cut(pixels if pixels.dim() == 4 else pixels.unsqueeze(0))
        normal = (patches_NCTPP.float() - self._mean) / self._std
        return normal.expand(-1, -1, normal.shape[2] * repeats, -1, -1).flatten(1).to(self._dtype)

    def _cut(self, frames: Tensor) -> Tensor:
        """uint8 [T, height, width, 3] → [patches, 3, frames of a patch, P, P]."""
        size, merge = self._spec.patch_size, self._spec.merge_size
        rows, columns = frames.shape[1] // self._spec.factor, frames.shape[2] // self._spec.factor
        depth = 1 if frames.shape[0] == 1 else self._spec.temporal_patch_size
        blocks = frames.reshape(-1, depth, rows, merge, size, columns, merge, size, CHANNELS)
        return blocks.permute(0, 2, 5, 3, 6, 8, 1, 4, 7).reshape(-1, CHANNELS, depth, size, size)
