"""Triton kernels: the GPU's layers behind the kernels' seam, where this machine can run them."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from lm_engine.gpu_target import is_gpu, target_of

if TYPE_CHECKING:
    from lm_engine.triton.kernels import TritonKernels

SUPPORTED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MIN_CAPABILITY = (8, 0)


@dataclass(frozen=True)
class Unavailable:
    reason: str


def triton_kernels(device: torch.device, dtype: torch.dtype) -> TritonKernels | Unavailable:
    """The kernels for tensors of this device and dtype, or why there are none."""
    if dtype not in SUPPORTED_DTYPES:
        return Unavailable(f"they compute in float32, bfloat16 or float16, not in {dtype}")
    if find_spec("triton") is None:
        return Unavailable("the package triton is not installed")
    # Imported late: Triton is optional, and its import costs time on machines without a GPU.
    from lm_engine.triton.launch import interpreted

    if not is_gpu(device) and not (device.type == "cpu" and interpreted()):
        return Unavailable(f"they compute on CUDA devices, not on {device.type}")
    if is_gpu(device) and target_of(device).capability < MIN_CAPABILITY:
        return Unavailable("they need a GPU of compute capability 8.0 or newer")
    from lm_engine.triton.kernels import TritonKernels

    return TritonKernels(device)
