"""POST /v1/audio/speech and GET /v1/audio/voices, over a service that speaks by script."""

from __future__ import annotations

import asyncio
import base64
import io
import struct
from typing import Any

import av
import httpx
import numpy as np
import openai
import pytest

from api.settings import ApiSettings
from api.speech_text import pieces_of
from contracts.errors import EngineError, TooManyRequests
from tests.api.fakes import UNSAYABLE, Script, ScriptedService
from tests.api.serving import TIMEOUT_S, client, events_of, post, running
from tests.api.spoken_fakes import SAMPLE_RATE, SAMPLES_PER_FRAME, SpeakingService, SpeechScript, speech_of
from tests.api.test_disconnect import connected, metric
from vocoder.containers.encoder import AudioEncoder

SPEECH = "/v1/audio/speech"
TEXT = "Hello there, and good day to you."
LONG = " ".join(f"This is sentence number {i} of a rather long text." for i in range(40))


def speak(service: ScriptedService, settings: ApiSettings | None = None, **body: Any) -> Any:
    return post(service, SPEECH, {"input": TEXT, "voice": "ethan", **body}, settings)


def pcm_of(body: bytes) -> np.ndarray:
    return np.frombuffer(body, "<i2")


def as_pcm16(text: str) -> np.ndarray:
    encoder = AudioEncoder("pcm", SAMPLE_RATE)
    return pcm_of(encoder.encode(speech_of(text)) + encoder.finish())


def decoded(body: bytes) -> int:
    """Samples that FFmpeg finds in a file."""
    with av.open(io.BytesIO(body)) as container:
        return sum(frame.samples for frame in container.decode(audio=0))


@pytest.mark.parametrize(
    ("container", "mime"),
    [
        *(("wav", "audio/wav"), ("mp3", "audio/mpeg"), ("opus", "audio/ogg")),
        *(("aac", "audio/aac"), ("flac", "audio/flac"), ("pcm", "audio/pcm")),
    ],
)
def test_the_openai_client_plays_every_format(container: Any, mime: str) -> None:
    async def run() -> tuple[bytes, str]:
        service = SpeakingService()
        async with running(service) as server:
            sdk = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0)
            async with (
                sdk,
                sdk.audio.speech.with_streaming_response.create(
                    model="toy", voice="Ethan", input=TEXT, response_format=container
                ) as response,
            ):
                body = b"".join([chunk async for chunk in response.iter_bytes()])
                return body, response.headers["content-type"]

    body, content_type = asyncio.run(run())
    assert content_type == mime
    encoder = AudioEncoder(container, SAMPLE_RATE)
    encoder.encode(speech_of(TEXT))
    encoder.finish()
    if container == "pcm":
        np.testing.assert_array_equal(pcm_of(body), as_pcm16(TEXT))
    else:
        assert decoded(body) == encoder.num_decoded_samples


def test_a_streamed_wav_has_one_header_and_a_whole_one_its_sizes() -> None:
    streamed = speak(SpeakingService(), response_format="wav").content
    whole = speak(SpeakingService(), response_format="wav", stream=False)
    assert streamed.count(b"RIFF") == 1
    assert struct.unpack_from("<I", streamed, 40) == (0xFFFF_FFFF,)
    assert struct.unpack_from("<I", whole.content, 40) == (len(whole.content) - 44,)
    assert struct.unpack_from("<I", whole.content, 4) == (len(whole.content) - 8,)
    assert int(whole.headers["content-length"]) == len(whole.content)
    np.testing.assert_array_equal(pcm_of(streamed[44:]), as_pcm16(TEXT))
    assert whole.content[44:] == streamed[44:]


def test_long_text_is_spoken_in_order_without_a_seam() -> None:
    service = SpeakingService()
    body = speak(service, input=LONG, response_format="pcm").content
    pieces = [flow.request.speech.verbatim for flow in service.flows.values()]  # type: ignore[union-attr]
    assert len(pieces) > 3
    assert " ".join(piece for piece in pieces if piece) == LONG
    np.testing.assert_array_equal(
        pcm_of(body), np.concatenate([as_pcm16(piece) for piece in pieces if piece])
    )
    assert service.most_open == 2
    assert all(flow.outcome == "completed" for flow in service.flows.values())


