"""Pixels → patches on the encoder's device: rescale, normalise, cut; pictures are repeated in time.

Equal to what transformers' Qwen2-VL image and video processors make of the same resized pixels, in the same
order.
"""

from __future__ import annotations

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
        self._mean_C = torch.tensor(spec.image_mean, device=device).mul(255)
        self._std_C = torch.tensor(spec.image_std, device=device).mul(255)

    @property
    def patch_width(self) -> int:
        return CHANNELS * self._spec.temporal_patch_size * self._spec.patch_size**2

    def write(self, patches_NW: Tensor, pixels: Tensor) -> None:
        """uint8 [height, width, 3] or, of a video, [frames, height, width, 3] → all of `patches_NW`, which is
        contiguous and on the device, in patch order.

        Copies to the device before it returns: the pixels may be overwritten then.
        """
        # Normalised as the pixels lie; patches are cut, repeated and rounded in the one copy that moves them.
        normal = (pixels.to(self._device) - self._mean_C).div_(self._std_C)
        size, merge, depth = self._spec.patch_size, self._spec.merge_size, self._spec.temporal_patch_size
        frames = 1 if pixels.dim() == 3 else depth
        rows, columns = (side // self._spec.factor for side in pixels.shape[-3:-1])
        blocks = normal.view(-1, frames, rows, merge, size, columns, merge, size, CHANNELS)
        cut = blocks.permute(0, 2, 5, 3, 6, 8, 1, 4, 7)
        patches_NW.view(*cut.shape[:6], depth, size, size).copy_(cut)
