"""Served with keys and values in e4m3: what is cached, preempted or computed in pieces changes nothing of an
answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from contracts.errors import EngineError
from stages.launch import serve_service
from stages.options import ServeOptions
from tests.served import Served, meeting
from tests.tiny_models import reference_model

NEW_TOKENS, BLOCK = 40, 4
ASKED = [[("user", [f"{word} there, the answer is"])] for word in ("hello", "who is", "out")]
FP8 = ("thinker.kv_dtype=fp8", "thinker.kernels=reference", f"thinker.block_size={BLOCK}")


def test_the_schedule_changes_nothing(tiny: Callable[[str], Path]) -> None:
    folder = tiny("llama")
    with Served(folder, *FP8, "thinker.kv_memory=8MiB") as served:
        alone = [served.ask(turns, max_tokens=NEW_TOKENS, ignore_eos=True) for turns in ASKED]
        again = [served.ask(turns, max_tokens=NEW_TOKENS, ignore_eos=True) for turns in ASKED]
        assert all(answer.num_cached_tokens for answer in again)
        served.assert_clean()
    config = reference_model(folder).config
    block_bytes = 2 * config.num_hidden_layers * config.num_key_value_heads * (16 + 1) * BLOCK
    longest = max(len(answer.prompt_token_ids) for answer in alone)
    num_blocks = 1 + -(-(2 * longest + NEW_TOKENS) // BLOCK)
    small = (f"thinker.kv_memory={num_blocks * block_bytes}", f"thinker.max_context={longest + NEW_TOKENS}")
    with Served(folder, *FP8, *small, "thinker.long_prefill_cap=7", "thinker.prefix_cache=false") as served:
        with meeting(len(ASKED)):
            crowded = served.ask_all(ASKED, max_tokens=NEW_TOKENS, ignore_eos=True)
        assert served.stats("thinker")["num_preemptions_total"] > 0
        served.assert_clean()
    assert [a.tokens for a in alone] == [a.tokens for a in again] == [a.tokens for a in crowded]


def test_a_stage_that_cannot_read_it_refuses_to_start(tiny: Callable[[str], Path]) -> None:
    settings = ("thinker.kv_dtype=fp8", "thinker.kernels=native", "thinker.kv_memory=8MiB")

    async def start() -> None:
        async with serve_service(ServeOptions(model=tiny("llama"), dtype="float32", overrides=settings)):
            pass

    with pytest.raises(EngineError, match=r"stage\.thinker\.kv_dtype = 'fp8': the native attention"):
        asyncio.run(start())