def test_a_full_server_does_not_refuse_the_rest_of_a_speech_it_has_begun() -> None:
    """The next piece asks once while the one before has the only place, and again when that has left."""
    service = SpeakingService()
    service.max_open = 1
    body = speak(service, input=LONG, response_format="pcm").content
    spoken = [f.request.speech.verbatim for f in service.flows.values() if f.outcome == "completed"]  # type: ignore[union-attr]
    assert " ".join(piece for piece in spoken if piece) == LONG
    assert len(pcm_of(body)) == sum(len(speech_of(piece)) for piece in spoken if piece)
    assert [f.outcome for f in service.flows.values()].count("failed") == len(spoken) - 1
    assert speak(SpeakingService(Script(refusal=TooManyRequests("full")))).status_code == 429


@pytest.mark.parametrize("speed", [0.5, 2.0])
def test_speed_changes_the_duration(speed: float) -> None:
    body = speak(SpeakingService(), response_format="pcm", speed=speed).content
    assert len(pcm_of(body)) == round(len(speech_of(TEXT)) / speed)


def test_events_decode_one_by_one_and_together() -> None:
    service = SpeakingService()
    response = speak(service, response_format="pcm", stream_format="sse")
    assert response.headers["content-type"].startswith("text/event-stream")
    *deltas, done = events_of(response)
    assert {delta["type"] for delta in deltas} == {"speech.audio.delta"}
    one_by_one = b"".join(base64.b64decode(delta["audio"], validate=True) for delta in deltas)
    np.testing.assert_array_equal(pcm_of(one_by_one), as_pcm16(TEXT))
    assert base64.b64decode("".join(delta["audio"] for delta in deltas), validate=True) == one_by_one
    num_frames = -(-len(speech_of(TEXT)) // SAMPLES_PER_FRAME)
    assert done["type"] == "speech.audio.done"
    assert done["finish_reason"] == "stop"
    assert done["usage"]["output_tokens"] == num_frames
    assert done["usage"]["total_tokens"] == num_frames + done["usage"]["input_tokens"]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": " \n\t"}, "input"),
        ({"input": None}, "input"),
        ({"input": 5}, "input"),
        ({"input": "x" * 20_000}, "input"),
        ({"voice": ""}, "voice"),
        ({"voice": "alloy"}, "voice"),
        ({"voice": {"id": "nobody"}}, "voice"),
        ({"voice": "x" * 1_000_000}, "voice"),
        ({"voice": 3}, "voice"),
        ({"response_format": "midi"}, "response_format"),
        ({"speed": 0}, "speed"),
        ({"speed": 5}, "speed"),
        ({"speed": "fast"}, "speed"),
        ({"speed": 0.24}, "speed"),
        ({"speed": 4.01}, "speed"),
        ({"stream_format": "pigeon"}, "stream_format"),
        ({"instructions": "x" * 20_000}, "instructions"),
        ({"instructions": 5}, "instructions"),
        ({"seed": "x"}, "seed"),
    ],
)
def test_bad_fields_are_named(change: dict[str, Any], param: str) -> None:
    service = SpeakingService()
    response = speak(service, **change)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert len(response.text) < 600
    assert not service.flows


@pytest.mark.parametrize("text", ["...", "🙂", "Bye"])
def test_short_and_odd_text_is_spoken_as_it_is(text: str) -> None:
    service = SpeakingService()
    response = speak(service, input=text, response_format="pcm")
    assert response.status_code == 200
    asked = service.last.request.speech
    assert asked is not None
    assert (asked.verbatim, asked.voice) == (text, "Ethan")


def test_instructions_are_the_system_s_words_for_every_piece() -> None:
    """They are heard by the model and never read aloud."""
    service = SpeakingService()
    assert speak(service, input=LONG, instructions="Speak slowly.").status_code == 200
    assert len(service.flows) > 3
    for flow in service.flows.values():
        system, asked = flow.request.input.messages  # type: ignore[union-attr]
        assert (system.role, asked.role) == ("system", "user")
        assert [part.text for part in system.parts] == ["Speak slowly."]  # type: ignore[union-attr]
        assert "slowly" not in (flow.request.speech.verbatim or "")  # type: ignore[union-attr]
    for nothing in ("", None):
        plain = SpeakingService()
        assert speak(plain, instructions=nothing).status_code == 200
        assert [m.role for m in plain.last.request.input.messages] == ["user"]  # type: ignore[union-attr]


def test_a_model_without_a_voice_says_so() -> None:
    response = speak(ScriptedService())
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "model"


def test_a_voice_by_object_and_no_voice_at_all() -> None:
    service = SpeakingService()
    for given, voice in (({"id": "CHELSIE"}, "Chelsie"), (None, None)):
        assert speak(service, voice=given).status_code == 200
        assert service.last.request.speech is not None
        assert service.last.request.speech.voice == voice


