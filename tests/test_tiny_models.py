"""The tiny checkpoints are worth testing with: they load, differ by image, and shards change nothing."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from tests.tiny_models import FAMILIES, VISION_FAMILIES, build_tiny, reference_generate, reference_logits

TEXT = [{"role": "user", "content": "hello, what is in the thing?"}]
PICTURE = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}]


def noise_image(seed: int, width: int = 112, height: int = 84) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_varies(tiny, family):
    token_ids = reference_generate(tiny(family), TEXT, [], 24)
    assert len(set(token_ids)) >= 6


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_the_image_decides_the_answer(tiny, family):
    images = [noise_image(0), noise_image(1), noise_image(0, 56, 56), Image.new("RGB", (80, 80), "red")]
    answers = [tuple(reference_generate(tiny(family), PICTURE, [image], 12)) for image in images]
    assert len(set(answers)) == len(images)


def test_the_order_of_images_matters(tiny):
    two = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "and"}, {"type": "image"}]}
    ]
    first, second = noise_image(2), noise_image(3)
    folder = tiny("qwen2_5_vl")
    forward = reference_logits(folder, two, [first, second])[-1]
    assert (forward - reference_logits(folder, two, [second, first])[-1]).abs().max() > 1e-2


def test_shards_and_seed(tiny, tmp_path):
    whole = tiny("qwen3_vl")
    sharded = build_tiny("qwen3_vl", tmp_path / "sharded", sharded=True)
    assert len(list(sharded.glob("*.safetensors"))) > 2
    assert (reference_logits(sharded, TEXT, []) == reference_logits(whole, TEXT, [])).all()
    other = build_tiny("qwen3_vl", tmp_path / "other", seed=1)
    assert (reference_logits(other, TEXT, []) != reference_logits(whole, TEXT, [])).any()
