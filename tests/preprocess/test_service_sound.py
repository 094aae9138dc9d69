"""Sounds through the whole preprocessor: items in the arena, identity by samples, windows, refusals."""

from __future__ import annotations

import asyncio
import base64

import msgspec
import numpy as np
import pytest

from api.conversation import conversation_of
from api.schemas import ABSENT, ChatMessage
from contracts.errors import MediaDecodeError, MediaError, MediaTooLarge
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


def test_input_audio_and_audio_url_are_the_same_item() -> None:
    """As both forms of one message part, whatever format the client names."""
    payload = base64.b64encode(SOUND).decode()
    forms = [
        {"type": "input_audio", "input_audio": {"data": payload, "format": "wav"}},
        {"type": "input_audio", "input_audio": {"data": payload, "format": "mp3"}},
        {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{payload}"}},
        {"type": "audio_url", "audio_url": data_url(SOUND, "application/octet-stream")},
    ]
    message = msgspec.convert({"role": "user", "content": forms}, ChatMessage)
    conversation = conversation_of(
        [message],
        tools=ABSENT,
        add_generation_prompt=None,
        continue_final_message=None,
        input_modalities=("text", "audio"),
    )

    async def scenario() -> None:
        async with running() as service:
            items = []
            for given in conversation.media():
                for resolved in await service.resolve(given, SPECS):
                    resolved.release()
                    items.append(msgspec.structs.replace(resolved.item, features=None))
            assert items == items[:1] * 4
            assert service.counters.jobs_total == 1

    run(scenario)


def test_all_of_a_long_sound_is_heard() -> None:
    """62 s, with a tone in the 46th: nothing is cut off without a word."""
    samples = np.zeros(62 * 16_000, np.int16)
    samples[45 * 16_000 : 46 * 16_000] = int16(tone(1.0))

    async def scenario() -> None:
        async with running() as service:
            (resolved,) = await service.resolve(source(wav(samples)), SPECS)
            assert (resolved.item.num_frames, resolved.item.duration_s) == (6200, 62)
            assert resolved.item.num_tokens == 62 * 13
            assert resolved.item.features is not None
            mel = service.pool.arena.view(resolved.item.features)
            assert 4500 <= int(mel.max(axis=0).argmax()) <= 4600
            resolved.release()

    run(scenario)


def test_two_hours_are_refused_by_the_header() -> None:
    async def scenario() -> None:
        async with running() as service:
            two_hours = wav(np.zeros(7200 * 8000, np.uint8), 8000)
            with pytest.raises(MediaTooLarge, match="7200 s long or more; the limit is 3600 s"):
                await service.resolve(source(two_hours), SPECS)

    run(scenario)
