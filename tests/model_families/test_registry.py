"""Opening a checkpoint folder as the right family, with every part in place."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from PIL import Image

from contracts.conversation import Conversation, MediaPart, Message, TextPart
from contracts.digests import ContentDigest
from contracts.errors import BadRequest, EngineError
from contracts.media import MediaItem, MediaSource
from contracts.params import SamplingDefaults
from encoder_pool.model import EncoderInput
from model_families.registry import FAMILIES, open_family, read_sampling_defaults
from tests.tiny_models import FAMILIES as TINY_FAMILIES
from tests.tiny_models import VISION_FAMILIES, reference_inputs, reference_model

CPU = torch.device("cpu")


def copy_with(folder, target, name: str, **changes):
    """The folder's JSON files with one of them changed; None removes a field."""
    for file in folder.iterdir():
        if file.suffix in (".json", ".jinja"):
            (target / file.name).write_bytes(file.read_bytes())
    content = json.loads((target / name).read_text()) | changes
    (target / name).write_text(json.dumps({k: v for k, v in content.items() if v is not None}))
    return target


@pytest.mark.parametrize("name", TINY_FAMILIES)
def test_a_folder_opens_as_its_family(tiny, name):
    family = open_family(tiny(name))
    assert family.name == name
    family.pipeline.validate()
    assert family.pipeline.entry == "thinker"
    assert family.context_length == 4096
    assert family.eos_token_ids == tuple(reference_model(tiny(name)).generation_config.eos_token_id)
    assert (family.media_specs.image is not None) == (name in VISION_FAMILIES)
    assert bool(family.pipeline.of_kind("encoder")) == (name in VISION_FAMILIES)
    axes = family.decoder_config.num_position_axes
    assert family.positions(family.layout([1, 2, 3], []))[0].shape == (axes, 3)
    decoder = family.load_decoder(CPU, torch.float32, "reference")
    assert decoder.config == family.decoder_config


@pytest.mark.parametrize("name", VISION_FAMILIES)
def test_a_conversation_with_images_lays_out_as_in_transformers(tiny, name):
    """Template, token counts, positions and embeddings, over two images that need no resizing."""
    folder = tiny(name)
    family = open_family(folder)
    spec = family.media_specs.image
    assert spec is not None
    rng = np.random.default_rng(1)
    sizes = [(2, 3), (3, 2)]
    images = [rng.integers(0, 256, (h * spec.factor, w * spec.factor, 3), dtype=np.uint8) for h, w in sizes]
    content = [{"type": "image"}, {"type": "text", "text": "and"}, {"type": "image"}]
    theirs = reference_inputs(
        folder, [{"role": "user", "content": content}], [Image.fromarray(i) for i in images]
    )
    items = [
        MediaItem(
            modality="image",
            bytes_digest=ContentDigest(bytes(16)),
            pixel_digest=ContentDigest(bytes([n]) * 16),
            num_tokens=h * w,
            grid_thw=(1, h * spec.merge_size, w * spec.merge_size),
            source_size=(w * spec.factor, h * spec.factor),
        )
        for n, (h, w) in enumerate(sizes)
    ]
    picture = MediaPart(MediaSource("image", "data:,"))
    conversation = Conversation(
        messages=(Message(role="user", parts=(picture, TextPart("and"), picture)),),
    )
    prompt = family.layout(family.tokenizer.encode_conversation(conversation), items)
    assert prompt.token_ids == theirs["input_ids"][0].tolist()
    positions, delta = family.positions(prompt)
    model = reference_model(folder).model
    their_positions, their_delta = model.get_rope_index(
        theirs["input_ids"], theirs["mm_token_type_ids"], theirs["image_grid_thw"]
    )
    assert positions.tolist() == their_positions[:, 0].tolist()
    assert delta == their_delta.item()
    encoder = family.load_encoder("vision", CPU, torch.float32)
    assert encoder.embedding_width == family.decoder_config.hidden_size * (
        1 + family.decoder_config.num_deepstack_levels
    )
    inputs = [
        EncoderInput("image", torch.from_numpy(i), m.grid_thw, m.num_tokens)
        for i, m in zip(images, items, strict=True)
    ]
    with torch.no_grad():
        out = model.get_image_features(theirs["pixel_values"], theirs["image_grid_thw"])
    for ours, reference in zip(encoder.encode(inputs), out.pooler_output, strict=True):
        torch.testing.assert_close(
            ours[:, : family.decoder_config.hidden_size], reference, atol=1e-4, rtol=1e-4
        )


def test_an_unknown_type_is_refused_with_the_supported_ones(tiny, tmp_path):
    folder = copy_with(tiny("llama"), tmp_path, "config.json", model_type="mamba", architectures=["Mamba"])
    with pytest.raises(BadRequest, match="mamba") as caught:
        open_family(folder)
    assert all(name in caught.value.message for name in FAMILIES)


def test_the_architecture_decides_when_the_type_is_unknown(tiny, tmp_path):
    folder = copy_with(tiny("qwen3"), tmp_path, "config.json", model_type="my_finetune")
    assert open_family(folder).name == "qwen3"


def test_a_folder_without_config_is_an_error(tmp_path):
    with pytest.raises(EngineError, match=r"config\.json"):
        open_family(tmp_path)


def test_sampling_defaults_are_the_checkpoint_s(tiny, tmp_path):
    own = {"temperature": 1e-6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.05, "min_p": None}
    folder = copy_with(tiny("qwen2"), tmp_path, "generation_config.json", **own)
    found = read_sampling_defaults(folder)
    assert found == SamplingDefaults(temperature=1e-6, top_p=0.9, top_k=20, repetition_penalty=1.05)
    for name, value in (("temperature", 3), ("top_p", "high"), ("top_k", 1.5)):
        copy_with(tiny("qwen2"), tmp_path, "generation_config.json", **{name: value})
        with pytest.raises(EngineError, match=rf"generation_config.json.*{name}"):
            read_sampling_defaults(folder)
    (folder / "generation_config.json").unlink()
    assert read_sampling_defaults(folder) == SamplingDefaults()


def test_a_text_family_has_no_encoder(tiny):
    with pytest.raises(EngineError, match="no encoder"):
        open_family(tiny("qwen2")).load_encoder("vision", CPU, torch.float32)


def test_end_tokens_fall_back_to_the_config(tiny, tmp_path):
    folder = copy_with(tiny("qwen2_vl"), tmp_path, "generation_config.json", eos_token_id=None)
    text_end = json.loads((folder / "config.json").read_text())["text_config"]["eos_token_id"]
    assert open_family(folder).eos_token_ids == (text_end,)
    (folder / "generation_config.json").unlink()
    assert open_family(folder).eos_token_ids == (text_end,)
    copy_with(tiny("llama"), tmp_path, "config.json", eos_token_id=None)
    (folder / "generation_config.json").unlink()
    with pytest.raises(EngineError, match="eos_token_id"):
        open_family(folder)
