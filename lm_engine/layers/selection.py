"""Chooses a decoder's kernels by name."""

from __future__ import annotations

import logging

import torch

from contracts.errors import EngineError
from lm_engine.gpu_target import is_gpu
from lm_engine.layers.kernels import Kernels
from lm_engine.layers.reference import ReferenceKernels
from lm_engine.model import Kernels as KernelChoice
from lm_engine.native import Unavailable, native_kernels
from lm_engine.triton import Unavailable as NoTriton
from lm_engine.triton import triton_kernels

logger = logging.getLogger(__name__)


def select_kernels(choice: KernelChoice, device: torch.device, dtype: torch.dtype) -> Kernels:
    """ "auto" takes the fastest that this machine can run. Raises EngineError when a named one cannot run."""
    if choice == "reference":
        return ReferenceKernels()
    if choice == "triton" or (choice == "auto" and is_gpu(device)):
        triton = triton_kernels(device, dtype)
        if not isinstance(triton, NoTriton):
            return triton
        if choice == "triton":
            raise EngineError(
                f"kernels = 'triton' cannot be used: {triton.reason}; set 'auto' or 'reference'"
            )
        logger.warning("plain kernels: %s", triton.reason)
        return ReferenceKernels()
    native = native_kernels(device, dtype)
    if not isinstance(native, Unavailable):
        return native
    if choice == "native":
        raise EngineError(f"kernels = 'native' cannot be used: {native.reason}; set 'auto' or 'reference'")
    logger.info("plain kernels: %s", native.reason)
    return ReferenceKernels()
