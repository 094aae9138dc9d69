"""Chat with audio out: text as it is written, speech as it is made, as the OpenAI client expects them."""

from __future__ import annotations

import asyncio
import base64
import io
import time
from typing import Any

import av
import numpy as np
import openai
import pytest

from contracts.errors import EngineError
from tests.api.fakes import UNSAYABLE, Script, ScriptedService
from tests.api.serving import events_of, post, running, user
from tests.api.spoken_fakes import SAMPLES_PER_FRAME, SpeakingService, SpeechScript, speech_of
from tests.api.test_disconnect import CHAT, connected
from tests.api.test_speech import as_pcm16, pcm_of

ANSWER = "Hello!"
SPOKEN = {"modalities": ["text", "audio"], "audio": {"voice": "chelsie", "format": "pcm16"}}


def ask(service: ScriptedService, **body: Any) -> Any:
    return post(service, CHAT, {**user("Hi"), **SPOKEN, **body})


def num_frames(text: str = ANSWER) -> int:
    return -(-len(speech_of(text)) // SAMPLES_PER_FRAME)


def test_the_whole_answer_has_its_sound() -> None:
    service = SpeakingService()
    answer = ask(service).json()
    (choice,) = answer["choices"]
    audio = choice["message"]["audio"]
    assert choice["message"]["content"] == audio["transcript"] == ANSWER
    assert audio["id"].startswith("audio-")
    assert audio["expires_at"] <= time.time()
    np.testing.assert_array_equal(pcm_of(base64.b64decode(audio["data"], validate=True)), as_pcm16(ANSWER))
    assert choice["finish_reason"] == "stop"
    assert service.last.request.speech is not None
    assert service.last.request.speech.voice == "Chelsie"
    usage = answer["usage"]
    assert usage["completion_tokens_details"] == {
        "text_tokens": len(ANSWER) + 1,
        "audio_tokens": num_frames(),
    }
    assert usage["completion_tokens"] == len(ANSWER) + 1 + num_frames()
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


@pytest.mark.parametrize("container", ["wav", "mp3", "flac", "opus", "aac"])
def test_every_format_decodes(container: str) -> None:
    answer = ask(SpeakingService(), audio={"voice": "Ethan", "format": container}).json()
    data = base64.b64decode(answer["choices"][0]["message"]["audio"]["data"], validate=True)
    with av.open(io.BytesIO(data)) as container_file:
        seconds = sum(f.samples / f.sample_rate for f in container_file.decode(audio=0))
    assert seconds == pytest.approx(len(speech_of(ANSWER)) / 24_000, abs=0.1)


def test_a_stream_says_each_thing_once() -> None:
    events = events_of(ask(SpeakingService(), stream=True, stream_options={"include_usage": True}))
    assert events.pop() == "[DONE]"
    usage = events.pop()
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens_details"]["audio_tokens"] == num_frames()
    deltas = [event["choices"][0]["delta"] for event in events]
    audio = [delta["audio"] for delta in deltas if "audio" in delta]
    assert deltas[0]["role"] == "assistant"
    assert sum("id" in a for a in audio) == 1
    assert "id" in audio[0]
    assert "".join(delta.get("content", "") for delta in deltas) == ANSWER
    assert "".join(a.get("transcript", "") for a in audio) == ANSWER
    data = [a["data"] for a in audio if "data" in a]
    one_by_one = b"".join(base64.b64decode(piece, validate=True) for piece in data)
    np.testing.assert_array_equal(pcm_of(one_by_one), as_pcm16(ANSWER))
    assert base64.b64decode("".join(data), validate=True) == one_by_one
    assert len(data) > 1
    reasons = [event["choices"][0]["finish_reason"] for event in events]
    assert reasons == [None] * (len(events) - 1) + ["stop"]
    assert list(audio[-1]) == ["expires_at"]


def test_the_openai_client_joins_the_stream() -> None:
    """Its own accumulation of chunks, which joins what it does not know field by field."""

    async def run() -> Any:
        async with running(SpeakingService()) as server:
            sdk = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0)
            async with (
                sdk,
                sdk.chat.completions.stream(
                    model="toy",
                    messages=[{"role": "user", "content": "Hi"}],
                    modalities=["text", "audio"],
                    audio={"voice": "Chelsie", "format": "pcm16"},
                ) as stream,
            ):
                async for _ in stream:
                    pass
                return await stream.get_final_completion()

    message = asyncio.run(run()).choices[0].message
    assert message.content == ANSWER
    audio = message.audio if isinstance(message.audio, dict) else message.audio.model_dump()
    assert audio["transcript"] == ANSWER
    np.testing.assert_array_equal(pcm_of(base64.b64decode(audio["data"])), as_pcm16(ANSWER))
    assert audio["id"].count("audio-") == 1


