"""Qwen3-ASR end to end against `transformers`: short and long recordings, a language given or heard."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from contracts.errors import BadRequest
from contracts.messages import SampleDelta
from contracts.specs import AudioSpec
from contracts.transcription import TranscriptionOptions, TranscriptLanguage, TranscriptText
from model_families.qwen3_asr.transcription import EXTRA_TOKENS, TEXT_MARK, TOKENS_PER_S, Qwen3ASRTranscriber
from model_families.text import HFChatTokenizer
from stages.launch import serve_service
from stages.options import ServeOptions
from tests.api.serving import client
from tests.api.test_transcriptions import wav_of
from tests.tiny_qwen3_asr import RATE, build_tiny_qwen3_asr, reference_answer

torch.set_num_threads(1)
SPEC = AudioSpec(tokens="qwen3_omni")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_qwen3_asr(tmp_path_factory.mktemp("qwen3_asr"))


def test_recordings_are_written_down_as_by_the_reference(folder: Path) -> None:
    """Below half a second, below a chunk, several chunks and windows; all at once."""
    rng = np.random.default_rng(1)
    recordings = [(rng.standard_normal(int(s * RATE)) * 8000).astype("<i2") for s in (0.3, 0.8, 2.0, 3.3)]
    options = ServeOptions(model=folder, dtype="float32", overrides=('thinker.kv_memory="16MiB"',))

    async def run() -> list[Any]:
        async with serve_service(options) as service, client(service) as http:
            return [
                response.json()
                for response in await asyncio.gather(
                    *(
                        http.post(
                            "/v1/audio/transcriptions",
                            files={"file": ("a.wav", wav_of(recording))},
                            data={"language": "fr"} if index % 2 else {},
                        )
                        for index, recording in enumerate(recordings)
                    )
                )
            ]

    answers = asyncio.run(run())
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    texts = []
    for index, (recording, answer) in enumerate(zip(recordings, answers, strict=True)):
        prefix = f"language French{TEXT_MARK}" if index % 2 else ""
        bound = EXTRA_TOKENS + int(len(recording) / RATE * TOKENS_PER_S)
        theirs = reference_answer(folder, recording.astype(np.float32) / 32768, prefix, bound)
        expected = tokenizer.decode(theirs, skip_special_tokens=True)
        assert answer["text"] == expected.strip()
        texts.append(expected)
    assert len(set(texts)) == len(texts)


def heard(folder: Path, options: TranscriptionOptions, *steps: Sequence[int | str]) -> tuple[str, str]:
    """Language and text of an answer that comes in steps of tokens or text."""
    tokenizer = HFChatTokenizer(folder)
    recognition = Qwen3ASRTranscriber(tokenizer, SPEC).start(options, 100, 1.0)
    assert recognition.next_ask() is not None
    languages, text = [], ""
    for number, step in enumerate(steps):
        ids = [
            i
            for part in step
            for i in ([part] if isinstance(part, int) else tokenizer.encode(part, parse_special=True))
        ]
        last = number + 1 == len(steps)
        delta = SampleDelta(sample=0, token_ids=tuple(ids), finish_reason="length" if last else None)
        for event in recognition.take(delta):
            match event:
                case TranscriptLanguage(language):
                    languages.append(language)
                case TranscriptText(piece):
                    assert languages
                    text += piece
    assert recognition.next_ask() is None
    assert len(languages) == 1
    return languages[0], text


def test_the_language_comes_before_the_mark(folder: Path) -> None:
    free, forced = TranscriptionOptions(), TranscriptionOptions(language="German")
    assert heard(folder, free, ["language Eng"], ["lish" + TEXT_MARK + "Hel"], ["lo."]) == ("en", "Hello.")
    assert heard(folder, free, ["language Klingon\n", TEXT_MARK], ["x"]) == ("klingon", "x")
    assert heard(folder, free, ["language None" + TEXT_MARK]) == ("", "")
    assert heard(folder, free, ["no mark at all"]) == ("", "no mark at all")
    assert heard(folder, forced, ["Hallo é"]) == ("de", "Hallo é")


def test_what_it_cannot_do_is_named(folder: Path) -> None:
    transcriber = Qwen3ASRTranscriber(HFChatTokenizer(folder), SPEC)
    for options, param in (
        (TranscriptionOptions(language="xx"), "language"),
        (TranscriptionOptions(timestamps=True), "response_format"),
        (TranscriptionOptions(task="translate"), "model"),
    ):
        with pytest.raises(BadRequest) as caught:
            transcriber.start(options, 100, 1.0)
        assert caught.value.param == param
