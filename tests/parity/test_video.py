"""Videos in the Qwen-VL families against `transformers` generate: the same tokens and log-probabilities."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import GenerationConfig

from contracts.media import MediaSource
from model_families.registry import open_family
from tests.model_families.test_video_prompts import expected_ids, reference_patches
from tests.omni_oracle import OmniTurn, Seen, resolved, served_turns
from tests.parity.test_matrix import assert_same
from tests.preprocess.films import film
from tests.served import Served, data_url, picture
from tests.tiny_models import VISION_FAMILIES, reference_inputs, reference_model, reference_tokenizer

torch.set_num_threads(1)
NEW_TOKENS = 10
WIDE = ("thinker.kv_memory=8MiB", "thinker.long_prefill_cap=2048")
CUT = ("thinker.kv_memory=8MiB", "thinker.long_prefill_cap=7", "thinker.max_step_visual_tokens=5")


def clip(seed: int, num_frames: int, sampled: float | None = None) -> Seen:
    """Four frames a second."""
    frames = [np.asarray(picture(seed + i, 96, 80)) for i in range(num_frames)]
    return Seen(film(frames, fps=4, codec="mpeg4"), fps=sampled)


FIRST, SECOND = clip(10, 12), clip(40, 16, 1.5)
TURNS: dict[str, Sequence[OmniTurn]] = {
    "video": [("user", [FIRST, "what happens?"])],
    "videos and a picture": [
        ("user", ["see", SECOND, "and", picture(1), "then"]),
        ("assistant", ["yes"]),
        ("user", [FIRST, "so?"]),
    ],
}


def inputs_of(folder: Path, family: str, served: Served, turns: Sequence[OmniTurn]) -> dict[str, Any]:
    parts = [p for _, content in turns for p in content if not isinstance(p, str)]
    opened = open_family(folder)
    specs = opened.media_specs
    items, videos = [], []
    for source in (p for _, content in served_turns(turns) for p in content if not isinstance(p, str)):
        made, arrays = resolved(served, as_source(source), specs)
        items += made
        videos += [(made[0], arrays[0])] if made[0].modality == "video" else []
    ids = reference_tokenizer(folder).apply_chat_template(
        messages(turns), add_generation_prompt=True, return_dict=False
    )
    ids_1T = torch.tensor([expected_ids(ids, items, opened, family)])
    pads = [reference_tokenizer(folder).convert_tokens_to_ids(f"<|{k}_pad|>") for k in ("image", "video")]
    found = {
        "input_ids": ids_1T,
        "mm_token_type_ids": (ids_1T == pads[0]).int() + 2 * (ids_1T == pads[1]).int(),
        "pixel_values_videos": torch.cat([reference_patches(f, i.grid_thw, specs.video) for i, f in videos]),
        "video_grid_thw": torch.tensor([i.grid_thw for i, _ in videos]),
    }
    if family == "qwen2_5_vl":
        found["second_per_grid_ts"] = torch.tensor([i.seconds_per_grid for i, _ in videos])
    images = [p for p in parts if isinstance(p, Image.Image)]
    if images:
        alone = [{"role": "user", "content": [{"type": "image"}] * len(images)}]
        pictures = reference_inputs(folder, alone, images)
        found |= {name: pictures[name] for name in ("pixel_values", "image_grid_thw")}
    return found


def as_source(part: Any) -> Any:

    return MediaSource("image", data_url(part)) if isinstance(part, Image.Image) else part


def messages(turns: Sequence[OmniTurn]) -> list[dict[str, Any]]:
    def content(part: Any) -> dict[str, str]:
        if isinstance(part, str):
            return {"type": "text", "text": part}
        return {"type": "video" if isinstance(part, Seen) else "image"}

    return [{"role": role, "content": [content(p) for p in parts]} for role, parts in turns]


@torch.no_grad()
def oracle(folder: Path, inputs: dict[str, Any]) -> tuple[list[int], torch.Tensor]:
    model = reference_model(folder)
    out = model.generate(
        **inputs,
        attention_mask=torch.ones_like(inputs["input_ids"]),
        generation_config=GenerationConfig(
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=model.generation_config.eos_token_id,
            pad_token_id=model.generation_config.pad_token_id,
            return_dict_in_generate=True,
            output_logits=True,
        ),
    )
    tokens = out.sequences[0, inputs["input_ids"].shape[1] :].tolist()
    return tokens, torch.log_softmax(torch.cat(out.logits).float(), -1)


@pytest.mark.parametrize("settings", [WIDE, CUT], ids=["one chunk", "cut"])
@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_cold_and_warm(tiny: Callable[[str], Path], family: str, settings: tuple[str, ...]) -> None:
    folder = tiny(family)
    with Served(folder, *settings) as served:
        for turns in TURNS.values():
            inputs = inputs_of(folder, family, served, turns)
            expected = oracle(folder, inputs)
            served.reset_cache()
            cold = served.ask(served_turns(turns), max_tokens=NEW_TOKENS, logprobs=3)
            assert cold.prompt_token_ids == inputs["input_ids"][0].tolist()
            assert_same(cold, expected)
            warm = served.ask(served_turns(turns), max_tokens=NEW_TOKENS, logprobs=3)
            assert_same(warm, expected)
            assert warm.num_cached_tokens >= (len(warm.prompt_token_ids) - 1) // 16 * 16
        served.assert_clean()
