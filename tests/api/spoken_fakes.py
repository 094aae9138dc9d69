"""Services that speak and that transcribe, by script."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass

import msgspec
import numpy as np

from contracts.errors import OmnistageError
from contracts.messages import FinishReason, SampleDelta
from contracts.transcription import (
    TranscriptLanguage,
    TranscriptSegment,
    TranscriptText,
    TranscriptUsage,
    TranscriptWord,
)
from stages.service import (
    AudioChunk,
    Event,
    PromptReady,
    RecordingReady,
    Tokens,
    TranscriptionEvent,
    TranscriptionRequest,
)
from tests.api.fakes import SPECIALS, Flow, Script, ScriptedService

# --- speech -------------------------------------------------------------------------------------------------
SAMPLE_RATE = 24_000
SAMPLES_PER_FRAME = 480
SAMPLES_PER_CHAR = 300


def speech_of(text: str) -> np.ndarray:
    """What a speaking service says for a text: float32, of another pitch for every text."""
    num_samples = SAMPLES_PER_CHAR * len(text)
    pitch_hz = 200 + sum(text.encode()) % 400
    return (0.5 * np.sin(2 * np.pi * pitch_hz * np.arange(num_samples) / SAMPLE_RATE)).astype(np.float32)


@dataclass
class SpeechScript:
    chunk_samples: int = 1000
    end: FinishReason = "stop"
    silent: bool = False  # it ends on its first frame
    silent_on: str | None = None  # only where the text holds this
    error: OmnistageError | None = None  # after the first chunk
    hold_at_chunk: int | None = None


class SpeakingService(ScriptedService):
    """Speaks what it writes, or the given text: the sound of an answer follows its text."""

    def __init__(self, *scripts: Script, speech: SpeechScript | None = None) -> None:
        super().__init__(*scripts)
        self.card = msgspec.structs.replace(
            self.card,
            output_modalities=("text", "audio"),
            voices=("Chelsie", "Ethan"),
            sample_rate=SAMPLE_RATE,
            samples_per_frame=SAMPLES_PER_FRAME,
        )
        self.speech = speech or SpeechScript()
        self.num_chunks = 0
        self.most_open = 0

    async def _events(self, script: Script, request_id: str, flow: Flow) -> AsyncGenerator[Event, None]:
        self.most_open = max(self.most_open, sum(f.outcome == "open" for f in self.flows.values()))
        asked = flow.request.speech
        text = b""
        if asked is None or asked.verbatim is None:
            async for event in super()._events(script, request_id, flow):
                yield event
                if isinstance(event, Tokens):
                    text += b"".join(self.tokenizer.token_bytes(t) for t in _plain(event))
            if asked is None:
                return
        else:
            if script.refusal is not None:
                raise script.refusal
            prompt, media = self._prompt(flow.request)
            yield PromptReady(
                request_id=request_id, prompt_token_ids=prompt, media_tokens=media, max_tokens=1
            )
            text = asked.verbatim.encode()
            flow.stopped.add(0)
            ended = SampleDelta(sample=0, token_ids=(), finish_reason="stop")
            yield Tokens(deltas=(ended,), num_cached_tokens=0)
        async for chunk in self._speak(text.decode()):
            flow.spoken = chunk.finish_reason is not None
            yield chunk

    async def _speak(self, text: str) -> AsyncGenerator[AudioChunk, None]:
        script = self.speech
        silent = script.silent or (script.silent_on is not None and script.silent_on in text)
        samples = speech_of("" if silent else text)
        for number, start in enumerate(range(0, len(samples), script.chunk_samples)):
            if number == script.hold_at_chunk:
                await self._notify()
                await self.release.wait()
            if number and script.error is not None:
                raise script.error
            await asyncio.sleep(0)
            self.num_chunks += 1
            yield AudioChunk(samples=samples[start : start + script.chunk_samples].tobytes())
        yield AudioChunk(samples=b"", finish_reason=script.end)


def _plain(event: Tokens) -> list[int]:
    return [t for delta in event.deltas for t in delta.token_ids if t not in SPECIALS]


# --- transcription ------------------------------------------------------------------------------------------
SEGMENTS = (
    TranscriptSegment(
        start_s=0.0,
        end_s=1.5,
        window_start_s=0.0,
        text=" Hello there.",
        token_ids=(7, 8),
        avg_logprob=-0.25,
        no_speech_prob=0.125,
        words=(
            TranscriptWord(start_s=0.0, end_s=0.6, text=" Hello"),
            TranscriptWord(start_s=0.6, end_s=1.5, text=" there."),
        ),
    ),
    TranscriptSegment(
        start_s=3661.5,
        end_s=3662.04,
        window_start_s=3660.0,
        text=" A --> B",
        token_ids=(9,),
        avg_logprob=-0.5,
    ),
)


class ScribeService(ScriptedService):
    """Hears the same in every recording."""

    def __init__(self, *, error: OmnistageError | None = None, hold: bool = False) -> None:
        super().__init__()
        self.card = msgspec.structs.replace(self.card, input_modalities=("text", "audio"), transcribes=True)
        self.requests: list[TranscriptionRequest] = []
        self.outcomes: list[str] = []
        self._error = error
        self._hold = hold

    async def transcribe(self, request: TranscriptionRequest) -> AsyncGenerator[TranscriptionEvent, None]:
        self.requests.append(request)
        outcome = "aborted"
        try:
            yield RecordingReady(request_id="r", duration_s=4.0)
            yield TranscriptLanguage(request.options.language or "en")
            for segment in SEGMENTS:
                yield TranscriptText(segment.text)
                if request.options.timestamps:
                    yield segment
                if self._error is not None:
                    raise self._error
                if self._hold:
                    await self._notify()
                    await self.release.wait()
            yield TranscriptUsage(audio_tokens=200, text_tokens=4, output_tokens=9)
            outcome = "completed"
        finally:
            self.outcomes.append(outcome)
            self._notifying = asyncio.ensure_future(self._notify())
