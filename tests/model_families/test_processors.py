"""Prompt layout, image specs and their agreement with transformers' processors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from contracts.digests import ContentDigest
from contracts.errors import BadRequest, EngineError
from contracts.media import MediaItem, Modality
from contracts.specs import MediaSpecs
from model_families.processing import TextProcessor
from model_families.qwen2_vl.encoder import Qwen2VLVisionConfig
from model_families.qwen3_vl.encoder import Qwen3VLVisionConfig
from model_families.vision.config import MediaTokens, VisionConfig
from model_families.vision.image_spec import read_image_spec
from model_families.vision.processor import VisionProcessor

PAD, VIDEO = 90, 91


def item(n: int, grid: tuple[int, int, int], modality: Modality = "image") -> MediaItem:
    digest = ContentDigest(bytes([n]) * 16)
    return MediaItem(
        modality=modality,
        bytes_digest=digest,
        pixel_digest=digest,
        num_tokens=grid[0] * grid[1] * grid[2] // 4,
        grid_thw=grid,
        source_size=(1, 1),
    )


@pytest.fixture
def processor(tmp_path) -> VisionProcessor:
    spec = read_image_spec(tmp_path, Qwen2VLVisionConfig())
    tokens = MediaTokens(image_token_id=PAD, video_token_id=VIDEO)
    return VisionProcessor(MediaSpecs(image=spec), tokens)


def test_each_placeholder_grows_to_its_items_tokens(processor):
    items = [item(1, (1, 2, 4)), item(2, (1, 4, 4)), item(3, (1, 2, 2))]
    prompt = processor.layout([PAD, 5, 6, PAD, PAD, 7], items)
    assert prompt.token_ids == [PAD, PAD, 5, 6, PAD, PAD, PAD, PAD, PAD, 7]
    assert [(s.offset, s.length, s.item_index) for s in prompt.spans] == [(0, 2, 0), (4, 4, 1), (8, 1, 2)]
    assert [s.digest for s in prompt.spans] == [i.pixel_digest for i in items]
    assert prompt.items == tuple(items)
    assert all(isinstance(t, int) for t in prompt.token_ids)


def test_adjacent_images_take_positions_one_after_the_other(processor):
    prompt = processor.layout([PAD, PAD], [item(1, (1, 4, 4)), item(2, (1, 2, 6))])
    positions, delta = processor.positions(prompt)
    assert positions.tolist() == [[0] * 4 + [2] * 3, [0, 0, 1, 1, 2, 2, 2], [0, 1, 0, 1, 2, 3, 4]]
    assert delta == 5 - 7


def test_text_alone_is_left_as_it_is(processor):
    prompt = processor.layout([1, 2, 3], [])
    assert (prompt.token_ids, prompt.spans) == ([1, 2, 3], ())
    assert processor.positions(prompt)[0].tolist() == [[0, 1, 2]] * 3
    assert processor.layout([], []).token_ids == []


@pytest.mark.parametrize("num_items", [0, 1, 3])
def test_placeholders_and_items_must_match(processor, num_items):
    with pytest.raises(BadRequest, match=f"2 media placeholders but {num_items} items"):
        processor.layout([PAD, 4, PAD], [item(1, (1, 2, 2))] * num_items)


def test_other_media_is_refused(processor):
    with pytest.raises(BadRequest, match="placeholder 0 of the prompt is for image, its item is audio"):
        processor.layout([PAD], [item(1, (1, 2, 2), "audio")])
    with pytest.raises(BadRequest, match="placeholder 1 of the prompt is for video, its item is image"):
        processor.layout([PAD, VIDEO], [item(1, (1, 2, 2)), item(1, (2, 2, 2))])
    with pytest.raises(BadRequest, match="text only"):
        TextProcessor().layout([1], [item(1, (1, 2, 2))])


CONFIGS = {
    "nothing": {},
    "old bounds": {"min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14},
    "bounds in size": {"size": {"min_pixels": 3137, "max_pixels": 12845056}},
    "edges": {"size": {"shortest_edge": 65536, "longest_edge": 16777216}},
    "both": {"size": {"shortest_edge": 1, "longest_edge": 2}, "min_pixels": 3000, "max_pixels": 4000},
    "one": {"min_pixels": 3000},
    "normalisation": {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.25, 0.5, 0.75], "resample": 2},
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_image_specs_equal_the_processors(tmp_path, config):
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(config))
    ours = read_image_spec(tmp_path, Qwen2VLVisionConfig())
    theirs = Qwen2VLImageProcessorPil(**{k: v for k, v in config.items() if k != "size"}, size=_edges(config))
    assert ours.min_pixels == theirs.size["shortest_edge"]
    assert ours.max_pixels == theirs.size["longest_edge"]
    assert (ours.patch_size, ours.merge_size, ours.temporal_patch_size) == (14, 2, 2)
    assert list(ours.image_mean) == list(theirs.image_mean)
    assert list(ours.image_std) == list(theirs.image_std)
    assert ours.resample == {2: "bilinear", 3: "bicubic"}[int(theirs.resample)]


def _edges(config) -> dict[str, int] | None:
    """transformers 5 knows only the new names inside `size`."""
    size = config.get("size")
    if size is None or "shortest_edge" in size:
        return size
    return {"shortest_edge": size["min_pixels"], "longest_edge": size["max_pixels"]}


def test_newer_checkpoints_nest_the_image_processor(tmp_path):
    nested = {"image_processor": {"size": {"shortest_edge": 64, "longest_edge": 128}}, "video_processor": {}}
    (tmp_path / "processor_config.json").write_text(json.dumps(nested))
    assert read_image_spec(tmp_path, Qwen2VLVisionConfig()).max_pixels == 128


def test_sizes_come_from_the_tower_when_the_file_is_silent(tmp_path):
    assert read_image_spec(tmp_path, Qwen3VLVisionConfig()).patch_size == 16


@pytest.mark.parametrize(
    "config",
    [
        {"patch_size": 14},
        {"do_normalize": False},
        {"rescale_factor": 1.0},
        {"resample": 0},
        {"size": "large"},
    ],
)
def test_contradictions_are_refused(tmp_path: Path, config):
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(config))
    vision: VisionConfig = Qwen3VLVisionConfig()
    with pytest.raises(EngineError, match=r"preprocessor_config\.json"):
        read_image_spec(tmp_path, vision)
