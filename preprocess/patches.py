"""Rescale, normalise and patchify on the CPU: the plain reference of what the encoder's device does with the
uint8 pixels of the pool."""

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
    # Normalising is a function of (channel, byte) alone: 768 floats computed once, in the reference's order.
    table = _normalised_bytes(spec)
    flat = np.ascontiguousarray(blocks).reshape(-1, 3, 1, patch * patch)
    values = np.empty((flat.shape[0], 3, 1, patch * patch), np.float32)
    for channel in range(3):
        values[:, channel] = table[channel][flat[:, channel]]
    frames = np.broadcast_to(values, (flat.shape[0], 3, spec.temporal_patch_size, patch * patch))
    return frames.reshape(flat.shape[0], -1)


def _normalised_bytes(spec: ImageSpec) -> np.ndarray:
    """[3, 256] float32: every byte value, rescaled to [0, 1] and normalised, for each channel."""
    unit = (np.arange(256, dtype=np.float64) / 255).astype(np.float32)
    mean = np.array(spec.image_mean, np.float32)[:, None]
    std = np.array(spec.image_std, np.float32)[:, None]
    return ((unit[None] - mean) / std).astype(np.float32)
