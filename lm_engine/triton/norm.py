"""Launches the RMS norm.

Shapes: T rows, H their width, E parts that add up to them.
"""

from __future__ import annotations

from torch import Tensor

from lm_engine.triton.jit.elementwise import rms_norm
from lm_engine.triton.launch import launch, launch_options, next_power


def launch_norm(
    x_ETH: Tensor, residual_TH: Tensor | None, weight_H: Tensor, eps: float, out_TH: Tensor
) -> None:
    """`x_ETH`: [T, H] or, in float32, parts of it. With a residual: the sum goes there and its norm to
    `out_TH`."""
    width = x_ETH.shape[-1]
    assert weight_H.shape == (width,)
    launch(
        rms_norm,
        (out_TH.numel() // width,),
        x_ETH,
        residual_TH,
        weight_H,
        out_TH,
        eps,
        WIDTH=width,
        BLOCK=next_power(width),
        ADD=residual_TH is not None,
        PARTS=x_ETH.numel() // out_TH.numel(),
        **launch_options(out_TH.device),
    )
