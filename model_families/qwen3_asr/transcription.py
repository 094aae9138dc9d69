"""Qwen3-ASR's way through a recording: one answer for all of it, "language <name><asr_text>" and the words.

A language is forced by beginning the answer for the model.
"""

from __future__ import annotations

import codecs

from contracts.conversation import Conversation, MediaPart, Message, TextPart
from contracts.errors import BadRequest
from contracts.media import MediaSource
from contracts.messages import SampleDelta
from contracts.params import SamplingParams
from contracts.specs import AudioSpec
from contracts.transcription import (
    TranscriptEvent,
    TranscriptionOptions,
    TranscriptLanguage,
    TranscriptText,
)
from model_families.text import ChatTokenizer
from model_families.transcription import Ask, Recognition

TEXT_MARK = "<asr_text>"
LANGUAGE = "language "
TOKENS_PER_S, EXTRA_TOKENS = 24, 64  # several times what people say: only an answer that never ends has more

NAMES = {
    **{"ar": "Arabic", "yue": "Cantonese", "zh": "Chinese", "cs": "Czech", "da": "Danish", "nl": "Dutch"},
    **{"en": "English", "fil": "Filipino", "fi": "Finnish", "fr": "French", "de": "German", "el": "Greek"},
    **{"hi": "Hindi", "hu": "Hungarian", "id": "Indonesian", "it": "Italian", "ja": "Japanese"},
    **{"ko": "Korean", "mk": "Macedonian", "ms": "Malay", "fa": "Persian", "pl": "Polish"},
    **{"pt": "Portuguese", "ro": "Romanian", "ru": "Russian", "es": "Spanish", "sv": "Swedish"},
    **{"th": "Thai", "tr": "Turkish", "vi": "Vietnamese"},
}
_CODES = {name.lower(): code for code, name in NAMES.items()}


class Qwen3ASRTranscriber:
    def __init__(self, tokenizer: ChatTokenizer, spec: AudioSpec) -> None:
        self._spec = spec
        self.tokenizer = tokenizer
        (self.text_mark,) = tokenizer.encode(TEXT_MARK, parse_special=True)

    def num_positions(self, ask: Ask) -> int:
        return self._spec.num_tokens(ask.end - ask.start)

    def start(self, options: TranscriptionOptions, num_frames: int, duration_s: float) -> Recognition:
        if options.timestamps or options.words:
            raise BadRequest(
                "this model gives no timestamps; ask for json or text",
                param="response_format",
                code="unsupported_value",
            )
        if options.task != "transcribe":
            raise BadRequest(f"this model cannot {options.task}", param="model", code="unsupported_model")
        language = _language_of(options)
        sampling = SamplingParams(
            max_tokens=EXTRA_TOKENS + int(duration_s * TOKENS_PER_S),
            temperature=options.temperature,
            seed=options.seed,
        )
        ask = Ask(tuple(self._prompt(options, language)), 0, num_frames, sampling)
        return Qwen3ASRRecognition(self, ask, language)

    def _prompt(self, options: TranscriptionOptions, language: str | None) -> list[int]:
        sound = MediaPart(MediaSource("audio", ""))  # leaves its placeholder
        messages = [Message(role="user", parts=(sound,))]
        if options.prompt:
            messages.insert(0, Message(role="system", parts=(TextPart(options.prompt),)))
        ids = self.tokenizer.encode_conversation(Conversation(messages=tuple(messages)))
        if language is None:
            return ids
        return ids + self.tokenizer.encode(f"{LANGUAGE}{NAMES[language]}{TEXT_MARK}", parse_special=True)


def _language_of(options: TranscriptionOptions) -> str | None:
    if options.language is None:
        return None
    given = options.language.strip().lower()
    language = given if given in NAMES else _CODES.get(given)
    if language is None:
        raise BadRequest(
            f"`language` must be one of the codes {', '.join(sorted(NAMES))}",
            param="language",
            code="unsupported_language",
        )
    return language


class Qwen3ASRRecognition:
    """See `Recognition`. An answer without the mark is all text."""

    def __init__(self, transcriber: Qwen3ASRTranscriber, ask: Ask, language: str | None) -> None:
        self._transcriber = transcriber
        self._ask: Ask | None = ask
        self._language = language
        self._told = False
        self._held: list[int] = []  # until it is known whether this is the language
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def next_ask(self) -> Ask | None:
        ask, self._ask = self._ask, None
        return ask

    def take(self, delta: SampleDelta) -> list[TranscriptEvent]:
        events: list[TranscriptEvent] = []
        token_ids = delta.token_ids[:-1] if delta.stop_token_id is not None else delta.token_ids
        for token_id in token_ids:
            if self._language is not None or self._told:
                events += self._text([token_id])
            elif token_id == self._transcriber.text_mark:
                events += self._tell(_named(self._bytes_of(self._held).decode("utf-8", errors="replace")))
            else:
                self._held.append(token_id)
        if delta.finish_reason is not None:
            if self._language is None and not self._told:
                events += [*self._tell(""), *self._text(self._held)]
            tail = self._utf8.decode(b"", final=True)
            events += [TranscriptText(tail)] if tail else []
        return events

    def _tell(self, language: str) -> list[TranscriptEvent]:
        self._told = True
        return [TranscriptLanguage(language)]

    def _text(self, token_ids: list[int]) -> list[TranscriptEvent]:
        events = [] if self._told else self._tell(self._language or "")
        text = self._utf8.decode(self._bytes_of(token_ids))
        return [*events, TranscriptText(text)] if text else events

    def _bytes_of(self, token_ids: list[int]) -> bytes:
        tokenizer = self._transcriber.tokenizer
        return b"".join(tokenizer.token_bytes(i) for i in token_ids if not tokenizer.is_special(i))


def _named(prefix: str) -> str:
    """The language in what comes before the mark: its code where it has one; empty where nothing was said."""
    first = next((line.strip() for line in prefix.splitlines() if line.strip()), "")
    name = first[len(LANGUAGE) :].strip() if first.lower().startswith(LANGUAGE) else first
    return "" if name.lower() == "none" else _CODES.get(name.lower(), name.lower())
