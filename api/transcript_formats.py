"""A whole transcript in the formats that clients ask for."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import msgspec

from contracts.transcription import TranscriptSegment

MIME = {
    "json": "application/json",
    "verbose_json": "application/json",
    "text": "text/plain; charset=utf-8",
    "srt": "application/x-subrip; charset=utf-8",
    "vtt": "text/vtt; charset=utf-8",
}
RESPONSE_FORMATS = tuple(MIME)


class Transcript(msgspec.Struct, frozen=True, kw_only=True):
    task: str
    language: str
    duration_s: float
    text: str
    segments: tuple[TranscriptSegment, ...]
    granularities: tuple[str, ...] = ("segment",)  # of verbose_json


class JsonUsage(msgspec.Struct, frozen=True):
    seconds: float
    type: str = "duration"


class Json(msgspec.Struct, frozen=True):
    text: str
    usage: JsonUsage


class JsonSegment(msgspec.Struct, frozen=True, kw_only=True):
    """`seek`: where the window began, in hundredths of a second."""

    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: tuple[int, ...]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float


class JsonWord(msgspec.Struct, frozen=True, kw_only=True):
    word: str
    start: float
    end: float


class VerboseJson(msgspec.Struct, frozen=True, kw_only=True):
    task: str
    language: str
    duration: float
    text: str
    usage: JsonUsage
    segments: list[JsonSegment] | msgspec.UnsetType = msgspec.UNSET
    words: list[JsonWord] | msgspec.UnsetType = msgspec.UNSET


def render(transcript: Transcript, response_format: str) -> bytes:
    usage = JsonUsage(round(transcript.duration_s, 3))
    match response_format:
        case "json":
            return msgspec.json.encode(Json(transcript.text, usage))
        case "verbose_json":
            return msgspec.json.encode(_verbose(transcript, usage))
        case "text":
            return (transcript.text + "\n").encode()
        case "srt":
            return "\n".join(_cues(transcript, ",", numbered=True)).encode()
        case "vtt":
            return "\n".join(["WEBVTT\n", *_cues(transcript, ".", numbered=False)]).encode()
        case _:
            raise AssertionError(f"response format {response_format} was checked")


def _verbose(transcript: Transcript, usage: JsonUsage) -> VerboseJson:
    segments = [
        JsonSegment(
            id=number,
            seek=round(segment.window_start_s * 100),
            start=segment.start_s,
            end=segment.end_s,
            text=segment.text,
            tokens=segment.token_ids,
            temperature=segment.temperature,
            avg_logprob=segment.avg_logprob,
            compression_ratio=_compression_ratio(segment.text),
            no_speech_prob=segment.no_speech_prob,
        )
        for number, segment in enumerate(transcript.segments)
    ]
    words = [
        JsonWord(word=word.text.strip(), start=word.start_s, end=word.end_s)
        for segment in transcript.segments
        for word in segment.words
        if word.text.strip()
    ]
    return VerboseJson(
        task=transcript.task,
        language=transcript.language,
        duration=round(transcript.duration_s, 3),
        text=transcript.text,
        usage=usage,
        segments=segments if "segment" in transcript.granularities else msgspec.UNSET,
        words=words if "word" in transcript.granularities else msgspec.UNSET,
    )


def _compression_ratio(text: str) -> float:
    data = text.encode()
    return len(data) / len(zlib.compress(data))


def _cues(transcript: Transcript, point: str, *, numbered: bool) -> Iterator[str]:
    spoken = [segment for segment in transcript.segments if segment.text.strip()]
    for number, segment in enumerate(spoken, 1):
        if numbered:
            yield str(number)
        yield f"{_clock(segment.start_s, point)} --> {_clock(segment.end_s, point)}"
        # An arrow or a blank line inside the text would end the cue.
        yield segment.text.strip().replace("-->", "->").replace("\n", " ") + "\n"


def _clock(seconds: float, point: str) -> str:
    milliseconds = round(seconds * 1000)
    minutes, milliseconds = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{milliseconds // 1000:02}{point}{milliseconds % 1000:03}"
