"""Chooses how attention divides mixed steps."""

from __future__ import annotations

import torch

from contracts.errors import EngineError
from lm_engine.model import AttentionBackend, DecoderConfig, KVDtype, MixedAttention


def choose_mixed(
    choice: MixedAttention,
    attention: AttentionBackend,
    config: DecoderConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    block_size: int,
    kv_dtype: KVDtype,
    stage: str,
) -> None:
    """In front of the first step. `config`: of the decoder that `attention` serves, with this rank's heads.
    "auto": walks where they are possible. Raises EngineError where a stage that must walk cannot."""
    if choice == "tiles":
        return
    reason = _refusal(attention, config, dtype, device, block_size, kv_dtype)
    if reason is not None:
        if choice == "auto":
            return
        raise EngineError(
            f"stage.{stage}.mixed_attention = 'walks': {reason}; set 'tiles'",
            code="unsupported_mixed_attention",
        )
    from lm_engine.attention.triton import TritonAttention

    assert isinstance(attention, TritonAttention)
    attention.walk()


def _refusal(
    attention: AttentionBackend,
    config: DecoderConfig,
    dtype: torch.dtype,
    device: torch.device,
    block_size: int,
    kv_dtype: KVDtype,
) -> str | None:
    if attention.name != "triton":
        return f"the {attention.name} attention has none"
    from lm_engine.triton.launch import has_gluon

    if not has_gluon(device):
        return "they need a GPU of compute capability 9.0 and Triton 3.6 or newer"
    from lm_engine.attention.walks import why_not

    return why_not(config, dtype, block_size, kv_dtype)
