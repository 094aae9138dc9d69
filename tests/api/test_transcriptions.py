"""POST /v1/audio/transcriptions: formats and refusals by script, and a tiny Whisper heard end to end."""

from __future__ import annotations

import asyncio
import io
import wave
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import openai
import pytest
import transformers

from api.settings import ApiSettings
from api.transcript_formats import Transcript, render
from contracts.errors import EngineError
from contracts.transcription import TranscriptSegment, TranscriptWord
from model_families.whisper import transcription
from stages.launch import serve_service
from stages.options import ServeOptions
from tests.api.fakes import ScriptedService
from tests.api.serving import client, events_of, running
from tests.api.spoken_fakes import ScribeService
from tests.tiny_whisper import build_tiny_whisper, reference_transcription, reference_whisper

PATH = "/v1/audio/transcriptions"
FILE = {"file": ("speech.wav", b"sound", "audio/wav")}


def transcribe(
    service: ScriptedService,
    path: str = PATH,
    files: Any = FILE,
    settings: ApiSettings | None = None,
    **form: Any,
) -> httpx.Response:
    async def run() -> httpx.Response:
        async with client(service, settings) as http:
            return await http.post(path, files=files, data=form)

    return asyncio.run(run())


def test_every_format() -> None:
    assert transcribe(ScribeService()).json() == {
        "text": "Hello there. A --> B",
        "usage": {"seconds": 4.0, "type": "duration"},
    }
    assert transcribe(ScribeService(), response_format="text").text == "Hello there. A --> B\n"
    srt = transcribe(ScribeService(), response_format="srt")
    assert srt.text == (
        "1\n00:00:00,000 --> 00:00:01,500\nHello there.\n\n2\n01:01:01,500 --> 01:01:02,040\nA -> B\n"
    )
    assert srt.headers["content-type"].startswith("application/x-subrip")
    vtt = transcribe(ScribeService(), response_format="vtt")
    assert vtt.text.startswith("WEBVTT\n\n00:00:00.000 --> 00:00:01.500\nHello there.\n")
    verbose = transcribe(ScribeService(), response_format="verbose_json", language="de").json()
    assert (verbose["task"], verbose["language"], verbose["duration"]) == ("transcribe", "de", 4.0)
    assert [s["id"] for s in verbose["segments"]] == [0, 1]
    assert verbose["segments"][1]["seek"] == 366_000
    assert verbose["segments"][0]["tokens"] == [7, 8]
    assert [s["no_speech_prob"] for s in verbose["segments"]] == [0.125, 0.0]


def test_the_form_reaches_the_service() -> None:
    service = ScribeService()
    answer = transcribe(
        service,
        language="de",
        prompt="Names: Ada.",
        temperature="0.5",
        seed="3",
        response_format="verbose_json",
        **{"timestamp_granularities[]": "segment"},
    )
    assert answer.status_code == 200
    (request,) = service.requests
    options = request.options
    assert (options.language, options.prompt, options.temperature, options.seed) == (
        "de",
        "Names: Ada.",
        0.5,
        3,
    )
    assert options.timestamps
    assert request.source.modality == "audio"
    assert request.source.url.endswith("c291bmQ=")
    transcribe(service, "/v1/audio/translations")
    assert service.requests[-1].options.task == "translate"
    assert not service.requests[-1].options.timestamps


@pytest.mark.parametrize("granularities", [["word"], ["segment", "word"], ["segment"], []])
def test_words_and_segments_as_they_are_wanted(granularities: list[str]) -> None:
    service = ScribeService()
    form = {"response_format": "verbose_json", "timestamp_granularities[]": granularities}
    answer = transcribe(service, **form).json()
    assert service.requests[0].options.words == ("word" in granularities)
    assert ("segments" in answer) == ("segment" in granularities or not granularities)
    assert ("words" in answer) == ("word" in granularities)
    if "word" in granularities:
        assert answer["words"][:2] == [
            {"word": "Hello", "start": 0.0, "end": 0.6},
            {"word": "there.", "start": 0.6, "end": 1.5},
        ]


def test_white_space_alone_is_no_word() -> None:
    """A model may say it between words, and says it of silence."""
    spaced = TranscriptSegment(
        start_s=0.0,
        end_s=1.0,
        window_start_s=0.0,
        text=" \n日 本",
        token_ids=(1, 2, 3, 4),
        avg_logprob=-0.5,
        words=tuple(
            TranscriptWord(start_s=i / 10, end_s=(i + 1) / 10, text=text)
            for i, text in enumerate((" \n", "日", " ", "本"))
        ),
    )
    transcript = Transcript(
        task="transcribe",
        language="ja",
        duration_s=1.0,
        text="日 本",
        segments=(spaced,),
        granularities=("word",),
    )
    told = msgspec.json.decode(render(transcript, "verbose_json"))["words"]
    assert [word["word"] for word in told] == ["日", "本"]


