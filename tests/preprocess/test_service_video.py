"""Videos through the whole preprocessor: film and sound track as two items of one source."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from contracts.errors import BadRequest, MediaDecodeError, MediaError, MediaTooLarge
from contracts.media import MediaOptions, MediaSource
from contracts.specs import MediaLimits, MediaSpecs
from tests.preprocess.films import TINY_VIDEO, film, moving
from tests.preprocess.recordings import TINY_AUDIO, tone
from tests.preprocess.samples import data_url, encode, noise
from tests.preprocess.test_service import run, running

SOUNDING = film(moving(20), fps=10, codec="mpeg4", sound=tone(2.0))
SILENT = film(moving(12), fps=10, codec="mpeg4")
SPECS = MediaSpecs(audio=TINY_AUDIO, video=TINY_VIDEO)


def source(data: bytes, **options: object) -> MediaSource:
    return MediaSource(
        "video", data_url(data, "video/mp4"), MediaOptions(**options), "messages[0].content[1]"
    )


def test_a_film_and_its_sound_track() -> None:
    async def scenario() -> None:
        async with running() as service:
            video, audio = await service.resolve(source(SOUNDING, with_audio=True), SPECS)
            assert (video.item.modality, audio.item.modality) == ("video", "audio")
            assert audio.item.of_video
            arena = service.pool.arena
            assert video.item.features is not None
            assert audio.item.features is not None
            frames = arena.view(video.item.features).copy()
            mel = arena.view(audio.item.features).copy()
            assert frames.dtype == np.uint8
            assert mel.shape == (TINY_AUDIO.num_mels, audio.item.num_frames)
            video.release()
            assert arena.allocated_bytes > 0
            np.testing.assert_array_equal(arena.view(audio.item.features), mel)
            audio.release()
            assert arena.allocated_bytes == 0

            again = await service.resolve(source(SOUNDING, with_audio=True), SPECS)
            assert [r.processed for r in again] == [None, None]
            assert service.counters.jobs_total == 1
            for resolved, features in zip(again, (frames, mel), strict=True):
                made = await service.materialize(resolved)
                assert made.item.features is not None
                np.testing.assert_array_equal(arena.view(made.item.features), features)
                made.lease.release()
                assert arena.allocated_bytes == 0

    run(scenario)


def test_silent_and_sounding_films_together() -> None:
    async def scenario() -> None:
        async with running() as service:
            calls = [service.resolve(source(d, with_audio=True), SPECS) for d in (SILENT, SOUNDING, SILENT)]
            silent, sounding, same = await asyncio.gather(*calls)
            assert [r.item.modality for r in (*silent, *sounding, *same)] == [
                "video",
                "video",
                "audio",
                "video",
            ]
            assert silent[0].item.pixel_digest == same[0].item.pixel_digest
            for resolved in (*silent, *sounding, *same):
                resolved.release()

    run(scenario)


def test_options_are_part_of_the_identity() -> None:
    async def scenario() -> None:
        async with running() as service:
            seen = {}
            for options in ({}, {"fps": 5.0}, {"num_frames": 6}, {"max_pixels": 256}, {"with_audio": True}):
                resolved = await service.resolve(source(SOUNDING, **options), SPECS)
                seen[str(options)] = resolved[0].item
                for one in resolved:
                    one.release()
            assert len({item.bytes_digest for item in seen.values()}) == 5
            assert seen["{}"].pixel_digest == seen["{'with_audio': True}"].pixel_digest
            assert len({item.pixel_digest for item in seen.values()}) == 4

    run(scenario)


def test_bad_videos_fail_alone_and_by_name() -> None:
    async def scenario() -> None:
        limits = MediaLimits(max_video_s=1.5)
        async with running(limits=limits) as service:
            wrong = {
                b"junk": MediaDecodeError,
                encode(noise(8, 8)): MediaDecodeError,
                SOUNDING: MediaTooLarge,
            }
            calls = [service.resolve(source(data), SPECS) for data in wrong]
            outcomes = await asyncio.gather(*calls, return_exceptions=True)
            for outcome, kind in zip(outcomes, wrong.values(), strict=True):
                assert isinstance(outcome, kind)
                assert outcome.param == "messages[0].content[1]"
            with pytest.raises(BadRequest, match="num_frames"):
                await service.resolve(source(SILENT, num_frames=2, fps=1.0), SPECS)
            with pytest.raises(MediaError, match="audio input is not supported"):
                await service.resolve(source(SILENT, with_audio=True), MediaSpecs(video=TINY_VIDEO))
            frames = MediaSource("video", "data:video/jpeg;base64,AAAA,BBBB,CCCC", param="messages[0]")
            with pytest.raises(MediaError, match="not valid base64"):
                await service.resolve(frames, SPECS)
            (good,) = await service.resolve(source(SILENT), SPECS)
            good.release()
            assert service.pool.counters.worker_deaths_total == 0

    run(scenario)
