"""Videos in the Qwen-VL families: token layout and positions against `transformers`, towers on real
frames."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import Qwen3VLProcessor

from contracts.digests import ContentDigest
from contracts.media import MediaItem
from encoder_pool.model import EncoderInput
from model_families.registry import open_family
from tests.tiny_models import VISION_FAMILIES, reference_model

torch.set_num_threads(1)
MERGE = 2
# Numbers are text tokens; (rows, columns) a picture; (frames, rows, columns, seconds a frame) a video.
CASES = {
    "video": [3, (3, 2, 2, 1.0), 4],
    "one frame": [3, (1, 2, 2, 1.0), 4],
    "wide": [1, (2, 1, 7, 0.7), 2],
    "many frames": [1, (9, 1, 2, 0.13), 2],
    "with pictures": [2, (2, 3), 1, (4, 2, 3, 2.6), 3, (2, 2), (2, 1, 1, 0.5), 1],
}


@pytest.fixture(params=VISION_FAMILIES)
def family(request) -> str:
    return request.param


def items_of(parts, opened) -> tuple[list[int], list[MediaItem]]:
    def token(text: str) -> int:
        (found,) = opened.tokenizer.encode(text, parse_special=True)
        return found

    start, end = token("<|vision_start|>"), token("<|vision_end|>")
    ids: list[int] = []
    items: list[MediaItem] = []
    for part in parts:
        if isinstance(part, int):
            ids += range(1, part + 1)
            continue
        frames, rows, columns, seconds = (1, *part, 0.0) if len(part) == 2 else part
        kind = "image" if len(part) == 2 else "video"
        ids += [start, token(f"<|{kind}_pad|>"), end]
        digest = ContentDigest(bytes([len(items)]) * 16)
        items.append(
            MediaItem(
                modality=kind,
                bytes_digest=digest,
                pixel_digest=digest,
                num_tokens=frames * rows * columns,
                grid_thw=(frames, rows * MERGE, columns * MERGE),
                seconds_per_grid=seconds,
                timestamps_s=tuple(
                    round((i + 0.25) * seconds * 1000) / 1000 for i in range(frames) if seconds
                ),
            )
        )
    return ids, items


def expected_ids(ids, items, opened, family) -> list[int]:
    pads = {opened.tokenizer.encode(f"<|{k}_pad|>", parse_special=True)[0] for k in ("image", "video")}
    queue = iter(items)
    expanded: list[int] = []
    for token in ids:
        item = next(queue) if token in pads else None
        if item is None:
            expanded.append(token)
        elif item.modality == "image" or not family.startswith("qwen3"):
            expanded += [token] * item.num_tokens
        else:
            expanded += opened.tokenizer.encode(stamped(item), parse_special=True)
    return expanded


def stamped(item: MediaItem) -> str:
    """By the reference's processor, told times through frame numbers at 1000 frames a second."""
    made = Qwen3VLProcessor.__new__(Qwen3VLProcessor)
    made.video_processor = SimpleNamespace(merge_size=MERGE, temporal_patch_size=2)
    made.video_token = "<|video_pad|>"
    made.vision_start_token, made.vision_end_token = "<|vision_start|>", "<|vision_end|>"
    numbers = [round(time * 1000) for time in item.timestamps_s for _ in range(2)]
    metadata = SimpleNamespace(fps=1000.0, frames_indices=numbers)
    given = {"video_grid_thw": torch.tensor([item.grid_thw]), "video_metadata": [metadata]}
    return made.replace_video_token(given, 0)


@pytest.mark.parametrize("name", CASES)
def test_tokens_and_positions_equal_transformers(tiny, family, name):
    opened = open_family(tiny(family))
    ids, items = items_of(CASES[name], opened)
    prompt = opened.layout(ids, items)
    assert prompt.token_ids == expected_ids(ids, items, opened, family)
    image_id, video_id = (
        opened.tokenizer.encode(f"<|{k}_pad|>", parse_special=True)[0] for k in ("image", "video")
    )
    ids_1T = torch.tensor([prompt.token_ids])
    kinds = (ids_1T == image_id).int() + 2 * (ids_1T == video_id).int()
    pictures = [i.grid_thw for i in items if i.modality == "image"]
    videos = [i for i in items if i.modality == "video"]
    options = {}
    if family == "qwen2_5_vl":
        options["second_per_grid_ts"] = torch.tensor([i.seconds_per_grid for i in videos])
    theirs, their_delta = reference_model(tiny(family)).model.get_rope_index(
        ids_1T,
        kinds,
        image_grid_thw=torch.tensor(pictures) if pictures else None,
        video_grid_thw=torch.tensor([i.grid_thw for i in videos]),
        **options,
    )
    positions, delta = opened.positions(prompt)
    assert positions.tolist() == theirs[:, 0].tolist()
    assert delta == their_delta.item()


def test_video_embeddings_equal_transformers(tiny, family):
    opened = open_family(tiny(family))
    spec = opened.media_specs.video
    rng = np.random.default_rng(6)
    inputs, patches = [], []
    for frames, rows, columns in ((3, 2, 2), (1, 1, 3), (2, 3, 2)):
        shape = (frames * spec.temporal_patch_size, rows * spec.factor, columns * spec.factor, 3)
        pixels = rng.integers(0, 256, shape, dtype=np.uint8)
        grid = (frames, rows * MERGE, columns * MERGE)
        inputs.append(EncoderInput("video", torch.from_numpy(pixels), grid, frames * rows * columns))
        patches.append(reference_patches(pixels, grid, spec))
    encoder = opened.load_encoder("vision", torch.device("cpu"), torch.float32)
    found = torch.cat(encoder.encode(inputs))
    with torch.no_grad():
        out = reference_model(tiny(family)).model.get_video_features(
            torch.cat(patches), torch.tensor([i.grid_thw for i in inputs])
        )
    width = opened.decoder_config.hidden_size
    torch.testing.assert_close(found[:, :width], torch.cat(list(out.pooler_output)), atol=1e-4, rtol=1e-4)


def reference_patches(frames: np.ndarray, grid: tuple[int, int, int], spec) -> torch.Tensor:
    """uint8 [T, H, W, 3] → normalised patches, one by one: merge blocks row by row, patches inside them."""
    mean, std = (np.array(v, dtype=np.float32) * 255 for v in (spec.image_mean, spec.image_std))
    normal = (frames.astype(np.float32) - mean) / std
    size, depth = spec.patch_size, spec.temporal_patch_size
    patches = []
    for t in range(grid[0]):
        for row in range(0, grid[1], MERGE):
            for column in range(0, grid[2], MERGE):
                for y in range(row, row + MERGE):
                    for x in range(column, column + MERGE):
                        box = normal[t * depth : (t + 1) * depth, y * size : (y + 1) * size]
                        patches.append(box[:, :, x * size : (x + 1) * size].transpose(3, 0, 1, 2).ravel())
    return torch.from_numpy(np.stack(patches))
