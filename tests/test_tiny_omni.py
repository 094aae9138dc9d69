"""The tiny omni checkpoints answer in varied text and varied codes, and make sound that is not clipped
flat."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.tiny_models import reference_tokenizer
from tests.tiny_omni import CODEC_EOS, CODEC_PAD, OMNI_FAMILIES, VOICES, reference_omni, reference_thinker

TEXT = [{"role": "user", "content": "hello, what is in the thing?"}]


@torch.no_grad()
def speak(folder: Path, family: str) -> tuple[list[int], torch.Tensor]:
    tokenizer = reference_tokenizer(folder)
    ids = tokenizer.apply_chat_template(TEXT, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    options = {"talker_do_sample": False, "thinker_do_sample": False, "talker_max_new_tokens": 12}
    options["talker_repetition_penalty"] = 1.0
    if family == "qwen2_5_omni":
        options["talker_eos_token_id"] = [CODEC_PAD, CODEC_EOS]
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    torch.manual_seed(0)
    sequence, sound = reference_omni(folder).generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        speaker=VOICES[0],
        thinker_max_new_tokens=24,
        thinker_eos_token_id=end,
        **options,
    )
    return sequence[0, ids.shape[1] :].tolist(), sound.reshape(-1)


@pytest.mark.parametrize("family", OMNI_FAMILIES)
def test_it_speaks(tiny_omni: Callable[..., Path], family: str) -> None:
    torch.set_num_threads(1)
    text, sound = speak(tiny_omni(family), family)
    assert len(set(text)) >= 6
    assert len(sound) > 100
    assert sound.std() > 0.01
    assert (sound.abs() < 0.99).float().mean() > 0.95


@pytest.mark.parametrize("family", OMNI_FAMILIES)
def test_the_thinker_alone_is_the_same_thinker(tiny_omni: Callable[..., Path], family: str) -> None:
    whole, alone = (reference_thinker(tiny_omni(family, thinker_only=only)) for only in (False, True))
    ids = torch.arange(5, 30)[None]
    with torch.no_grad():
        assert torch.equal(whole(input_ids=ids).logits, alone(input_ids=ids).logits)