def test_streamed_text_is_the_whole_text() -> None:
    *deltas, done = events_of(transcribe(ScribeService(), stream="true"))
    assert {delta["type"] for delta in deltas} == {"transcript.text.delta"}
    assert "".join(delta["delta"] for delta in deltas) == done["text"] == "Hello there. A --> B"
    assert done["type"] == "transcript.text.done"
    assert done["usage"] == {
        "type": "tokens",
        "input_tokens": 204,
        "output_tokens": 9,
        "total_tokens": 213,
        "input_token_details": {"audio_tokens": 200, "text_tokens": 4},
    }


@pytest.mark.parametrize(
    ("form", "param"),
    [
        ({"response_format": "xml"}, "response_format"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": "1.01"}, "temperature"),
        ({"temperature": "nan"}, "temperature"),
        ({"stream": "maybe"}, "stream"),
        ({"stream": "true", "response_format": "srt"}, "stream"),
        ({"timestamp_granularities[]": "segment"}, "timestamp_granularities"),
        ({"timestamp_granularities[]": "word"}, "timestamp_granularities"),
        ({"timestamp_granularities[]": "page", "response_format": "verbose_json"}, "timestamp_granularities"),
        ({"prompt": "x" * 5000}, "prompt"),
        ({"model": "other"}, "model"),
        ({"include[]": "logprobs"}, "include[]"),
        ({"prompt": "x" * 100_000}, None),
    ],
)
def test_bad_fields_are_named(form: dict[str, str], param: str | None) -> None:
    service = ScribeService()
    response = transcribe(service, **form)
    assert response.status_code == (404 if param == "model" else 400), response.text
    assert response.json()["error"]["param"] == param
    assert not service.requests


def test_what_is_no_form_and_what_lacks_the_file_is_refused() -> None:
    async def run() -> list[httpx.Response]:
        async with client(ScribeService()) as http:
            return [
                await http.post(PATH, json={"file": "x"}),
                await http.post(PATH, files={"other": b"x"}),
                await http.post(PATH, files={"x": b""}, data={"file": "text"}),
                await http.post(PATH, content=b"--", headers={"content-type": "multipart/form-data"}),
                await http.post(
                    PATH, content=b"garbage", headers={"content-type": "multipart/form-data; boundary=b"}
                ),
            ]

    responses = asyncio.run(run())
    assert [r.status_code for r in responses] == [400] * len(responses)
    assert responses[1].json()["error"]["param"] == "file"


def test_a_file_without_a_byte_is_refused_as_that() -> None:
    response = transcribe(ScribeService(), files={"file": ("a.wav", b"")})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "file")
    assert error["message"] == "`file` is empty"


def test_a_file_in_place_of_text_is_refused() -> None:
    files = FILE | {"timestamp_granularities[]": ("a.txt", b"segment")}
    response = transcribe(ScribeService(), files=files, response_format="verbose_json")
    assert response.json()["error"]["param"] == "timestamp_granularities[]"


def by_hand(charset: str, prompt: bytes) -> httpx.Response:
    head = b"--b\r\nContent-Disposition: form-data; name="
    body = head + b'"file"; filename="a.wav"\r\n\r\nsound\r\n' + head + b'"prompt"\r\n\r\n' + prompt

    async def run() -> httpx.Response:
        async with client(ScribeService()) as http:
            kind = f"multipart/form-data; boundary=b; charset={charset}"
            return await http.post(PATH, content=body + b"\r\n--b--\r\n", headers={"content-type": kind})

    return asyncio.run(run())


@pytest.mark.parametrize("charset", ["utf-8", "undefined", "utf-16", "punycode", "nothing-known"])
def test_forms_are_utf_8_whatever_they_claim(charset: str) -> None:
    assert by_hand(charset, "Grüße".encode()).status_code == 200
    refused = by_hand(charset, b"Gr\xfc\xdfe")
    assert refused.status_code == 400, refused.text
    assert refused.json()["error"]["param"] == "prompt"
    assert "UTF-8" in refused.json()["error"]["message"]


def test_a_body_over_the_limit_is_refused() -> None:
    small = ApiSettings(max_body_bytes=1000)
    response = transcribe(ScribeService(), files={"file": ("a.wav", bytes(5000))}, settings=small)
    assert response.status_code == 413


def test_a_model_that_does_not_transcribe_says_so() -> None:
    response = transcribe(ScriptedService())
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "model"


