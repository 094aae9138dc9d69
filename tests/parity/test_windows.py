"""Served with layers that see a sliding window: chunks, cached prefixes and preemption change nothing of what
`transformers` answers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from model_families.registry import open_family
from tests.parity.preempting import Tight
from tests.parity.test_matrix import CUT, TEXT, WIDE, assert_same, oracle
from tests.served import Served, hf_messages, meeting
from tests.tiny_models import reference_inputs

NEW_TOKENS = 24
WINDOW = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}  # of three layers
TURNS = TEXT["4 turns"]


@pytest.mark.parametrize("settings", [WIDE, CUT], ids=["one chunk", "cut"])
@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_answers_are_those_of_transformers(
    tiny: Callable[..., Path], family: str, kernels: str, settings: tuple[str, ...]
) -> None:
    folder = tiny(family, **WINDOW)
    reference = oracle(folder, TURNS, NEW_TOKENS)
    assert reference[0] != oracle(tiny(family), TURNS, NEW_TOKENS)[0]  # the window is felt
    with Served(folder, *settings, f"thinker.kernels={kernels}") as served:
        cold, warm = (served.ask(TURNS, max_tokens=NEW_TOKENS, logprobs=5) for _ in range(2))
        assert_same(cold, reference)
        assert_same(warm, reference)
        assert (cold.num_cached_tokens, bool(warm.num_cached_tokens)) == (0, True)
        with meeting(4):
            answers = served.ask_all([TURNS, TEXT["text"]] * 2, max_tokens=NEW_TOKENS, logprobs=5)
        for answer, turns in zip(answers, [TURNS, TEXT["text"]] * 2, strict=True):
            assert_same(answer, oracle(folder, turns, NEW_TOKENS))
        served.assert_clean()


def test_preempted_midway(tiny: Callable[..., Path]) -> None:
    folder = tiny("qwen3", **WINDOW)
    length = reference_inputs(folder, *hf_messages(TURNS))["input_ids"].shape[1]
    tight = Tight(length, NEW_TOKENS)
    settings = tight.settings(open_family(folder).decoder_config.kv_bytes_per_token(torch.float32))
    with Served(folder, *settings) as served:
        answer = tight.answer(served, TURNS, length, logprobs=5)
        assert_same(answer, oracle(folder, TURNS, tight.new_tokens, ignore_eos=True))
        served.assert_clean()
