"""Native CPU kernels: the C library behind the kernels' seam, where this machine can run it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from lm_engine.native.kernels import NativeKernels
    from lm_engine.native.library import Unavailable


def native_kernels(device: torch.device, dtype: torch.dtype) -> NativeKernels | Unavailable:
    """The kernels for tensors of this device and dtype, or why there are none. The first call may compile
    (a few seconds) unless `python -m lm_engine.native.build` ran at set-up."""
    from lm_engine.native.kernels import NativeKernels
    from lm_engine.native.library import DTYPE_CODES, Unavailable, default_library

    if device.type != "cpu" or dtype not in DTYPE_CODES:
        return Unavailable(f"native kernels compute on CPU in float32 or bfloat16, not {device.type} {dtype}")
    library = default_library()
    return library if isinstance(library, Unavailable) else NativeKernels(library)
