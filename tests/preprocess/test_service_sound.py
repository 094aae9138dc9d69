"""Sounds through the whole preprocessor: items in the arena, identity by samples, windows, refusals."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from contracts.errors import MediaDecodeError, MediaError
from contracts.media import MediaSource
from contracts.specs import MediaSpecs
from preprocess.mel import log_mel
from preprocess.service import Preprocessor, ResolvedMedia
from preprocess.sound import EMPTY
from tests.preprocess.recordings import QWEN3_OMNI, TINY_AUDIO, WHISPER, int16, record, tone, wav
from tests.preprocess.samples import data_url, encode, noise
from tests.preprocess.test_service import run, running

SOUND = wav(int16(tone(0.5)))
SPECS = MediaSpecs(audio=TINY_AUDIO)


def source(data: bytes, mime: str = "audio/wav") -> MediaSource:
    return MediaSource("audio", data_url(data, mime), param="messages[0].content[1]")


async def heard(service: Preprocessor, data: bytes, specs: MediaSpecs = SPECS) -> tuple[ResolvedMedia, ...]:
    resolved = await service.resolve(source(data), specs)
    for media in resolved:
        media.release()
    return resolved


def test_a_sound_becomes_mel_features_in_the_arena() -> None:
    async def scenario() -> None:
        async with running() as service:
            (resolved,) = await service.resolve(source(SOUND), MediaSpecs(audio=QWEN3_OMNI))
            item = resolved.item
            assert (item.modality, item.num_frames, item.num_tokens) == ("audio", 50, 7)
            assert item.duration_s == pytest.approx(0.5)
            assert not item.of_video
            assert item.features is not None
            samples = int16(tone(0.5)).astype(np.float32) / 32768
            expected = np.empty((128, 50), np.float32)
            log_mel(samples, QWEN3_OMNI, expected)
            np.testing.assert_array_equal(service.pool.arena.view(item.features), expected)
            assert item.pixel_digest == service.config.pool.digester.of_array(samples)
            resolved.release()
            assert service.pool.arena.allocated_bytes == 0

    run(scenario)


def test_a_repeated_sound_is_not_decoded_and_an_equal_one_is_the_same() -> None:
    async def scenario() -> None:
        async with running() as service:
            (first,) = await heard(service, SOUND)
            (again,) = await heard(service, SOUND)
            assert again.processed is None
            assert service.counters.jobs_total == 1
            flac = record(int16(tone(0.5))[None].astype(np.float32) / 32768, 16_000, "flac", "flac")
            (other,) = await heard(service, flac)
            assert other.item.bytes_digest != first.item.bytes_digest
            assert other.item.pixel_digest == first.item.pixel_digest
            made = await service.materialize(again)
            assert made.item.pixel_digest == first.item.pixel_digest
            assert made.item.features is not None
            made.lease.release()
            (louder,) = await heard(service, wav(int16(tone(0.5)) + 1))
            assert louder.item.pixel_digest != first.item.pixel_digest

    run(scenario)


def test_a_long_sound_becomes_one_item_a_window() -> None:
    async def scenario() -> None:
        async with running(arena_bytes=8 << 20) as service:
            data = wav(int16(tone(62.5, hertz=440.01)))
            specs = MediaSpecs(audio=WHISPER)
            resolved = await service.resolve(source(data), specs)
            assert [r.item.start_s for r in resolved] == [0, 30, 60]
            assert [r.item.duration_s for r in resolved] == [30, 30, pytest.approx(2.5)]
            assert {r.item.num_tokens for r in resolved} == {1500}
            views = [service.pool.arena.view(r.item.features).copy() for r in resolved if r.item.features]
            assert [view.shape for view in views] == [(80, 3000)] * 3
            assert len({r.item.pixel_digest for r in resolved}) == 3
            resolved[0].release()
            resolved[1].release()
            assert service.pool.arena.allocated_bytes > 0  # one block, held by its last item
            resolved[2].release()
            assert service.pool.arena.allocated_bytes == 0

            repeated = await service.resolve(source(data), specs)
            assert service.counters.jobs_total == 1
            last = await service.materialize(repeated[2])
            assert last.item.features is not None
            np.testing.assert_array_equal(service.pool.arena.view(last.item.features), views[2])
            last.lease.release()
            assert service.pool.arena.allocated_bytes == 0

    run(scenario)


def test_bad_sounds_fail_alone_and_by_name() -> None:
    async def scenario() -> None:
        async with running() as service:
            bad = {b"RIFF junk": None, encode(noise(8, 8)): None, wav(int16(tone(0.0))): EMPTY}
            calls = [service.resolve(source(data), SPECS) for data in bad]
            outcomes = await asyncio.gather(*calls, return_exceptions=True)
            for outcome, code in zip(outcomes, bad.values(), strict=True):
                assert isinstance(outcome, MediaDecodeError)
                assert outcome.param == "messages[0].content[1]"
                assert outcome.code == (code or "media_decode_failed")
            with pytest.raises(MediaError, match="audio input is not supported"):
                await service.resolve(source(SOUND), MediaSpecs())
            await heard(service, SOUND)
            assert service.pool.counters.worker_deaths_total == 0

    run(scenario)