def test_voices_are_listed() -> None:
    async def run(service: ScriptedService) -> Any:
        async with client(service) as http:
            return (await http.get("/v1/audio/voices")).json()

    listed = asyncio.run(run(SpeakingService()))
    assert listed["voices"] == [voice["id"] for voice in listed["data"]] == ["Chelsie", "Ethan"]
    assert (listed["default"], listed["sample_rate"]) == ("Chelsie", SAMPLE_RATE)
    assert asyncio.run(run(ScriptedService()))["voices"] == []


@pytest.mark.parametrize("body", [{}, {"stream_format": "sse"}, {"stream": False}])
def test_speech_that_ends_before_it_begins_is_an_error(body: dict[str, Any]) -> None:
    response = speak(SpeakingService(speech=SpeechScript(silent=True)), **body)
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "no_speech"


@pytest.mark.parametrize("body", [{}, {"stream_format": "sse"}, {"stream": False}])
def test_a_text_in_which_nothing_can_be_said_never_reaches_the_talker(body: dict[str, Any]) -> None:
    service = SpeakingService()
    response = speak(service, input=f"{UNSAYABLE} {UNSAYABLE}", **body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["type"], error["param"], error["code"]) == (
        "invalid_request_error",
        "input",
        "invalid_value",
    )
    assert "that toy can speak" in error["message"]
    assert not service.flows


def test_a_piece_in_which_nothing_can_be_said_is_left_out() -> None:
    service = SpeakingService()
    pictures = UNSAYABLE * 400
    assert speak(service, input=f"Hello there.\n{pictures}\nGood day to you.").status_code == 200
    said = [flow.request.speech.verbatim for flow in service.flows.values() if flow.request.speech]
    assert said == ["Hello there.", "Good day to you."]


def mute_on(words: str) -> SpeakingService:
    return SpeakingService(speech=SpeechScript(silent_on=words))


async def read_into(received: bytearray, response: httpx.Response) -> None:
    async for data in response.aiter_raw():
        received += data


def others(service: SpeakingService, words: str) -> np.ndarray:
    """What was said but for the pieces that hold `words`."""
    texts = [flow.request.speech.verbatim or "" for flow in service.flows.values() if flow.request.speech]
    return np.concatenate([speech_of(text) for text in texts if words not in text])


@pytest.mark.parametrize("container", ["pcm", "wav", "mp3", "opus", "aac", "flac"])
@pytest.mark.parametrize("words", ["number 20 ", "number 39 "])
def test_a_mute_piece_keeps_no_other_from_being_heard_and_the_body_from_ending(
    container: str, words: str
) -> None:
    """In the middle and at the end. What came of the sound plays; no client takes the body for whole."""

    async def run() -> tuple[bytes, SpeakingService, float]:
        service, received = mute_on(words), bytearray()
        async with running(service) as server:
            body = {"input": LONG, "response_format": container}
            async with (
                httpx.AsyncClient(timeout=TIMEOUT_S) as http,
                http.stream("POST", server.url + SPEECH, json=body) as response,
            ):
                assert response.status_code == 200
                with pytest.raises(httpx.RemoteProtocolError):
                    await read_into(received, response)
            return bytes(received), service, await metric(server.url, "omnistage:speech_mute_total")

    received, service, num_mute = asyncio.run(run())
    assert num_mute == 1
    encoder = AudioEncoder(container, SAMPLE_RATE)
    whole = encoder.encode(others(service, words)) + encoder.finish()
    if container in ("pcm", "wav"):
        assert received == whole
    else:
        assert decoded(received) == encoder.num_decoded_samples
    assert [flow.outcome for flow in service.flows.values()].count("completed") == len(service.flows)


def test_a_mute_piece_is_told_by_an_error_event_behind_the_others() -> None:
    service = mute_on("number 20 ")
    response = speak(service, input=LONG, response_format="pcm", stream_format="sse")
    *deltas, last = events_of(response)
    sound = base64.b64decode("".join(delta["audio"] for delta in deltas), validate=True)
    assert len(pcm_of(sound)) == len(others(service, "number 20 "))
    assert last["error"]["code"] == "no_speech"
    assert f"{len(service.flows)} parts" in last["error"]["message"]
    assert "part 3 " in last["error"]["message"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        *(({}, "number 0 "), ({"stream_format": "sse"}, "number 0 ")),
        *(({"stream": False}, "number 0 "), ({"stream": False}, "number 20 ")),
    ],
)
def test_a_mute_piece_is_an_error_where_nothing_was_sent_yet(body: dict[str, Any], words: str) -> None:
    service = mute_on(words)
    response = speak(service, input=LONG, **body)
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "no_speech"
    spoken = [f.request.speech.verbatim or "" for f in service.flows.values() if f.request.speech]
    assert words in spoken[-1], "nothing is spoken that nobody will hear"


