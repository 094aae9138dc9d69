"""Towers by CUDA graph: the embeddings of the same batches launched kernel by kernel."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from contracts.capture import graph_bytes, release_unused
from encoder_pool.graphs import TowerGraphs
from encoder_pool.model import EncoderInput, GraphBounds
from model_families.audio.encoder import AudioEncoder
from model_families.registry import open_family
from model_families.vision.encoder import VisionEncoder
from model_families.whisper.encoder import WhisperEncoder
from tests.tiny_models import VISION_FAMILIES
from tests.tiny_omni import OMNI_FAMILIES
from tests.tiny_whisper import WINDOW_POSITIONS, build_tiny_whisper

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE = torch.device("cuda", 0)
BOUNDS = GraphBounds(256 << 20, max_tokens=256, max_patches=1024)
DTYPES = [torch.float32, torch.bfloat16]
SIDES = [[(4, 6)], [(8, 4), (2, 2)], [(6, 6), (6, 6)], [(10, 14)], [(2, 2), (8, 4)]]  # in merge blocks


def load(folder, dtype, *, graphs: bool = True) -> VisionEncoder:
    encoder = open_family(folder).load_encoder("vision", DEVICE, dtype)
    assert isinstance(encoder, VisionEncoder)
    if graphs:
        encoder.allow_graphs(BOUNDS, ahead=True)
        assert encoder.graphs.max_rows == BOUNDS.max_patches
    return encoder


def pictures(folder, sides, seed: int = 0) -> list[EncoderInput]:
    spec = open_family(folder).media_specs.image
    generator = torch.Generator().manual_seed(seed)
    merge, found = spec.merge_size, []
    for rows, columns in sides:
        shape = (rows * merge * spec.patch_size, columns * merge * spec.patch_size, 3)
        pixels = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        found.append(EncoderInput("image", pixels, (1, rows * merge, columns * merge), rows * columns))
    return found


@contextmanager
def launching_elsewhere() -> Iterator[None]:
    """Another thread computes on a stream of its own, allocates and reads results: a language model does."""
    done, errors, begun = threading.Event(), [], threading.Event()

    def work() -> None:
        with torch.cuda.stream(torch.cuda.Stream(DEVICE)):
            x, size = torch.ones(256, 256, device=DEVICE), 1
            while not done.is_set():
                size = size % 512 + 1
                y = (x @ x)[:size].clone() / 256
                begun.set()
                if not torch.equal(y.cpu(), torch.ones(min(size, 256), 256)):
                    errors.append(size)

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait()
    try:
        yield
    finally:
        done.set()
        thread.join()
    assert not errors


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_replays_give_what_the_kernels_give(tiny, family, dtype):
    """Layouts in turns, each with other pixels every time, while another thread launches."""
    folder = tiny(family)
    plain, graphed = load(folder, dtype, graphs=False), load(folder, dtype)
    expected, found = [], []
    with launching_elsewhere():
        for seed in range(5):
            for sides in SIDES:
                batch = pictures(folder, sides, seed)
                expected += plain.encode(batch)
                found += graphed.encode(batch)
    assert len(graphed.graphs) == len(SIDES)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def audio(folder, dtype, *, graphs: bool) -> AudioEncoder | WhisperEncoder:
    encoder = open_family(folder).load_encoder("audio", DEVICE, dtype)
    assert isinstance(encoder, AudioEncoder | WhisperEncoder)
    if graphs:
        encoder.allow_graphs(BOUNDS, ahead=True)
        assert encoder.graphs.max_rows == encoder.max_rows(BOUNDS)
    return encoder


def sounds(folder, lengths, seed: int) -> list[EncoderInput]:
    spec = open_family(folder).media_specs.audio
    generator = torch.Generator().manual_seed(seed)
    mels = [torch.randn(spec.num_mels, n, generator=generator) for n in lengths]
    is_windowed = spec.tokens == "whisper"
    counts = [WINDOW_POSITIONS if is_windowed else spec.num_tokens(n) for n in lengths]
    return [EncoderInput("audio", mel, (0, 0, 0), n) for mel, n in zip(mels, counts, strict=True)]


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", [*OMNI_FAMILIES, "whisper"])
def test_sounds_replayed_are_what_the_kernels_give(tiny_omni, tmp_path, family, dtype):
    folder = build_tiny_whisper(tmp_path / "whisper") if family == "whisper" else tiny_omni(family)
    batches = (
        [(40,), (19, 40, 7), (7, 19, 40)] if family == "whisper" else [(437,), (10, 400, 99), (99, 10, 400)]
    )
    plain, graphed = audio(folder, dtype, graphs=False), audio(folder, dtype, graphs=True)
    expected, found = [], []
    with launching_elsewhere():
        for seed in range(5):
            for lengths in batches:
                expected += plain.encode(sounds(folder, lengths, seed))
                found += graphed.encode(sounds(folder, lengths, seed))
    assert len(graphed.graphs) == (2 if family == "whisper" else 3)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_results_survive_what_runs_after_them(tiny):
    folder = tiny("qwen2_5_vl")
    graphed = load(folder, torch.bfloat16)
    first, second = pictures(folder, [(4, 6)], 1), pictures(folder, [(4, 6)], 2)
    before = [graphed.encode(first)[0].clone() for _ in range(3)][-1]
    kept = graphed.encode(first)[0]
    graphed.encode(second)
    graphed.encode(pictures(folder, [(10, 14)], 3))
    assert torch.equal(kept, before)
    assert not torch.equal(graphed.encode(second)[0], before)


def test_layouts_stay_while_a_graph_reads_them(tiny):
    """Nobody else keeps them, and what they lay in is taken by others."""
    folder = tiny("qwen2_5_vl")
    plain, graphed = load(folder, torch.float32, graphs=False), load(folder, torch.float32)
    batch = pictures(folder, [(6, 10)])
    for _ in range(2):
        graphed.encode(batch)
    graphed._tower._layouts = type(graphed._tower._layouts)(graphed._tower._lay_out, kept_patches=1)
    taken = [torch.full((size,), 7, device=DEVICE, dtype=torch.int64) for size in range(1, 4000, 7)]
    torch.testing.assert_close(graphed.encode(batch)[0], plain.encode(batch)[0], atol=1e-5, rtol=1e-5)
    assert len(taken) > 500


def test_graphs_share_memory_that_dropping_gives_back(tiny):
    folder = tiny("qwen3_vl")
    gc.collect()  # other tests' towers
    release_unused()
    before = graph_bytes(DEVICE)
    graphed = load(folder, torch.bfloat16)
    largest = graph_bytes(DEVICE) - before
    assert 0 < largest <= graphed.graphs.held_bytes
    for rows in range(1, 12):
        for _ in range(2):
            graphed.encode(pictures(folder, [(rows, 9)]))
    assert len(graphed.graphs) == 11
    assert graph_bytes(DEVICE) - before <= largest + (4 << 20)
    graphed.drop_graphs()
    for _ in range(2):
        graphed.encode(pictures(folder, [(3, 3)]))
    assert len(graphed.graphs) == 1
    assert graph_bytes(DEVICE) - before <= largest + (4 << 20)


def test_what_cannot_be_captured_runs_plainly(tiny, monkeypatch):
    """It waits for the device in the middle: the capture fails, the batch does not, nor does the next one."""
    folder = tiny("qwen2_5_vl")
    plain, graphed = load(folder, torch.float32, graphs=False), load(folder, torch.float32)
    embed, asking = graphed._tower.embed, pictures(folder, [(3, 5)])
    num_asked = sum(item.num_tokens for item in asking)

    def ask(patches, layout):
        out = embed(patches, layout)
        return out + float(out.sum().cpu()) * 0 if len(out) == num_asked else out

    monkeypatch.setattr(graphed._tower, "embed", ask)
    for batch in (asking, pictures(folder, [(4, 4)])):
        for _ in range(4):
            torch.testing.assert_close(graphed.encode(batch)[0], plain.encode(batch)[0], atol=1e-5, rtol=1e-5)
    assert list(graphed.graphs._kept) == [((1, 8, 8),)]


def test_videos_are_captured_as_pictures_are(tiny):
    family = open_family(tiny("qwen2_5_vl"))
    spec = family.media_specs.video
    if spec is None:
        pytest.skip("takes no videos")
    plain, graphed = (load(tiny("qwen2_5_vl"), torch.float32, graphs=on) for on in (False, True))
    frames, side = 3, 4 * spec.patch_size
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        shape = (frames * spec.temporal_patch_size, side, side, 3)
        clip = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        item = EncoderInput("video", clip, (frames, 4, 4), frames * 4)
        torch.testing.assert_close(graphed.encode([item])[0], plain.encode([item])[0], atol=1e-5, rtol=1e-5)
    assert len(graphed.graphs) == 1


def test_a_bound_too_small_for_the_largest_leaves_smaller_ones(tiny):
    folder = tiny("qwen2_vl")
    encoder = load(folder, torch.float32, graphs=False)
    encoder.allow_graphs(replace(BOUNDS, max_tokens=4096, max_patches=16384), ahead=True)
    held = encoder.graphs.held_bytes
    encoder.graphs = TowerGraphs(encoder, int(held * 0.7), 16384)
    assert encoder.graphs.reserve()
    assert 0 < encoder.graphs.max_rows < 16384
    assert encoder.graphs.held_bytes <= int(held * 0.7)
