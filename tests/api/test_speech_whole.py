"""Speech over HTTP from a whole tiny omni model: routes, graph, talker and vocoder together."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import openai
import torch

from api.routes.speech import PIECE_CHARS
from api.speech_text import pieces_of
from contracts.params import SamplingParams
from stages.launch import serve_service
from stages.omni_service import OmniService
from stages.options import ServeOptions
from tests.api.serving import Running, running
from tests.tiny_omni import CODEC_EOS_3, VOICES

torch.set_num_threads(1)
MAX_SPEECH_S = 0.5  # some frames
TEXTS = ("hello there", "the answer is", "in the end", "stars")


@asynccontextmanager
async def speaking(folder: Path) -> AsyncIterator[tuple[OmniService, Running, openai.AsyncOpenAI]]:
    """Random weights would rather not speak: the talker is greedy and may not end by itself."""
    overrides = ("thinker.kv_memory=8MiB", "talker.kv_memory=8MiB", "preprocess.workers=1")
    overrides += (f"server.max_speech_s={MAX_SPEECH_S}",)
    async with serve_service(ServeOptions(model=folder, dtype="float32", overrides=overrides)) as service:
        desk = service._speech
        assert desk._spec is not None
        endless = SamplingParams(temperature=0.0, logit_bias=((CODEC_EOS_3, -100.0),))
        desk._spec = msgspec.structs.replace(desk._spec, sampling=endless)
        async with running(service) as server:
            sdk = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0)
            async with sdk:
                yield service, server, sdk
        await service.drained()
        assert [r.problem for r in await service.check_integrity() if r.problem] == []


def test_speech_alone_and_together(tiny_omni: Callable[..., Path]) -> None:
    async def run() -> None:
        async with speaking(tiny_omni("qwen3_omni_moe")) as (service, server, sdk):
            name, voices = service.card.names[0], service.card.voices

            async def speak(text: str, voice: str = VOICES[0]) -> np.ndarray:
                response = await sdk.audio.speech.create(
                    model=name, voice=voice, input=text, response_format="pcm"
                )
                return np.frombuffer(response.content, "<i2")

            alone = [await speak(text) for text in TEXTS]
            together = await asyncio.gather(*map(speak, TEXTS))
            for one, other in zip(alone, together, strict=True):
                assert len(one) == len(other) > 0
                assert np.abs(one.astype(int) - other).max() <= 1  # the last bit of rounding to 16
            assert any(len(one) != len(alone[0]) or np.any(one != alone[0]) for one in alone[1:])
            assert np.any(await speak(TEXTS[0], VOICES[1]) != alone[0])
            async with httpx.AsyncClient() as http:
                listed = (await http.get(f"{server.url}/v1/audio/voices")).json()
                assert listed["voices"] == list(voices)
                metrics = (await http.get(f"{server.url}/metrics")).text
            assert "omnistage:time_to_first_audio_seconds" in metrics

    asyncio.run(run())


def test_a_long_text_is_its_parts_one_after_the_other(tiny_omni: Callable[..., Path]) -> None:
    """Streamed or not, at a speed of its own or not: no sample between the parts, and none missing."""
    sentence = "the answer is in the house and in the end it is in the thing. "
    text = (sentence * 12).strip()
    parts = pieces_of(text, PIECE_CHARS)
    assert len(parts) > 1

    async def run() -> None:
        async with speaking(tiny_omni("qwen3_omni_moe")) as (service, _, sdk):

            async def speak(said: str, **options: Any) -> np.ndarray:
                response = await sdk.audio.speech.create(
                    model=service.card.names[0],
                    voice=VOICES[0],
                    input=said,
                    response_format="pcm",
                    **options,
                )
                return np.frombuffer(response.content, "<i2").astype(int)

            expected = np.concatenate([await speak(part) for part in parts])
            for options in ({}, {"extra_body": {"stream": False}}):
                heard = await speak(text, **options)
                assert len(heard) == len(expected)
                assert np.abs(heard - expected).max() <= 1
            assert len(await speak(text, speed=2.0)) == round(len(expected) / 2)

    asyncio.run(run())


def test_spoken_chat_streamed_and_whole(tiny_omni: Callable[..., Path]) -> None:
    asked: dict[str, Any] = {
        "messages": [{"role": "user", "content": "hello there, the answer is"}],
        "modalities": ["text", "audio"],
        "audio": {"voice": VOICES[0], "format": "pcm16"},
        "max_tokens": 5,
        "temperature": 0,
        "seed": 1,
    }

    async def run() -> None:
        async with speaking(tiny_omni("qwen3_omni_moe")) as (service, _, sdk):
            name = service.card.names[0]
            whole = await sdk.chat.completions.create(model=name, **asked)
            silent = await sdk.chat.completions.create(
                model=name, **(asked | {"modalities": ["text"], "audio": openai.NOT_GIVEN})
            )
            stream = await sdk.chat.completions.create(model=name, stream=True, **asked)
            text, sound = "", b""
            async for chunk in stream:
                delta = chunk.choices[0].delta
                text += delta.content or ""
                audio = delta.model_dump().get("audio") or {}
                sound += base64.b64decode(audio.get("data") or "", validate=True)
            message = whole.choices[0].message
            assert message.audio is not None
            assert text == message.content == message.audio.transcript == silent.choices[0].message.content
            ours = np.frombuffer(base64.b64decode(message.audio.data), "<i2")
            streamed = np.frombuffer(sound, "<i2")
            assert len(ours) == len(streamed) > 0
            assert np.abs(ours.astype(int) - streamed).max() <= 1
            assert whole.usage is not None
            assert whole.usage.completion_tokens_details is not None
            assert (whole.usage.completion_tokens_details.audio_tokens or 0) > 0

    asyncio.run(run())


def test_leaving_in_mid_speech_leaves_nothing_behind(tiny_omni: Callable[..., Path]) -> None:
    async def run() -> None:
        async with speaking(tiny_omni("qwen3_omni_moe")) as (service, server, _):
            body = {"input": "hello there, the answer is", "response_format": "pcm"}
            async with httpx.AsyncClient() as http:
                for _ in range(4):
                    async with http.stream("POST", f"{server.url}/v1/audio/speech", json=body) as response:
                        assert response.status_code == 200
                        await anext(response.aiter_raw())
            await service.drained()
            assert service.stats()["front"]["open_requests"] == 0

    asyncio.run(run())
