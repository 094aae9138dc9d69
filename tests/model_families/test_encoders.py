"""Vision towers against `transformers`, and every packing of a batch against each item alone."""

from __future__ import annotations

import json
from dataclasses import replace
from math import prod
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from contracts.errors import EngineError
from contracts.specs import ImageSpec, MediaSpecs
from encoder_pool.graphs import TowerGraphs
from encoder_pool.model import EncoderInput
from model_families.qwen2_5_vl import encoder as qwen2_5_vl
from model_families.qwen2_vl import encoder as qwen2_vl
from model_families.qwen3_vl import encoder as qwen3_vl
from model_families.qwen3_vl_moe import encoder as qwen3_vl_moe
from model_families.vision.attention import (
    GroupedAttention,
    MaskedAttention,
    TritonPackedAttention,
    VarlenAttention,
    select_attention,
)
from model_families.vision.layouts import Layouts
from model_families.vision.packing import Segments, pack_grids, window_order
from model_families.vision.patchify import Patchifier
from stages.build import REHEARSED_TOKENS, rehearse
from tests.encoder_pool.graph_fakes import HostQuestions, Reruns
from tests.tiny_models import VISION_FAMILIES, build_tiny, reference_model

CPU = torch.device("cpu")
MODULES = {
    "qwen2_vl": qwen2_vl,
    "qwen2_5_vl": qwen2_5_vl,
    "qwen3_vl": qwen3_vl,
    "qwen3_vl_moe": qwen3_vl_moe,
}
# rows and columns of merge blocks: square, wide, tall, one block, a window's multiple, cut-off windows
UNITS = ((2, 2), (2, 5), (5, 3), (1, 1), (4, 4), (3, 6), (2, 5))


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=VISION_FAMILIES)
def family(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(family, tmp_path_factory) -> Path:
    return build_tiny(family, tmp_path_factory.mktemp("models") / family, seed=3)


def spec_of(folder: Path) -> ImageSpec:
    c = json.loads((folder / "preprocessor_config.json").read_text())
    return ImageSpec(
        patch_size=c["patch_size"],
        merge_size=2,
        temporal_patch_size=2,
        min_pixels=1,
        max_pixels=1 << 20,
        image_mean=tuple(c["image_mean"]),
        image_std=tuple(c["image_std"]),
    )


def load(family: str, folder: Path, dtype: torch.dtype = torch.float32):
    return MODULES[family].load_encoder(folder, MediaSpecs(image=spec_of(folder)), CPU, dtype)


def items(spec: ImageSpec, units=UNITS) -> list[EncoderInput]:
    rng = np.random.default_rng(5)
    out = []
    for rows, columns in units:
        pixels = rng.integers(0, 256, (rows * spec.factor, columns * spec.factor, 3), dtype=np.uint8)
        grid = (1, rows * spec.merge_size, columns * spec.merge_size)
        out.append(EncoderInput("image", torch.from_numpy(pixels), grid, rows * columns))
    return out


def processed(folder: Path, inputs: list[EncoderInput]):
    """What the family's own processor makes of the already resized pixels."""
    processor = Qwen2VLImageProcessorPil.from_pretrained(folder)
    images = [Image.fromarray(i.features.numpy()) for i in inputs]
    return processor(images=images, do_resize=False, return_tensors="pt")


@torch.no_grad()
def reference_embeddings(folder: Path, inputs: list[EncoderInput]) -> list[torch.Tensor]:
    features = processed(folder, inputs)
    out = reference_model(folder).model.get_image_features(
        features["pixel_values"], features["image_grid_thw"]
    )
    levels = out.deepstack_features if "deepstack_features" in out else []
    return [torch.cat(parts, dim=1) for parts in zip(out.pooler_output, *levels, strict=True)]


def test_patches_equal_the_processors(folder):
    spec = spec_of(folder)
    inputs = items(spec)
    theirs = processed(folder, inputs)
    ours = torch.empty_like(theirs["pixel_values"])
    for rows, item in zip(ours.split([prod(i.grid_thw) for i in inputs]), inputs, strict=True):
        Patchifier(spec, CPU, torch.float32).write(rows, item.features)
    assert [tuple(g) for g in theirs["image_grid_thw"].tolist()] == [i.grid_thw for i in inputs]
    torch.testing.assert_close(ours, theirs["pixel_values"], atol=1e-5, rtol=0)


def test_embeddings_equal_transformers(family, folder):
    encoder = load(family, folder)
    inputs = items(spec_of(folder))
    ours = encoder.encode(inputs)
    theirs = reference_embeddings(folder, inputs)
    assert [o.shape for o in ours] == [(i.num_tokens, encoder.embedding_width) for i in inputs]
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_each_item_of_a_batch_equals_it_alone(family, folder):
    encoder = load(family, folder)
    inputs = items(spec_of(folder))
    for item, packed in zip(inputs, encoder.encode(inputs), strict=True):
        torch.testing.assert_close(packed, encoder.encode([item])[0], atol=1e-5, rtol=1e-5)


def test_a_kept_layout_gives_the_same_embeddings(family, folder):
    encoder, plain = load(family, folder), load(family, folder)
    plain._tower._layouts = Layouts(plain._tower._lay_out, kept_patches=1)
    lay_out, laid_out = encoder._tower._lay_out, []
    encoder._tower._layouts = Layouts(lambda *place: laid_out.append(place) or lay_out(*place))
    inputs = items(spec_of(folder))
    batches = [inputs[:1], inputs[1:3], inputs[:1], inputs, inputs[5:6], inputs[1:2], inputs[1:3], inputs]
    for batch in batches:
        expected = torch.cat(plain.encode(batch))
        assert torch.equal(torch.cat(encoder.encode(batch)), expected)
    assert len(laid_out) == 5  # of eight
    assert len(plain._tower._layouts._kept) == 0


def graphed(encoder):
    encoder.graphs = TowerGraphs(encoder, 1 << 30, 1024, Reruns)
    return encoder


def test_captured_forwards_give_the_same_embeddings(family, folder):
    """Whatever runs between a layout's batches, and although nobody else keeps the layout."""
    encoder, plain = graphed(load(family, folder)), load(family, folder)
    lay_out, laid_out = encoder._tower._lay_out, []
    encoder._tower._layouts = Layouts(
        lambda *place: laid_out.append(place) or lay_out(*place), kept_patches=1
    )
    inputs = items(spec_of(folder))
    batches = [inputs[:1], inputs[1:3], inputs[5:6], inputs, inputs[2:3]]
    for turn in range(4):
        for batch in batches:
            other = [replace(item, features=item.features.roll(turn, 1)) for item in batch]
            for found, expected in zip(encoder.encode(other), plain.encode(other), strict=True):
                assert torch.equal(found, expected)
    assert len(encoder.graphs) == len(batches)
    assert len(laid_out) == 2 * len(batches) + 1


def test_a_second_forward_of_a_layout_asks_the_host_for_nothing(family, folder, monkeypatch):
    encoder = load(family, folder)
    inputs = items(spec_of(folder))
    encoder.encode(inputs)
    grids = tuple(i.grid_thw for i in inputs)
    patches, forward = torch.zeros(encoder.input_shape(grids)), encoder.prepared(grids)
    for name in ("tensor", "from_numpy", "as_tensor"):
        monkeypatch.setattr(torch, name, None)
    with torch.inference_mode(), HostQuestions():
        forward(patches)


def test_the_largest_batch_has_as_many_patches_as_are_asked_for(family, folder):
    encoder = load(family, folder)
    for num_patches in (4, 192, 12288, 1023):
        largest = encoder.largest(num_patches)
        assert encoder.input_shape(largest)[0] == num_patches // 4 * 4
        assert encoder.num_tokens(largest) == num_patches // 4


def test_a_layout_made_in_service_serves_where_something_is_learned(folder, family):
    encoder = load(family, folder)
    inputs = items(spec_of(folder), UNITS[:2])
    encoder.encode(inputs)
    patches = torch.empty(encoder.input_shape(tuple(i.grid_thw for i in inputs)))
    encoder._write(inputs, patches)
    patches.requires_grad_()
    encoder._tower(patches, [i.grid_thw for i in inputs]).sum().backward()
    assert patches.grad is not None


def test_bfloat16_stays_near_float32(family, folder):
    inputs = items(spec_of(folder))
    exact = torch.cat(load(family, folder).encode(inputs))
    rounded = torch.cat(load(family, folder, torch.bfloat16).encode(inputs))
    assert rounded.dtype == torch.bfloat16
    error = (rounded.float() - exact).norm() / exact.norm()
    assert error < 0.05


def test_published_names_load_the_same_tower(family, folder, tmp_path):
    """Older checkpoints name the tower `visual.`, newer ones `model.visual.`."""
    for file in folder.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    stored = load_file(folder / "model.safetensors")
    assert any(name.startswith("model.visual.") or name.startswith("visual.") for name in stored)
    swap = {True: ("model.visual.", "visual."), False: ("visual.", "model.visual.")}
    old, new = swap[any(name.startswith("model.visual.") for name in stored)]
    renamed = {(new + n.removeprefix(old)) if n.startswith(old) else n: t for n, t in stored.items()}
    save_file(renamed, tmp_path / "model.safetensors")
    inputs = items(spec_of(folder), UNITS[:2])
    a, b = load(family, folder), load(family, tmp_path)
    assert a.encoder_id == b.encoder_id
    assert torch.equal(torch.cat(a.encode(inputs)), torch.cat(b.encode(inputs)))


def test_the_encoder_id_follows_weights_dtype_and_normalisation(family, folder, tmp_path):
    other = build_tiny(family, tmp_path / "other", seed=4)
    spec = spec_of(folder)
    grey = ImageSpec(
        **{f: getattr(spec, f) for f in spec.__struct_fields__} | {"image_mean": (0.1, 0.2, 0.3)}
    )
    ids = {
        load(family, folder).encoder_id,
        load(family, other).encoder_id,
        load(family, folder, torch.bfloat16).encoder_id,
        MODULES[family].load_encoder(folder, MediaSpecs(image=grey), CPU, torch.float32).encoder_id,
    }
    assert len(ids) == 4
    assert load(family, folder).encoder_id in ids


def test_a_missing_tensor_is_named(family, folder, tmp_path):
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    stored = load_file(folder / "model.safetensors")
    victim = next(n for n in sorted(stored) if "visual.blocks.1.norm1.weight" in n)
    del stored[victim]
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(EngineError, match=r"blocks\.1\.norm1\.weight"):
        load(family, tmp_path)
    stored[victim.replace("norm1", "norm7")] = stored[victim.replace("norm1", "norm2")].clone()
    save_file(stored | {victim: torch.ones(32)}, tmp_path / "model.safetensors")
    with pytest.raises(EngineError, match="norm7"):
        load(family, tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"features": torch.zeros(56, 57, 3, dtype=torch.uint8)}, "do not fit"),
        ({"features": torch.zeros(56, 56, 3)}, "uint8"),
        ({"num_tokens": 5}, "not 5 tokens"),
        ({"modality": "video"}, "not video"),
        ({"modality": "audio"}, "not audio"),
    ],
)
def test_contradicting_items_are_refused(tmp_path_factory, change, message):
    folder = build_tiny("qwen2_vl", tmp_path_factory.mktemp("m"), vision_depth=1)
    good = {
        "modality": "image",
        "features": torch.zeros(56, 56, 3, dtype=torch.uint8),
        "grid_thw": (1, 4, 4),
        "num_tokens": 4,
    }
    encoder = load("qwen2_vl", folder)
    encoder.encode([EncoderInput(**good)])
    with pytest.raises(ValueError, match=message):
        encoder.encode([EncoderInput(**good | change)])


