"""Pixels → patches on the encoder's device: rescale, normalise, repeat in time, cut.

Equal to what transformers' Qwen2-VL image processor makes of the same resized pixels, in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from contracts.specs import ImageSpec

CHANNELS = 3


class Patchifier:
    def __init__(self, spec: ImageSpec, device: torch.device, dtype: torch.dtype) -> None:
        self._spec = spec
        self._device = device
        self._dtype = dtype
        # On the 0..255 scale, so that rescaling is part of the normalisation.
        self._mean = torch.tensor(spec.image_mean, device=device).mul(255).view(1, CHANNELS, 1, 1, 1)
        self._std = torch.tensor(spec.image_std, device=device).mul(255).view(1, CHANNELS, 1, 1, 1)

    @property
    def patch_width(self) -> int:
        return CHANNELS * self._spec.temporal_patch_size * self._spec.patch_size**2

    def __call__(self, images: Sequence[Tensor]) -> Tensor:
        """uint8 [height, width, 3] each → [N, patch_width] of all images, in patch order.

        Copies to the device before it returns: the pixels may be overwritten then.
        """
        patches_NCPP = torch.cat([self._cut(image.to(self._device)) for image in images])
        normal = (patches_NCPP.unsqueeze(2).float() - self._mean) / self._std
        repeated = normal.expand(-1, -1, self._spec.temporal_patch_size, -1, -1)
        return repeated.flatten(1).to(self._dtype)

    def _cut(self, pixels: Tensor) -> Tensor:
        """uint8 [height, width, 3] → [patches, 3, P, P]."""
        size, merge = self._spec.patch_size, self._spec.merge_size
        rows, columns = pixels.shape[0] // self._spec.factor, pixels.shape[1] // self._spec.factor
        blocks = pixels.reshape(rows, merge, size, columns, merge, size, CHANNELS)
        return blocks.permute(0, 3, 1, 4, 6, 2, 5).reshape(-1, CHANNELS, size, size)