def test_errors_in_the_middle_are_told() -> None:
    broken = EngineError("the encoder is gone")
    assert transcribe(ScribeService(error=broken)).status_code == 500
    streamed = transcribe(ScribeService(error=broken), stream="true")
    assert "the encoder is gone" in streamed.text
    assert "transcript.text.done" not in streamed.text


@pytest.mark.parametrize("stream", ["true", "false"])
def test_leaving_aborts_the_transcription(stream: str) -> None:
    async def run() -> None:
        service = ScribeService(hold=True)
        async with running(service) as server, httpx.AsyncClient() as http:
            posting = asyncio.create_task(http.post(server.url + PATH, files=FILE, data={"stream": stream}))
            await service.wait_for(lambda: bool(service.requests) or posting.done())
            assert not posting.done()
            posting.cancel()
            await asyncio.gather(posting, return_exceptions=True)
            await service.wait_for(lambda: service.outcomes == ["aborted"])

    asyncio.run(run())


# --- end to end ---------------------------------------------------------------------------------------------
RATE = 16_000


def wav_of(samples: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes(samples.tobytes())
    return buffer.getvalue()


def test_a_tiny_whisper_is_served_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short and long recordings, at once, through HTTP, workers, encoder and engine: the reference's
    words."""
    monkeypatch.setattr(transcription, "TEMPERATURES", (0.0,))  # as the oracle
    folder = build_tiny_whisper(tmp_path / "whisper")
    rng = np.random.default_rng(0)
    recordings = [(rng.standard_normal(int(s * RATE)) * 8000).astype("<i2") for s in (0.6, 1.0, 2.3)]
    options = ServeOptions(model=folder, dtype="float32", overrides=('thinker.kv_memory="8MiB"',))

    async def run() -> list[Any]:
        async with serve_service(options) as service:
            async with running(service) as server:
                sdk = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0)
                async with sdk:
                    answers = await asyncio.gather(
                        *(
                            sdk.audio.transcriptions.create(
                                model="whisper",
                                file=("a.wav", wav_of(r)),
                                language="fr",
                                response_format="verbose_json",
                                timestamp_granularities=["segment", "word"],
                            )
                            for r in recordings
                        ),
                        sdk.audio.transcriptions.create(
                            model="whisper", file=("a.wav", wav_of(recordings[1])), language="fr"
                        ),
                        return_exceptions=True,
                    )
                    stream = await sdk.audio.transcriptions.create(
                        model="whisper", file=("a.wav", wav_of(recordings[1])), language="fr", stream=True
                    )
                    answers.append([event async for event in stream][-1])
                    chat = sdk.chat.completions.create(
                        model="whisper", messages=[{"role": "user", "content": "hi"}]
                    )
                    with pytest.raises(openai.BadRequestError, match="transcri"):
                        await chat
            await service.drained()
            assert [r.problem for r in await service.check_integrity() if r.problem] == []
            return answers

    *timed, plain, done = asyncio.run(run())
    window = transformers.WhisperConfig.from_pretrained(folder).max_source_positions
    details = done.usage.input_token_details
    assert done.text == plain.text
    assert details.audio_tokens in range(window, 9 * window, window), "whole windows"
    assert details.text_tokens == 3 * details.audio_tokens // window, "start, language, task"
    assert done.usage.output_tokens >= len(timed[1].segments[0].tokens)
    assert done.usage.total_tokens == done.usage.input_tokens + done.usage.output_tokens
    extractor = transformers.WhisperFeatureExtractor.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    eos = reference_whisper(folder).generation_config.eos_token_id

    def text_of(token_ids: list[int]) -> str:
        return tokenizer.decode([t for t in token_ids if t < eos])

    for recording, answer in zip(recordings, timed, strict=True):
        features = features_of(extractor, recording)
        theirs = reference_transcription(
            folder, features, language="fr", task="transcribe", return_timestamps=True
        )
        assert answer.duration == pytest.approx(len(recording) / RATE, abs=1e-3)
        texts = [segment.text for segment in answer.segments]
        assert texts == [text_of(segment["tokens"].tolist()) for segment in theirs][: len(texts)]
        assert texts
        assert all(0 <= s.start <= s.end <= answer.duration for s in answer.segments)
        assert "".join(w.word for w in answer.words) == "".join(answer.text.split())
        times = [time for word in answer.words for time in (word.start, word.end)]
        assert times == sorted(times)
    assert plain.text == timed[1].text


def features_of(extractor: Any, recording: np.ndarray) -> Any:
    sound = recording.astype(np.float32) / 32768
    long = len(sound) > RATE
    padding = {"truncation": False, "padding": "longest"} if long else {}
    return extractor(sound, sampling_rate=RATE, return_tensors="pt", **padding).input_features[0]