@pytest.mark.parametrize("lengths", [[4], [4, 4, 4], [4, 12, 4, 1, 12, 12], [3, 3, 7]])
def test_grouped_attention_equals_the_masked_path(lengths):
    generator = torch.Generator().manual_seed(1)
    q, k, v = torch.randn(3, sum(lengths), 2, 8, generator=generator)
    segments = Segments(np.array(lengths), CPU)
    plain = MaskedAttention().attend(q, k, v, segments)
    torch.testing.assert_close(GroupedAttention().attend(q, k, v, segments), plain, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(plain[: lengths[0]], _alone(q, k, v, lengths[0]), atol=1e-6, rtol=1e-5)
    assert segments.starts.tolist() == [0, *np.cumsum(lengths)]


def _alone(q, k, v, length: int) -> torch.Tensor:
    q, k, v = (x[:length].transpose(0, 1) for x in (q, k, v))
    return ((q @ k.transpose(1, 2)) * q.shape[-1] ** -0.5).softmax(-1).matmul(v).transpose(0, 1)


def test_frames_of_a_video_are_segments_of_their_own():
    grid = pack_grids([(3, 2, 4), (1, 2, 2)], 2)
    assert grid.frame_lengths_F.tolist() == [8, 8, 8, 4]
    assert grid.row_N[:8].tolist() == [0, 0, 1, 1, 0, 0, 1, 1]
    assert grid.column_N[8:16].tolist() == [0, 1, 0, 1, 2, 3, 2, 3]
    order, lengths = window_order(grid, 1)
    assert order.tolist() == list(range(7))
    assert lengths.tolist() == [4] * 7


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("head_dim", [64, 72, 80])
@pytest.mark.parametrize("kernel", [VarlenAttention, TritonPackedAttention])
def test_the_gpu_kernels_equal_the_grouped_path(kernel, head_dim):
    device = torch.device("cuda")
    lengths = [64] * 5 + [16, 1024, 16, 333]
    q, k, v = torch.randn(3, sum(lengths), 4, head_dim, device=device, dtype=torch.bfloat16)
    segments = Segments(np.array(lengths), device)
    assert isinstance(select_attention(device, q.dtype, head_dim), VarlenAttention)
    fast = kernel().attend(q, k, v, segments)
    plain = GroupedAttention().attend(q.float(), k.float(), v.float(), segments)
    torch.testing.assert_close(fast.float(), plain, atol=2e-2, rtol=2e-2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_tower_on_cuda_equals_the_cpu(family, folder):
    inputs = items(spec_of(folder))
    device = torch.device("cuda")
    exact = torch.cat(load(family, folder).encode(inputs))
    encoder = MODULES[family].load_encoder(folder, MediaSpecs(image=spec_of(folder)), device, torch.float32)
    torch.testing.assert_close(torch.cat(encoder.encode(inputs)).cpu(), exact, atol=1e-3, rtol=1e-3)
    half = MODULES[family].load_encoder(folder, MediaSpecs(image=spec_of(folder)), device, torch.bfloat16)
    error = (torch.cat(half.encode(inputs)).cpu().float() - exact).norm() / exact.norm()
    assert error < 0.05


def test_window_order_visits_windows_and_their_units_row_by_row():
    grids, size = [(1, 46, 30), (2, 8, 10)], 4
    order, lengths = window_order(pack_grids(grids, 2), size)
    expected_order, expected_lengths, first = [], [], 0
    for frames, rows, columns in [(t, h // 2, w // 2) for t, h, w in grids]:
        for _ in range(frames):
            units = first + np.arange(rows * columns).reshape(rows, columns)
            first += rows * columns
            for y in range(0, rows, size):
                for x in range(0, columns, size):
                    window = units[y : y + size, x : x + size]
                    expected_order += window.reshape(-1).tolist()
                    expected_lengths.append(window.size * 4)
    assert order.tolist() == expected_order
    assert lengths.tolist() == expected_lengths


@pytest.mark.parametrize("family", MODULES)
def test_every_tower_takes_the_picture_of_its_rehearsal(family: str, tmp_path: Path) -> None:
    folder = build_tiny(family, tmp_path / family, seed=3)
    encoder = load(family, folder)
    seen: list[torch.Tensor] = []
    encode = encoder.encode
    encoder.encode = lambda inputs: seen.extend(encode(inputs)) or seen
    rehearse(encoder, spec_of(folder))
    rehearse(encoder, None)
    assert [tuple(found.shape) for found in seen] == [(REHEARSED_TOKENS**2, encoder.embedding_width)]
