"""Launches the RMS norm.

Shapes: T rows, H their width.
"""

from __future__ import annotations

from torch import Tensor

from lm_engine.triton.jit.elementwise import rms_norm
from lm_engine.triton.launch import launch, launch_options, next_power


def launch_norm(
    x_TH: Tensor, residual_TH: Tensor | None, weight_H: Tensor, eps: float, out_TH: Tensor
) -> None:
    """With a residual: the sum goes there and its norm to `out_TH`."""
    width = x_TH.shape[-1]
    assert weight_H.shape == (width,)
    launch(
        rms_norm,
        (x_TH.numel() // width,),
        x_TH,
        residual_TH,
        weight_H,
        out_TH,
        eps,
        WIDTH=width,
        BLOCK=next_power(width),
        ADD=residual_TH is not None,
        **launch_options(x_TH.device),
    )
