"""Audio towers against `transformers`, and every packing of a batch against each sound alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from contracts.specs import AudioSpec, MediaSpecs
from encoder_pool.graphs import TowerGraphs
from encoder_pool.model import EncoderInput, GraphBounds
from model_families.audio.encoder import GRAPHED_FRAMES
from model_families.qwen2_5_omni import audio_encoder as qwen2_5_omni
from model_families.qwen3_omni_moe import audio_encoder as qwen3_omni_moe
from tests.encoder_pool.graph_fakes import HostQuestions, Reruns
from tests.tiny_omni import MEL_BINS, OMNI_FAMILIES, reference_thinker

torch.set_num_threads(1)
CPU = torch.device("cpu")
MODULES = {"qwen2_5_omni": qwen2_5_omni, "qwen3_omni_moe": qwen3_omni_moe}
# Around every edge: one frame more and less than a chunk, a window, several windows, and very short ones.
LENGTHS = (100, 99, 101, 200, 199, 201, 400, 437, 10, 11, 12, 13, 1000, 50)


@pytest.fixture(params=OMNI_FAMILIES)
def family(request) -> str:
    return request.param


def spec_of(family: str) -> AudioSpec:
    return AudioSpec(tokens="qwen2_5_omni" if family == "qwen2_5_omni" else "qwen3_omni", num_mels=MEL_BINS)


def load(family, folder, dtype=torch.float32, spec=None):
    return MODULES[family].load_audio(folder, MediaSpecs(audio=spec or spec_of(family)), CPU, dtype)


def sounds(family, lengths=LENGTHS):
    generator = torch.Generator().manual_seed(4)
    spec = spec_of(family)
    mels = [torch.randn(MEL_BINS, n, generator=generator) for n in lengths]
    return [EncoderInput("audio", mel, (0, 0, 0), spec.num_tokens(mel.shape[1])) for mel in mels]


@torch.no_grad()
def reference(folder, item: EncoderInput) -> torch.Tensor:
    mel = item.features
    mask = torch.ones(1, mel.shape[1], dtype=torch.long)
    return reference_thinker(folder).get_audio_features(mel[None], mask).last_hidden_state


def test_every_sound_of_a_batch_equals_transformers(family, tiny_omni):
    folder = tiny_omni(family)
    items = sounds(family)
    encoder = load(family, folder)
    found = encoder.encode(items)
    assert [rows.shape for rows in found] == [(i.num_tokens, encoder.embedding_width) for i in items]
    for rows, item in zip(found, items, strict=True):
        expected = reference(folder, item)
        assert expected.std() > 0.1
        torch.testing.assert_close(rows, expected, atol=1e-4, rtol=0)


def test_a_thinker_alone_has_the_same_ears(family, tiny_omni):
    items = sounds(family, (130, 40))
    whole, alone = (load(family, tiny_omni(family, thinker_only=only)) for only in (False, True))
    assert whole.encoder_id == alone.encoder_id
    for ours, theirs in zip(whole.encode(items), alone.encode(items), strict=True):
        assert torch.equal(ours, theirs)


def test_half_precision_stays_near_float32(family, tiny_omni):
    items = sounds(family, (250, 90))
    exact = torch.cat(load(family, tiny_omni(family)).encode(items))
    half = torch.cat(load(family, tiny_omni(family), torch.bfloat16).encode(items))
    assert half.dtype == torch.bfloat16
    assert (half.float() - exact).norm() / exact.norm() < 0.05


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"features": torch.zeros(MEL_BINS, 101)}, "give not"),
        ({"features": torch.zeros(MEL_BINS + 1, 100)}, "give not"),
        ({"features": torch.zeros(MEL_BINS, 100, dtype=torch.float64)}, "float32"),
        ({"modality": "image"}, "not image"),
    ],
)
def test_contradicting_items_are_refused(family, tiny_omni, change, message):
    (item,) = sounds(family, (96,))
    fields = {"modality": "audio", "features": item.features, "num_tokens": item.num_tokens + 9}
    with pytest.raises(ValueError, match=message):
        load(family, tiny_omni(family)).encode([EncoderInput(**{**fields, **change}, grid_thw=(0, 0, 0))])


def test_captured_forwards_give_the_same_embeddings(family, tiny_omni):
    encoder, plain = (load(family, tiny_omni(family)) for _ in range(2))
    recorder = Reruns()
    encoder.graphs = TowerGraphs(encoder, 1 << 30, 5000, lambda: recorder)
    batches = [sounds(family, lengths) for lengths in ((437,), (10, 400, 99), (99, 400, 10), LENGTHS, (12,))]
    for turn in range(4):
        for batch in batches:
            other = [replace(item, features=item.features.roll(turn, 1)) for item in batch]
            for found, expected in zip(encoder.encode(other), plain.encode(other), strict=True):
                assert torch.equal(found, expected)
    assert (recorder.recorded, recorder.runs) == (1 + 5, 2 * 5)


def test_a_second_forward_of_the_same_lengths_asks_the_host_for_nothing(family, tiny_omni, monkeypatch):
    encoder = load(family, tiny_omni(family))
    encoder.encode(sounds(family))
    mel, forward = torch.zeros(encoder.input_shape(LENGTHS)), encoder.prepared(LENGTHS)
    for name in ("tensor", "from_numpy", "as_tensor"):
        monkeypatch.setattr(torch, name, None)
    with torch.inference_mode(), HostQuestions():
        forward(mel)


def test_the_largest_batch_is_one_sound_of_whole_chunks(family, tiny_omni):
    encoder = load(family, tiny_omni(family))
    chunk = encoder._tower.chunk
    for tokens in (1, 1000, 100_000):
        rows = encoder.max_rows(GraphBounds(1 << 30, max_tokens=tokens, max_patches=1))
        assert rows % chunk == 0
        assert encoder.input_shape(encoder.largest(rows)) == (rows, MEL_BINS)
        assert chunk <= rows <= GRAPHED_FRAMES
        assert encoder.num_tokens(encoder.largest(rows)) <= max(tokens, encoder.num_tokens((chunk,)))
