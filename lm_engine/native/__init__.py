"""Native CPU kernels: the C library behind the kernels' seam, where this machine can run it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from lm_engine.native.kernels import NativeKernels

SUPPORTED_DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class Unavailable:
    reason: str


def native_kernels(device: torch.device, dtype: torch.dtype) -> NativeKernels | Unavailable:
    """The kernels for tensors of this device and dtype, or why there are none. The first call may compile
    (a few seconds) unless `python -m lm_engine.native.build` ran at set-up."""
    # Imported late: building imports this package too, and needs nothing of it.
    from lm_engine.native.kernels import NativeKernels
    from lm_engine.native.library import default_library

    if device.type != "cpu" or dtype not in SUPPORTED_DTYPES:
        return Unavailable(f"they compute on CPU in float32 or bfloat16, not on {device.type} in {dtype}")
    library = default_library()
    return library if isinstance(library, Unavailable) else NativeKernels(library)
