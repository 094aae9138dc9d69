"""M-RoPE positions against transformers' get_rope_index."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLModel,
    Qwen2VLConfig,
    Qwen2VLModel,
    Qwen3VLConfig,
    Qwen3VLModel,
)

from contracts.media import Prompt
from model_families.processing import TextProcessor
from model_families.vision.positions import GridSpan, mrope_positions

MODELS = {
    "qwen2_vl": (Qwen2VLConfig, Qwen2VLModel),
    "qwen2_5_vl": (Qwen2_5_VLConfig, Qwen2_5_VLModel),
    "qwen3_vl": (Qwen3VLConfig, Qwen3VLModel),
}
IMAGE, VIDEO = 1, 2
MERGE = 2


@pytest.fixture(scope="module", params=MODELS)
def reference(request):
    """A model without memory: get_rope_index reads the configuration alone."""
    config_class, model_class = MODELS[request.param]
    with torch.device("meta"):
        text = {"num_hidden_layers": 1, "vocab_size": 16, "hidden_size": 32, "intermediate_size": 8}
        text |= {"num_attention_heads": 4, "num_key_value_heads": 4}
        text |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
        model = model_class(config_class(text_config=text, vision_config={"depth": 1}))
    model.family = request.param
    return model


# Numbers are text tokens, tuples are pictures (frames, rows, columns in merged tokens).
IMAGE_CASES = {
    "text only": [7],
    "one image": [3, (1, 2, 3), 4],
    "three sizes": [5, (1, 2, 2), 2, (1, 4, 1), 1, (1, 3, 6), 9],
    "image first": [(1, 3, 2), 5],
    "image last": [5, (1, 2, 7)],
    "image alone": [(1, 4, 4)],
    "one marker between": [2, (1, 2, 2), 1, (1, 2, 2), 1, (1, 5, 1)],
    "one token": [(1, 1, 1), 1, (1, 1, 1)],
}


def spread(parts) -> tuple[list[int], list[tuple[int, tuple[int, int, int]]]]:
    """Token types, and (offset, grid) of every picture."""
    types: list[int] = []
    pictures = []
    for part in parts:
        if isinstance(part, int):
            types += [0] * part
        else:
            pictures.append((len(types), part))
            types += [IMAGE if part[0] == 1 else VIDEO] * (part[0] * part[1] * part[2])
    return types, pictures


def patches(grids) -> torch.Tensor | None:
    return torch.tensor([(t, h * MERGE, w * MERGE) for t, h, w in grids]) if grids else None


def rope_index(model, types, images, videos=(), **options):
    ids = torch.zeros(1, len(types), dtype=torch.long)
    kinds = torch.tensor([types], dtype=torch.int)
    return model.get_rope_index(
        ids, kinds, image_grid_thw=patches(images), video_grid_thw=patches(videos), **options
    )


@pytest.mark.parametrize("parts", IMAGE_CASES.values(), ids=IMAGE_CASES.keys())
def test_images_equal_transformers(reference, parts):
    types, pictures = spread(parts)
    theirs, their_delta = rope_index(reference, types, [grid for _, grid in pictures])
    ours, delta = mrope_positions(len(types), [GridSpan(o, g) for o, g in pictures])
    assert ours.tolist() == theirs[:, 0].tolist()
    assert delta == their_delta.item()


def test_videos_equal_transformers(reference):
    grids = [(3, 2, 4), (4, 3, 1)]
    if reference.family == "qwen3_vl":  # a timestamp in text before each frame
        parts = [2, *[x for t, h, w in grids for x in [*[(1, h, w), 3] * t, 1]]]
        types, pictures = spread(parts)
        types = [VIDEO if kind == IMAGE else kind for kind in types]
        theirs, their_delta = rope_index(reference, types, [], grids)
        spans = [GridSpan(o, g) for o, g in pictures]
    else:
        seconds = torch.tensor([0.7, 1.3]) if reference.family == "qwen2_5_vl" else None
        types, pictures = spread([2, grids[0], 3, (1, 2, 2), 1, grids[1], 1])
        options = {} if seconds is None else {"second_per_grid_ts": seconds}
        theirs, their_delta = rope_index(reference, types, [(1, 2, 2)], grids, **options)
        per_second = 0 if seconds is None else reference.config.vision_config.tokens_per_second
        intervals = [1.0, 1.0, 1.0] if seconds is None else [per_second * 0.7, 1.0, per_second * 1.3]
        spans = [GridSpan(o, g, i) for (o, g), i in zip(pictures, intervals, strict=True)]
    ours, delta = mrope_positions(len(types), spans)
    assert ours.tolist() == theirs[:, 0].tolist()
    assert delta == their_delta.item()


def test_generated_tokens_go_on_after_the_highest_position():
    positions, delta = mrope_positions(9, [GridSpan(1, (1, 2, 3))])
    assert positions[0].tolist() == [0, *[1] * 6, 4, 5]
    assert positions.max() == 5
    assert 9 + delta == 6


def test_an_empty_prompt_has_no_positions():
    positions, delta = mrope_positions(0, [])
    assert (positions.shape, delta) == ((3, 0), 0)


def test_text_families_count_up():
    positions, delta = TextProcessor().positions(Prompt([5, 6, 7]))
    assert positions.tolist() == [[0, 1, 2]]
    assert delta == 0
