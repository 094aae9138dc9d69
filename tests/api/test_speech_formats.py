"""The official client plays everything that is said: speech as bytes and as events, at every speed, and
streamed
chat audio, in every format; files decode to the exact number of samples, and bytes come before all is
made."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Literal

import av
import msgspec
import numpy as np
import openai
import pytest

from tests.api.serving import running
from tests.api.spoken_fakes import SAMPLE_RATE, SpeakingService, SpeechScript, speech_of
from vocoder.containers.encoder import AudioEncoder
from vocoder.containers.formats import FORMATS

TEXT = "Hello there, and good day to you, wherever you may be on this fine evening."
CHAT_FORMATS = ("wav", "mp3", "flac", "opus", "aac", "pcm16")
MUXERS = {"opus": "ogg"}


@asynccontextmanager
async def client_of(service: SpeakingService) -> AsyncIterator[openai.AsyncOpenAI]:
    async with running(service) as server:
        sdk = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0)
        async with sdk:
            yield sdk


def num_samples(body: bytes, container: str) -> int:
    if container in ("pcm", "pcm16"):
        assert len(body) % 2 == 0
        return len(body) // 2
    with av.open(io.BytesIO(body), format=MUXERS.get(container, container)) as file:
        return sum(frame.samples for frame in file.decode(audio=0))


def expected(container: str, text: str, speed: float = 1.0) -> int:
    encoder = AudioEncoder(container, SAMPLE_RATE, speed)
    samples = speech_of(text)
    encoder.encode(samples)
    encoder.finish()
    assert encoder.num_samples == round(len(samples) / speed)
    return encoder.num_decoded_samples


def decoded_events(lines: list[bytes]) -> bytes:
    events = [msgspec.json.decode(line.removeprefix(b"data: ")) for line in lines if line]
    assert events.pop()["type"] == "speech.audio.done"
    return b"".join(base64.b64decode(event["audio"], validate=True) for event in events)


async def spoken(
    sdk: openai.AsyncOpenAI, container: Any, stream_format: Literal["audio", "sse"], speed: float
) -> tuple[bytes, int]:
    """The file, and in how many pieces it came."""
    speech = sdk.audio.speech.with_streaming_response.create(
        model="toy",
        voice="Ethan",
        input=TEXT,
        response_format=container,
        stream_format=stream_format,
        speed=speed,
    )
    async with speech as response:
        if stream_format == "sse":
            lines = [line.encode() async for line in response.iter_lines()]
            return decoded_events(lines), sum(line != b"" for line in lines)
        pieces = [piece async for piece in response.iter_bytes()]
        return b"".join(pieces), len(pieces)


@pytest.mark.parametrize("container", FORMATS)
@pytest.mark.parametrize("stream_format", ["audio", "sse"])
def test_speech_at_every_speed(container: str, stream_format: Literal["audio", "sse"]) -> None:
    async def run() -> None:
        async with client_of(SpeakingService()) as sdk:
            for speed in (0.25, 0.8, 1.0, 1.5, 4.0):
                body, num_pieces = await spoken(sdk, container, stream_format, speed)
                assert num_samples(body, container) == expected(container, TEXT, speed), speed
                assert num_pieces > 2, "it streams"

    asyncio.run(run())


@pytest.mark.parametrize("speed", [0.25, 4.0])
@pytest.mark.parametrize("container", FORMATS)
def test_bytes_come_while_the_rest_is_not_made(container: str, speed: float) -> None:
    """The speaker stops in the middle until the client has heard something."""

    async def run() -> None:
        service = SpeakingService(speech=SpeechScript(hold_at_chunk=15))
        async with client_of(service) as sdk:
            speech = sdk.audio.speech.with_streaming_response.create(
                model="toy",
                voice="Ethan",
                input=TEXT,
                response_format=container,
                speed=speed,  # type: ignore[arg-type]
            )
            async with speech as response:
                pieces = response.iter_bytes()
                body = b""
                while len(body) < 300:  # more than headers
                    body += await anext(pieces)
                assert service.num_chunks <= 15
                service.release.set()
                body += b"".join([piece async for piece in pieces])
            assert num_samples(body, container) == expected(container, TEXT, speed)

    asyncio.run(run())


@pytest.mark.parametrize("container", CHAT_FORMATS)
def test_streamed_chat_audio(container: str) -> None:
    async def run() -> tuple[bytes, str]:
        async with client_of(SpeakingService()) as sdk:
            stream = await sdk.chat.completions.create(
                model="toy",
                messages=[{"role": "user", "content": "Hi"}],
                modalities=["text", "audio"],
                audio={"voice": "Ethan", "format": container},  # type: ignore[typeddict-item]
                stream=True,
            )
            sound, text = b"", ""
            async for chunk in stream:
                delta = chunk.choices[0].delta
                text += delta.content or ""
                audio = delta.model_dump().get("audio") or {}
                sound += base64.b64decode(audio.get("data") or "", validate=True)
            return sound, text

    sound, text = asyncio.run(run())
    assert text == "Hello!"
    name = "pcm" if container == "pcm16" else container
    assert num_samples(sound, container) == expected(name, text)
    if name == "pcm":
        heard = np.frombuffer(sound, "<i2") / 32768
        assert np.abs(heard - speech_of(text)).max() < 1e-4
