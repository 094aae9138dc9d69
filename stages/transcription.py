"""Runs a recording through a model that transcribes, one request of the language model after another; or has
it written down by ears that can."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from contracts.errors import BadRequest
from contracts.media import Prompt
from contracts.messages import Generate, Generated
from contracts.transcription import (
    TranscriptEvent,
    TranscriptionOptions,
    TranscriptLanguage,
    TranscriptText,
    TranscriptUsage,
)
from model_families.family import Family
from model_families.transcription import Ask, Transcriber
from stages.coordinator import Coordinator
from stages.media_claims import MediaClaim
from stages.recording import Recording


async def transcribe(
    family: Family,
    transcriber: Transcriber,
    coordinator: Coordinator,
    request_id: str,
    recording: Recording,
    options: TranscriptionOptions,
) -> AsyncGenerator[TranscriptEvent, None]:
    """Closing it aborts the request that is under way; the recording stays the caller's."""
    item = recording.item
    recognition = transcriber.start(options, item.num_frames, item.duration_s)
    number, meter = 0, _Meter()
    while (ask := recognition.next_ask()) is not None:
        answers = _run(family, transcriber, coordinator, f"{request_id}.{number}", recording, ask, meter)
        async with contextlib.aclosing(answers):
            async for generated in answers:
                for delta in generated.deltas:
                    meter.output_tokens += len(delta.token_ids) if ask.is_answer else 0
                    for event in recognition.take(delta):
                        yield event
        number += 1
    yield TranscriptUsage(
        audio_tokens=meter.audio_tokens, text_tokens=meter.text_tokens, output_tokens=meter.output_tokens
    )


def check_written_down(options: TranscriptionOptions, language: str) -> None:
    """Raises BadRequest for what ears that write down what they hear, in this language, cannot do. How they
    are to draw (`temperature`, `seed`) says nothing to them."""
    if options.timestamps or options.words:
        raise BadRequest(
            "this model gives no timestamps; ask for json or text",
            param="response_format",
            code="unsupported_value",
        )
    if options.task != "transcribe":
        raise BadRequest(f"this model cannot {options.task}", param="model", code="unsupported_model")
    if options.language not in (None, language):
        raise BadRequest(
            f"`language` must be {language}: this model hears no other",
            param="language",
            code="unsupported_language",
        )
    if options.prompt:
        raise BadRequest("this model takes no `prompt`", param="prompt", code="unsupported_parameter")


async def write_down(family: Family, coordinator: Coordinator, sound: MediaClaim) -> list[TranscriptEvent]:
    """Takes over `sound`."""
    assert family.writes_down is not None
    num_audio_tokens = sound.item.num_tokens
    text = await coordinator.listen(sound)
    usage = TranscriptUsage(
        audio_tokens=num_audio_tokens, text_tokens=0, output_tokens=len(family.tokenizer.encode(text))
    )
    said: list[TranscriptEvent] = [TranscriptText(text)] if text else []
    return [TranscriptLanguage(family.writes_down), *said, usage]


@dataclass
class _Meter:
    """See `TranscriptUsage`."""

    audio_tokens: int = 0
    text_tokens: int = 0
    output_tokens: int = 0
    _window: tuple[int, int] | None = None

    def heard(self, ask: Ask, prompt: Prompt) -> None:
        if ask.is_answer and (ask.start, ask.end) != self._window:
            self._window = (ask.start, ask.end)
            self.audio_tokens += prompt.num_media_tokens
            self.text_tokens += len(prompt.token_ids) - prompt.num_media_tokens


async def _run(
    family: Family,
    transcriber: Transcriber,
    coordinator: Coordinator,
    request_id: str,
    recording: Recording,
    ask: Ask,
    meter: _Meter,
) -> AsyncGenerator[Generated, None]:
    window = recording.window(ask.start, ask.end, transcriber.num_positions(ask))
    prompt = family.layout(list(ask.token_ids), [window.item])
    meter.heard(ask, prompt)
    message = Generate(request_id=request_id, prompt=prompt, sampling=ask.sampling, align=ask.align)
    answers = coordinator.run(message, (window,))
    async with contextlib.aclosing(answers):
        async for generated in answers:
            assert isinstance(generated, Generated), "nothing is spoken"
            yield generated