def test_speech_cut_at_its_bound_is_told() -> None:
    async def run() -> tuple[Any, float]:
        service = SpeakingService(speech=SpeechScript(end="length"))
        async with running(service) as server, client(service):
            sdk = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0)
            async with sdk:
                response = await sdk.audio.speech.create(
                    model="toy", voice="Ethan", input=TEXT, extra_body={"stream_format": "sse"}
                )
            return response.text, await metric(server.url, "omnistage:speech_cut_total")

    text, num_cut = asyncio.run(run())
    assert '"finish_reason":"length"' in text
    assert num_cut == 1
    for end in ("length", "stop"):
        whole = speak(SpeakingService(speech=SpeechScript(end=end)), stream=False)
        assert whole.headers["x-omnistage-finish-reason"] == end


def test_a_piece_cut_at_its_bound_keeps_no_other_from_being_heard() -> None:
    service = SpeakingService(speech=SpeechScript(end="length"))
    body = speak(service, input=LONG, response_format="pcm").content
    assert len(service.flows) > 3
    assert len(pcm_of(body)) == len(others(service, "nothing of this kind"))


def test_an_error_in_mid_speech_leaves_the_body_unfinished() -> None:
    async def run() -> None:
        service = SpeakingService(speech=SpeechScript(error=EngineError("the talker is gone")))
        body = {"input": TEXT, "response_format": "pcm"}
        async with running(service) as server, connected(server.port, body, SPEECH) as (reader, _):
            received = await reader.read()
            assert b"200 OK" in received
            assert not received.endswith(b"0\r\n\r\n")

    asyncio.run(run())


@pytest.mark.parametrize("stream_format", ["audio", "sse"])
def test_leaving_aborts_the_speech(stream_format: str) -> None:
    async def run() -> None:
        service = SpeakingService(speech=SpeechScript(hold_at_chunk=3))
        body = {"input": TEXT, "response_format": "pcm", "stream_format": stream_format}
        async with running(service) as server:
            async with connected(server.port, body, SPEECH) as (reader, _):
                await reader.read(64)
                await service.wait_for(lambda: service.num_chunks == 3)
            await service.wait_for(lambda: service.last.outcome == "aborted")
            assert await metric(server.url, "omnistage:api_open_requests") == 0

    asyncio.run(run())


def test_a_listener_who_does_not_read_makes_the_speaker_wait() -> None:
    """And is let go after the stall time-out; nothing was made ahead but what the sockets hold."""

    async def run() -> None:
        service = SpeakingService(speech=SpeechScript(chunk_samples=4000))
        settings = ApiSettings(send_stall_timeout_s=0.3, max_speech_chars=10_000)
        body = {"input": LONG * 4, "response_format": "pcm"}
        total = len(speech_of(LONG * 4)) // 4000
        async with (
            running(service, settings, send_buffer=4096) as server,
            connected(server.port, body, SPEECH, receive_buffer=4096),
        ):
            await service.wait_for(lambda: all(flow.outcome == "aborted" for flow in service.flows.values()))
            assert service.num_chunks < total / 4

    asyncio.run(run())


@pytest.mark.parametrize(
    ("text", "size", "pieces"),
    [
        ("One. Two! Three?", 100, ["One. Two! Three?"]),
        ("One. Two! Three?", 9, ["One. Two!", "Three?"]),
        ("He said “no.” She left.", 14, ["He said “no.”", "She left."]),
        ("first line\nsecond line", 12, ["first line", "second line"]),
        ("你好。今天天气很好！", 7, ["你好。", "今天天气很好！"]),
        ("a long clause, and another", 16, ["a long clause,", "and another"]),
        ("aaaa bbbb cccc", 10, ["aaaa bbbb", "cccc"]),
        ("x" * 25, 10, ["x" * 10, "x" * 10, "x" * 5]),
    ],
)
def test_pieces_end_where_a_speaker_would_pause(text: str, size: int, pieces: list[str]) -> None:
    assert pieces_of(text, size) == pieces
