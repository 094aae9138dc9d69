"""Runs a recording through a model that transcribes, one request of the language model after another."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator

from contracts.messages import Generate, Generated
from contracts.transcription import TranscriptEvent, TranscriptionOptions
from model_families.family import Family
from model_families.transcription import Ask, Transcriber
from stages.coordinator import Coordinator
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
    number = 0
    while (ask := recognition.next_ask()) is not None:
        answers = _run(family, transcriber, coordinator, f"{request_id}.{number}", recording, ask)
        async with contextlib.aclosing(answers):
            async for generated in answers:
                for delta in generated.deltas:
                    for event in recognition.take(delta):
                        yield event
        number += 1


async def _run(
    family: Family,
    transcriber: Transcriber,
    coordinator: Coordinator,
    request_id: str,
    recording: Recording,
    ask: Ask,
) -> AsyncGenerator[Generated, None]:
    window = recording.window(ask.start, ask.end, transcriber.num_positions(ask))
    prompt = family.layout(list(ask.token_ids), [window.item])
    message = Generate(request_id=request_id, prompt=prompt, sampling=ask.sampling, align=ask.align)
    answers = coordinator.run(message, (window,))
    async with contextlib.aclosing(answers):
        async for generated in answers:
            assert isinstance(generated, Generated), "nothing is spoken"
            yield generated