def test_text_comes_before_the_sound_is_made() -> None:
    async def run() -> None:
        service = SpeakingService(speech=SpeechScript(hold_at_chunk=0))
        body = {**user("Hi"), **SPOKEN, "stream": True}
        async with running(service) as server, connected(server.port, body) as (reader, _):
            received = b""
            while b'"content":"!"' not in received:
                received += await reader.read(1 << 10)
            assert service.num_chunks == 0
            assert b'"finish_reason":"stop"' not in received
        await service.wait_for(lambda: service.last.outcome == "aborted")

    asyncio.run(run())


def test_an_answer_in_text_costs_no_speech() -> None:
    for body in ({}, {"modalities": ["text"]}, {"audio": SPOKEN["audio"]}):
        service = SpeakingService()
        answer = post(service, CHAT, {**user("Hi"), **body}).json()
        assert service.last.request.speech is None
        assert service.num_chunks == 0
        assert "audio" not in answer["choices"][0]["message"]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"n": 2}, "n"),
        ({"modalities": []}, "modalities"),
        ({"modalities": ["text", "text"]}, "modalities"),
        ({"modalities": ["text", "video"]}, "modalities"),
        ({"audio": None}, "audio"),
        ({"audio": {"voice": "alloy", "format": "wav"}}, "audio.voice"),
        ({"audio": {"voice": "Ethan", "format": "midi"}}, "audio.format"),
        ({"audio": {"voice": 3, "format": "wav"}}, "audio.voice"),
    ],
)
def test_bad_fields_are_named(change: dict[str, Any], param: str) -> None:
    service = SpeakingService()
    response = ask(service, **change)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert not service.flows


def test_a_model_without_a_voice_says_so() -> None:
    response = ask(ScriptedService())
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "modalities"


def test_speech_cut_at_its_bound_or_missing_is_told() -> None:
    for stream in (False, True):
        cut = ask(SpeakingService(speech=SpeechScript(end="length")), stream=stream)
        assert '"finish_reason":"length"' in cut.text
        missing = ask(SpeakingService(speech=SpeechScript(silent=True)), stream=stream)
        assert '"no_speech"' in missing.text
        assert "[DONE]" not in missing.text


def test_an_answer_in_which_nothing_can_be_said_has_an_empty_sound() -> None:
    def service() -> SpeakingService:
        return SpeakingService(Script(answers=[UNSAYABLE.encode()]), speech=SpeechScript(silent=True))

    (choice,) = ask(service()).json()["choices"]
    assert choice["message"]["content"] == choice["message"]["audio"]["transcript"] == UNSAYABLE
    assert choice["message"]["audio"]["data"] == ""
    assert choice["finish_reason"] == "stop"
    streamed = ask(service(), stream=True).text
    assert '"finish_reason":"stop"' in streamed
    assert "[DONE]" in streamed


def test_text_that_ends_for_length_keeps_its_reason() -> None:
    answer = ask(SpeakingService(Script()), max_tokens=3).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["choices"][0]["message"]["audio"]["transcript"] == ANSWER[:3]


def test_an_error_in_mid_speech_is_the_last_event() -> None:
    service = SpeakingService(speech=SpeechScript(error=EngineError("the talker is gone")))
    response = ask(service, stream=True)
    assert response.status_code == 200
    assert "the talker is gone" in response.text.rstrip().splitlines()[-1]


def test_leaving_in_mid_speech_aborts_it() -> None:
    async def run() -> None:
        service = SpeakingService(speech=SpeechScript(hold_at_chunk=1))
        body = {**user("Hi"), **SPOKEN, "stream": True}
        async with running(service) as server:
            async with connected(server.port, body) as (reader, _):
                await reader.read(64)
                await service.wait_for(lambda: service.num_chunks == 1)
            await service.wait_for(lambda: service.last.outcome == "aborted")

    asyncio.run(run())
