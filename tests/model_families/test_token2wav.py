"""Qwen2.5-Omni's token2wav against transformers: in one piece, and in the windows it streams in."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from contracts.errors import EngineError
from model_families.qwen2_5_omni.vocoder import load_vocoder
from tests.model_families.token2wav_models import CODES, DIT, MEL, build_token2wav
from vocoder.model import VocoderRow
from vocoder.pool import VocoderPool, VocoderPoolConfig
from vocoder.token2wav.flow import FlowConfig
from vocoder.token2wav.model import Token2Wav
from vocoder.token2wav.noise import Noise

CPU = torch.device("cpu")
BLOCK = DIT["block_size"]
FEW_TIMES = 2  # the flow in one step, where its accuracy is not the question
TOLERANCE = {"rtol": 0, "atol": 1e-5}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("token2wav")
    reference, voices = build_token2wav(folder)
    return folder, reference, voices


def random_codes(length: int, seed: int = 0) -> Tensor:
    return torch.randint(0, CODES, (length, 1), generator=torch.Generator().manual_seed(seed))


def decode(vocoder: Token2Wav, codes: Tensor, voice: str, seed: int, chunks=None) -> Tensor:
    """Given the sizes of the chunks, or in one."""
    state, pcm = vocoder.open(voice, seed), []
    parts = codes.split(chunks or [codes.shape[0]])
    for index, part in enumerate(parts):
        pcm += vocoder.decode([VocoderRow(state, part, index == len(parts) - 1)])
    return torch.cat(pcm)


def theirs_whole(reference, voice: dict, codes: Tensor, seed: int) -> Tensor:
    torch.manual_seed(seed)  # the reference draws its noise from the global generator, all at once
    return reference(codes[None, :, 0], conditioning=voice["cond"], reference_mel=voice["ref_mel"]).reshape(
        -1
    )


@pytest.mark.parametrize("length", [1, 9])
def test_one_piece_equals_transformers_with_the_same_noise(checkpoint, length):
    folder, reference, voices = checkpoint
    ours = load_vocoder(folder, CPU, torch.float32, chunk_blocks=None)
    heard = []
    for seed, (name, voice) in enumerate(voices.items()):
        theirs = theirs_whole(reference, voice, random_codes(length), seed)
        heard.append(decode(ours, random_codes(length), name, seed))
        assert theirs.std() > 0.001
        assert theirs.abs().max() < 0.99
        torch.testing.assert_close(heard[-1], theirs, **TOLERANCE)
        assert heard[-1].shape == (length * ours.samples_per_frame,)
    assert not torch.allclose(*heard, atol=1e-3), "voice and noise are heard"


def theirs_in_windows(reference, voice: dict, codes: Tensor, seed: int, chunk: int, monkeypatch) -> Tensor:
    """The reference's sampler on each window of two blocks behind, `chunk` mel frames and one block ahead,
    the
    noise being that of the whole; then its BigVGAN on all the mels at once."""
    noise = torch.randn(1, 2 * codes.shape[0], MEL, generator=torch.Generator().manual_seed(seed))
    mels, begin, total = [], 0, 2 * codes.shape[0]
    while begin < total:
        end = begin + chunk + BLOCK
        is_last = end >= total
        first, end = max(0, begin - 2 * BLOCK), min(end, total)
        with monkeypatch.context() as patch:
            patch.setattr(torch, "randn", lambda *a, at=first, to=end, **k: noise[:, at:to].clone())
            mel = reference.code2wav_dit_model.sample(
                voice["cond"], voice["ref_mel"], codes[None, first // 2 : end // 2, 0], num_steps=FEW_TIMES
            )
        mels.append(mel[..., begin - first :] if is_last else mel[..., begin - first :][..., :chunk])
        begin = total if is_last else begin + chunk
    with torch.no_grad():
        return reference.code2wav_bigvgan_model(torch.cat(mels, dim=-1)).reshape(-1)


@pytest.mark.parametrize(("length", "chunk_blocks"), [(14, 1), (23, 2), (12, 3), (13, 3)])
def test_windows_equal_transformers_on_each_window(checkpoint, monkeypatch, length, chunk_blocks):
    folder, reference, voices = checkpoint
    codes, voice = random_codes(length, 3), voices["Basalt"]
    ours = cheap(folder, chunk_blocks)
    theirs = theirs_in_windows(reference, voice, codes, 9, chunk_blocks * BLOCK, monkeypatch)
    torch.testing.assert_close(decode(ours, codes, "Basalt", 9), theirs, **TOLERANCE)


def test_what_fits_the_first_window_is_the_decode_in_one_piece(checkpoint):
    folder, reference, voices = checkpoint
    codes = random_codes((3 + 1) * BLOCK // 2, 4)
    ours = load_vocoder(folder, CPU, torch.float32)
    theirs = theirs_whole(reference, voices["Amber"], codes, 2)
    torch.testing.assert_close(decode(ours, codes, "Amber", 2, [5, 5, 2]), theirs, **TOLERANCE)


def cheap(folder, chunk_blocks: int) -> Token2Wav:
    whole = load_vocoder(folder, CPU, torch.float32)
    flow = FlowConfig(num_times=FEW_TIMES)
    return Token2Wav(
        whole._dit, whole._bigvgan, whole._voices, whole.sample_rate, chunk_blocks=chunk_blocks, flow=flow
    )


def test_fifty_random_schedules_batched_give_the_same_pcm(checkpoint):
    vocoder, rng = cheap(checkpoint[0], 1), random.Random(6)
    whole = [random_codes(rng.randrange(1, 14), index) for index in range(50)]
    voices = [rng.choice(vocoder.voices) for _ in whole]
    states = [vocoder.open(voice, index) for index, voice in enumerate(voices)]
    left, pcm = dict(enumerate(whole)), [[] for _ in whole]
    while left:
        chosen = rng.sample(sorted(left), min(len(left), 16))
        rows = []
        for index in chosen:
            size = min(rng.randrange(0, 6), left[index].shape[0])
            chunk, left[index] = left[index][:size], left[index][size:]
            rows.append(VocoderRow(states[index], chunk, last=not left[index].shape[0]))
        for index, row, samples in zip(chosen, rows, vocoder.decode(rows), strict=True):
            pcm[index].append(samples)
            if row.last:
                del left[index]
    fresh = [vocoder.open(voice, index) for index, voice in enumerate(voices)]
    at_once = vocoder.decode([VocoderRow(s, codes, True) for s, codes in zip(fresh, whole, strict=True)])
    for index, codes in enumerate(whole):
        torch.testing.assert_close(torch.cat(pcm[index]), at_once[index], **TOLERANCE)
        assert at_once[index].shape == (codes.shape[0] * vocoder.samples_per_frame,)
    torch.testing.assert_close(decode(vocoder, whole[7], voices[7], 7), at_once[7], **TOLERANCE)


def test_noise_drawn_in_pieces_is_drawn_once_and_is_that_of_one_draw():
    noise, drawn = Noise.seeded(11, 80), []
    for end in (2, 26, 26, 74, 122):
        noise = noise.drawn_to(end)
        drawn.append(noise.rows(max(noise.first, end - 24), end))
        noise = noise.dropped_to(max(noise.first, end - 24))
        assert noise.rows_TM.untyped_storage().nbytes() <= 24 * 80 * 4
    whole = torch.randn(1, 122, 80, generator=torch.Generator().manual_seed(11))[0]
    for rows, end in zip(drawn, (2, 26, 26, 74, 122), strict=True):
        assert torch.equal(rows, whole[max(0, end - 24) : end])


def test_it_streams_and_holds_no_more_than_it_needs(checkpoint):
    vocoder = cheap(checkpoint[0], 1)
    state, early, sizes = vocoder.open("Amber", 0), [], []
    for code in random_codes(60).split(2):
        early += vocoder.decode([VocoderRow(state, code, False)])
        sizes.append(state.num_bytes)
    pcm = torch.cat(early)
    assert pcm.numel() > 0.4 * 60 * vocoder.samples_per_frame
    at_once = decode(vocoder, random_codes(60), "Amber", 0)
    torch.testing.assert_close(pcm, at_once[: pcm.numel()], **TOLERANCE)
    assert max(sizes[15:]) <= max(sizes[:15])


def test_the_pool_speaks_with_the_voice_and_seed_it_is_told(checkpoint):
    vocoder = cheap(checkpoint[0], 2)
    pool = VocoderPool(vocoder, VocoderPoolConfig(), "vocoder", lambda: 0.0)
    pool.add("a", "Basalt", seed=4)
    pcm = []
    for part in random_codes(30).split(7):
        pool.frames("a", part, last=False)
    pool.frames("a", random_codes(0), last=True)
    while pool.has_work():
        pcm += [out.samples for out in pool.step()]
    assert pool.is_idle
    torch.testing.assert_close(torch.cat(pcm), decode(vocoder, random_codes(30), "Basalt", 4), **TOLERANCE)


def test_a_checkpoint_without_voices_is_refused(checkpoint, tmp_path):
    for name in ("model.safetensors", "config.json"):
        (tmp_path / name).symlink_to(checkpoint[0] / name)
    with pytest.raises(EngineError, match=r"spk_dict\.pt"):
        load_vocoder(tmp_path, CPU, torch.float32)
