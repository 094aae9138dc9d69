"""The experts of a sparse layer: our own kernels for few tokens, a grouped product for many.

Shapes: T tokens, H hidden, I intermediate, E experts, K experts of a token, P = T·K pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from lm_engine.layers.kernels import Experts
from lm_engine.triton.jit.experts import combine_experts, expert_gemm, route
from lm_engine.triton.launch import dot_precision, interpreted, launch, launch_options, next_power

MAX_TOKENS = 64  # beyond it most experts have a full tile, and the library's product is faster
_TILE_PAIRS = 16
_COMBINE_BLOCK = 512
_MANY_PROGRAMS = 264  # two for each multiprocessor


@dataclass(frozen=True)
class Shared:
    """Output of the shared expert and its gate's logit, float32 [T, 1]."""

    y_TH: Tensor
    gate_T1: Tensor


class TritonExperts:
    """`many` takes steps of more than MAX_TOKENS; it and this share `gate_up` and `down`."""

    def __init__(self, gate_up_E2IH: Tensor, down_EHI: Tensor, many: Experts) -> None:
        assert gate_up_E2IH.is_contiguous()
        assert down_EHI.is_contiguous()
        self._gate_up_E2IH, self._down_EHI = gate_up_E2IH, down_EHI
        self._many = many

    def __call__(self, x_TH: Tensor, expert_TK: Tensor, weight_TK: Tensor) -> Tensor:
        if not 0 < x_TH.shape[0] <= MAX_TOKENS:
            return self._many(x_TH, expert_TK, weight_TK)
        out_TH = torch.empty_like(x_TH)
        self._apply(x_TH.contiguous(), expert_TK.int(), weight_TK.contiguous(), None, None, out_TH)
        return out_TH

    def add_routed(
        self,
        x_TH: Tensor,
        logits_TE: Tensor,
        num_chosen: int,
        normalise: bool,
        shared: Shared | None,
        residual_TH: Tensor,
    ) -> None:
        """Routes and adds everything into `residual_TH`. For at most MAX_TOKENS."""
        num_tokens, num_experts = logits_TE.shape
        assert 0 < num_tokens <= MAX_TOKENS
        assert logits_TE.dtype == torch.float32
        expert_TK = torch.empty(num_tokens, num_chosen, dtype=torch.int32, device=x_TH.device)
        weight_TK = torch.empty(num_tokens, num_chosen, dtype=torch.float32, device=x_TH.device)
        launch(
            route,
            (num_tokens,),
            logits_TE,
            expert_TK,
            weight_TK,
            E=num_experts,
            BLOCK_E=next_power(num_experts),
            CHOSEN=num_chosen,
            BLOCK_C=next_power(num_chosen),
            NORMALISE=normalise,
            num_warps=1,
            **launch_options(x_TH.device),
        )
        self._apply(x_TH, expert_TK, weight_TK, shared, residual_TH, residual_TH)

    def _apply(
        self,
        x_TH: Tensor,
        expert_TK: Tensor,
        weight_TK: Tensor,
        shared: Shared | None,
        residual_TH: Tensor | None,
        out_TH: Tensor,
    ) -> None:
        num_tokens, num_chosen = expert_TK.shape
        inner_PI = _multiply(x_TH, self._gate_up_E2IH, expert_TK, x_TH.dtype, gated=True)
        y_PH = _multiply(inner_PI, self._down_EHI, expert_TK, torch.float32, gated=False)
        width = x_TH.shape[1]
        block = min(_COMBINE_BLOCK, next_power(width))
        launch(
            combine_experts,
            (num_tokens, triton.cdiv(width, block)),
            y_PH,
            weight_TK,
            None if shared is None else shared.y_TH,
            None if shared is None else shared.gate_T1,
            residual_TH,
            out_TH,
            WIDTH=width,
            BLOCK=block,
            CHOSEN=num_chosen,
            SHARED=shared is not None,
            RESIDUAL=residual_TH is not None,
            **launch_options(x_TH.device),
        )


def _multiply(
    x_XK: Tensor, weight_EOK: Tensor, expert_TK: Tensor, dtype: torch.dtype, *, gated: bool
) -> Tensor:
    """[P, outputs] of each pair's expert. x has a row for each token if `gated`, else for each pair."""
    num_experts, num_outputs, num_inputs = weight_EOK.shape
    num_pairs, num_chosen = expert_TK.numel(), expert_TK.shape[1]
    assert x_XK.is_contiguous()
    assert x_XK.shape == (expert_TK.shape[0] if gated else num_pairs, num_inputs)
    num_outputs //= 2 if gated else 1
    out_PO = torch.empty(num_pairs, num_outputs, dtype=dtype, device=x_XK.device)
    num_groups = min(num_pairs, num_experts)
    block_n, block_k = _tile(x_XK, num_groups, num_outputs)
    launch(
        expert_gemm,
        (num_groups, triton.cdiv(num_outputs, block_n)),
        x_XK,
        weight_EOK,
        expert_TK,
        out_PO,
        num_pairs,
        num_outputs,
        K=num_inputs,
        CHOSEN=num_chosen,
        BLOCK_P=max(next_power(num_pairs), 16),
        BLOCK_M=_TILE_PAIRS,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        BY_EXPERT=num_pairs > num_experts,
        BY_PAIR=not gated,
        GATED=gated,
        PRECISION=dot_precision(x_XK.dtype),
        num_warps=4,
        num_stages=4,
        **launch_options(x_XK.device),
    )
    return out_PO


def _tile(x_XK: Tensor, num_groups: int, num_outputs: int) -> tuple[int, int]:
    """Outputs and inputs of a tile: few programs take narrower tiles, so that all multiprocessors read."""
    if interpreted():
        return 16, 32
    wide = num_groups * triton.cdiv(num_outputs, 32) >= _MANY_PROGRAMS
    return (32 if wide else 16), 256 // x_XK.element_size()
