"""Streaming is exact: any schedule, beside any rows, gives the PCM of the decode in one piece."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from tests.vocoder.random_code2wav import CODEBOOK, random_code2wav, record, tiny_config
from vocoder.code2wav import Code2Wav
from vocoder.graphs import ROW_SIZES
from vocoder.model import VocoderRow
from vocoder.pool import VocoderPool, VocoderPoolConfig

TOLERANCE = 1e-5
CONFIGS = {
    "as published": tiny_config(),
    "grouped heads": tiny_config(kv_heads=1),
    "void longer than a frame": tiny_config(upsample_rates=(2, 3, 2), upsampling_ratios=()),
    "no block": tiny_config(upsample_rates=(), upsampling_ratios=(2,)),
}


@pytest.fixture(params=[*CONFIGS, *(f"{name}, recorded" for name in CONFIGS)])
def vocoder(request) -> Code2Wav:
    torch.set_num_threads(1)
    name, _, recorded = request.param.partition(", ")
    return random_code2wav(CONFIGS[name], record=record if recorded else None)


def random_codes(vocoder: Code2Wav, length: int, rng: random.Random) -> Tensor:
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    return torch.randint(0, CODEBOOK, (length, vocoder.num_code_groups), generator=generator)


def expected_samples(vocoder: Code2Wav, num_frames: int) -> int:
    return max(0, num_frames * vocoder.samples_per_frame - vocoder.withheld)


def test_fifty_random_schedules_batched_give_the_pcm_of_one_piece(vocoder):
    """Streams enter, advance by chunks of their own, and leave, beside each other; no length is left out."""
    rng = random.Random(11)
    whole = [random_codes(vocoder, rng.randrange(1, 14), rng) for _ in range(50)]
    states, left, pcm = {}, dict(enumerate(whole)), {index: [] for index in range(50)}
    while left:
        chosen = rng.sample(sorted(left), min(len(left), rng.randrange(1, 9)))
        rows = []
        for index in chosen:
            size = min(rng.randrange(0, 5), left[index].shape[0])
            chunk, left[index] = left[index][:size], left[index][size:]
            state = states.setdefault(index, vocoder.open())
            rows.append(VocoderRow(state, chunk, last=not left[index].shape[0]))
        for index, row, samples in zip(chosen, rows, vocoder.decode(rows), strict=True):
            pcm[index].append(samples)
            if row.last:
                del left[index]
    for index, codes in enumerate(whole):
        streamed, one_piece = torch.cat(pcm[index]), vocoder.decode_whole(codes)
        assert streamed.shape == one_piece.shape == (expected_samples(vocoder, codes.shape[0]),)
        assert one_piece.numel() == 0 or one_piece.abs().max() < 0.99
        assert torch.allclose(streamed, one_piece, rtol=0, atol=TOLERANCE), index


def test_all_that_graphs_take_has_been_decoded_before_the_first_stream():
    """... and no stream hears of it."""
    torch.set_num_threads(1)
    recorded: list[int] = []
    vocoder = random_code2wav(tiny_config(), record=lambda run: recorded.append(1) or record(run))
    decoded: set[tuple[int, int]] = set()
    decode = vocoder.decode
    vocoder.decode = lambda rows: decoded.add((len(rows), len(rows[0].codes_KQ))) or decode(rows)
    assert vocoder.capture_graphs() == len(recorded) == 35
    assert decoded == {*((rows, 1) for rows in ROW_SIZES), *((rows, 16) for rows in ROW_SIZES[:-1]), (32, 8)}
    assert len(recorded) == 35, "what is rehearsed has its graphs"
    codes = random_codes(vocoder, 5, random.Random(3))
    assert torch.equal(vocoder.decode_whole(codes), random_code2wav(tiny_config()).decode_whole(codes))


def test_every_frame_adds_its_samples_at_once():
    vocoder = random_code2wav(tiny_config())
    state, rng = vocoder.open(), random.Random(1)
    lengths = [
        vocoder.decode([VocoderRow(state, random_codes(vocoder, 1, rng), False)])[0].numel() for _ in "abc"
    ]
    assert vocoder.withheld == 8
    assert lengths == [24 - 8, 24, 24]


def test_a_failed_decode_leaves_every_state_as_it_was():
    vocoder, rng = random_code2wav(tiny_config()), random.Random(2)
    codes = random_codes(vocoder, 6, rng)
    good, bad = vocoder.open(), vocoder.open()
    first = vocoder.decode([VocoderRow(good, codes[:2], False)])[0]
    impossible = torch.full((1, vocoder.num_code_groups), 10_000)
    with pytest.raises((RuntimeError, IndexError)):
        vocoder.decode([VocoderRow(good, codes[2:], True), VocoderRow(bad, impossible, True)])
    rest = vocoder.decode([VocoderRow(good, codes[2:], True)])[0]
    assert torch.allclose(torch.cat([first, rest]), vocoder.decode_whole(codes), rtol=0, atol=TOLERANCE)


def test_a_state_does_not_grow():
    vocoder, rng = random_code2wav(tiny_config()), random.Random(3)
    state = vocoder.open()
    size = state.num_bytes
    for _ in range(20):
        vocoder.decode([VocoderRow(state, random_codes(vocoder, 3, rng), False)])
    assert state.num_bytes == size
    assert state.num_frames == 60


def test_through_the_pool_the_streams_are_exact_too():
    vocoder, rng = random_code2wav(tiny_config()), random.Random(4)
    pool = VocoderPool(vocoder, VocoderPoolConfig(max_batch_rows=3), "vocoder", lambda: 0.0)
    whole = {f"r{i}": random_codes(vocoder, rng.randrange(1, 30), rng) for i in range(7)}
    pcm: dict[str, list[Tensor]] = {name: [] for name in whole}
    for name, codes in whole.items():
        pool.add(name, "")
        for part in codes.split(4):
            pool.frames(name, part, last=False)
        pool.frames(name, codes[:0], last=True)
        while pool.has_work() and rng.random() < 0.5:
            for out in pool.step():
                pcm[out.request_id].append(out.samples)
    while pool.has_work():
        for out in pool.step():
            pcm[out.request_id].append(out.samples)
    assert pool.is_idle
    assert pool.check_integrity() is None
    for name, codes in whole.items():
        assert torch.allclose(torch.cat(pcm[name]), vocoder.decode_whole(codes), rtol=0, atol=TOLERANCE)


def test_the_published_shape_withholds_555_samples_of_1920():
    config = tiny_config(upsample_rates=(8, 5, 4, 3), upsampling_ratios=(2, 2))
    vocoder = random_code2wav(config)
    assert (vocoder.samples_per_frame, vocoder.withheld) == (1920, 555)
    assert vocoder.decode_whole(random_codes(vocoder, 2, random.Random(5))).shape == (2 * 1920 - 555,)


def test_the_two_ways_of_upsampling_agree(monkeypatch):
    vocoder = random_code2wav(tiny_config())
    codes = random_codes(vocoder, 5, random.Random(6))
    by_product = vocoder.decode_whole(codes)
    monkeypatch.setattr("vocoder.layers.FEW_STEPS", 0)
    assert torch.allclose(vocoder.decode_whole(codes), by_product, rtol=0, atol=TOLERANCE)
