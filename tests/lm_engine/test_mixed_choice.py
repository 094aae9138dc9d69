"""Which stages may walk through mixed steps."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from contracts.errors import EngineError
from lm_engine.attention.choice import choose_mixed
from lm_engine.attention.reference import SequenceAttention
from lm_engine.gpu_target import GpuTarget, assuming
from tests.lm_engine.random_decoder import tiny_config

META = torch.device("meta")
HOPPER, ADA = GpuTarget((9, 0), 232448), GpuTarget((8, 9), 101376)
FITS = tiny_config(head_dim=128)
STEP = {
    "dtype": torch.bfloat16,
    "device": META,
    "block_size": 16,
    "kv_dtype": "auto",
    "stage": "thinker",
}


def test_tiles_are_what_every_attention_has():
    choose_mixed("tiles", SequenceAttention(), tiny_config(), **STEP)


def test_attention_without_walks_refuses():
    choose_mixed("auto", SequenceAttention(), FITS, **STEP)
    refusal = r"stage\.thinker\.mixed_attention = 'walks': the reference attention has none; set 'tiles'"
    with pytest.raises(EngineError, match=refusal) as refused:
        choose_mixed("walks", SequenceAttention(), FITS, **STEP)
    assert refused.value.code == "unsupported_mixed_attention"


@pytest.mark.parametrize(
    ("target", "config", "changes", "reason"),
    [
        (ADA, {}, {}, "compute capability 9.0"),
        (HOPPER, {}, {"dtype": torch.float32}, "16-bit values, not torch.float32"),
        (HOPPER, {}, {"kv_dtype": "fp8"}, "kv_dtype = 'fp8'"),
        (HOPPER, {"head_dim": 80}, {}, "heads of 64 or 128, not 80"),
        (HOPPER, {"num_heads": 65, "num_kv_heads": 1}, {}, "at most 64 query heads"),
        (HOPPER, {"windows": (None, 64)}, {}, "sliding window"),
        (HOPPER, {}, {"block_size": 4}, "not 4"),
        (HOPPER, {}, {"block_size": 128}, "not 128"),
        (HOPPER, {}, {}, None),
    ],
)
def test_walks_are_refused_with_a_reason_or_chosen(target, config, changes, reason):
    pytest.importorskip("triton", reason="the package triton is not installed")
    from lm_engine.attention.triton import TritonAttention

    with assuming(target):
        attention = TritonAttention(META)
        chosen = dataclasses.replace(FITS, **config)
        if reason is None:
            choose_mixed("walks", attention, chosen, **STEP)
            assert attention.walks
            choose_mixed("auto", unless_told := TritonAttention(META), chosen, **STEP)
            assert unless_told.walks
        else:
            choose_mixed("auto", attention, chosen, **{**STEP, **changes})
            with pytest.raises(EngineError, match=reason):
                choose_mixed("walks", attention, chosen, **{**STEP, **changes})
            assert not attention.walks
