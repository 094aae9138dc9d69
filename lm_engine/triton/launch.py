"""How kernels are launched here: the interpreter, programmatic dependent launch, block sizes."""

from __future__ import annotations

from functools import cache
from typing import Literal

import torch
import triton

from lm_engine.triton.cache import keep_launchers

keep_launchers()
Precision = Literal["tf32", "ieee"]


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter (TRITON_INTERPRET=1 before its import), on CPU tensors."""
    return bool(triton.knobs.runtime.interpret)


@cache
def uses_pdl(device: torch.device) -> bool:
    """Programmatic dependent launch needs Hopper or newer."""
    return not interpreted() and torch.cuda.get_device_capability(device) >= (9, 0)


def launch_options(device: torch.device) -> dict[str, bool]:
    """To be given to every launch of a kernel that takes PDL, as keywords."""
    return {"PDL": True, "launch_pdl": True} if uses_pdl(device) else {"PDL": False}


@cache
def shared_memory_bytes(device: torch.device) -> int:
    """The most one program may have."""
    properties = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)  # type: ignore[attr-defined]


def dot_precision(dtype: torch.dtype) -> Precision:
    """float32 products are exact; of no matter for 16-bit operands."""
    return "ieee" if dtype is torch.float32 else "tf32"


def next_power(number: int) -> int:
    return 1 << (number - 1).bit_length()
