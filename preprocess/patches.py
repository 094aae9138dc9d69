"""Rescale, normalise and patchify on the CPU: the plain reference of what the encoder's device does with the
uint8 pixels of the pool.

Shapes: N patches, C channels, T frames, P pixels of a patch.
"""

from __future__ import annotations

import numpy as np

from contracts.specs import ImageSpec


def patchify(pixels_HWC: np.ndarray, spec: ImageSpec) -> np.ndarray:
    """[H, W, 3] uint8 → [patches, 3 * temporal_patch_size * patch_size²] float32.

    Rows go block by block (merge_size x merge_size patches that become one token), row-major inside; columns
    are channel, frame, row, column, the still image being repeated for every frame.
    """
    assert pixels_HWC.dtype == np.uint8
    assert pixels_HWC.shape[2] == 3
    height, width, _ = pixels_HWC.shape
    patch, merge = spec.patch_size, spec.merge_size
    blocks = pixels_HWC.reshape(
        height // spec.factor, merge, patch, width // spec.factor, merge, patch, 3
    ).transpose(0, 3, 1, 4, 6, 2, 5)
    bytes_NCP = np.ascontiguousarray(blocks).reshape(-1, 3, patch * patch)
    # (x / 255 - mean) / std as one multiplication and one addition a value.
    mean, std = np.array(spec.image_mean)[:, None], np.array(spec.image_std)[:, None]
    patches_NCTP = np.empty((len(bytes_NCP), 3, spec.temporal_patch_size, patch * patch), np.float32)
    first = patches_NCTP[:, :, 0]
    np.multiply(bytes_NCP, (1 / (255 * std)).astype(np.float32), out=first)
    first -= (mean / std).astype(np.float32)
    patches_NCTP[:, :, 1:] = first[:, :, None]
    return patches_NCTP.reshape(len(bytes_NCP), -1)
