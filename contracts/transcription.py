"""What is asked of a transcription and what it tells, piece by piece."""

from __future__ import annotations

from typing import Literal

import msgspec


class TranscriptionOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`language`: an ISO 639-1 code, None to have it detected. `prompt`: text that may have gone before, for
    names and style. `timestamps`: segments with times are wanted; `words`: and the words' own.
    `temperature` 0: the model's own ladder, where
    it has one."""

    language: str | None = None
    task: Literal["transcribe", "translate"] = "transcribe"
    prompt: str = ""
    temperature: float = 0.0
    seed: int = 0
    timestamps: bool = False
    words: bool = False


class TranscriptLanguage(msgspec.Struct, frozen=True):
    """The language of what follows, given or detected; comes once, before any text."""

    language: str


class TranscriptText(msgspec.Struct, frozen=True):
    """New text; all of them together are the transcript. Of a recording in segments each comes with its
    segment, before it."""

    text: str


class TranscriptWord(msgspec.Struct, frozen=True, kw_only=True):
    """With the white space and the punctuation that it is written with."""

    start_s: float
    end_s: float
    text: str


class TranscriptSegment(msgspec.Struct, frozen=True, kw_only=True):
    """A stretch of speech. `window_start_s`: where the window that it was heard in begins. `temperature`: at
    which its tokens were drawn."""

    start_s: float
    end_s: float
    window_start_s: float
    text: str
    token_ids: tuple[int, ...]
    avg_logprob: float
    no_speech_prob: float = 0.0  # of the window; 0 where the model has no token for it, or was not asked
    temperature: float = 0.0
    words: tuple[TranscriptWord, ...] = ()


class TranscriptUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Comes last. Each window's input counts once, also where it is heard again; all output counts."""

    audio_tokens: int
    text_tokens: int
    output_tokens: int


TranscriptEvent = TranscriptLanguage | TranscriptText | TranscriptSegment | TranscriptUsage
