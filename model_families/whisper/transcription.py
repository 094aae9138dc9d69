"""Whisper's way through a recording: the language, then windows of 30 s, each starting where the last one's
timestamps say that it understood everything."""

from __future__ import annotations

import codecs
from math import ceil

from contracts.errors import BadRequest
from contracts.messages import SampleDelta
from contracts.params import SamplingParams
from contracts.transcription import (
    TranscriptEvent,
    TranscriptionOptions,
    TranscriptLanguage,
    TranscriptSegment,
    TranscriptText,
)
from model_families.text import ChatTokenizer
from model_families.transcription import Ask, Recognition
from model_families.whisper.config import (
    SECONDS_PER_FRAME,
    SECONDS_PER_TIMESTAMP,
    WhisperConfig,
    WhisperGeneration,
)
from model_families.whisper.segments import Piece, WindowTokens

# A model that lost its way may go on by a fiftieth of a second at a time.
WINDOWS_PER_WINDOW = 8  # on average; from then on the windows stand beside each other
ENGLISH = "en"


class WhisperTranscriber:
    def __init__(
        self, config: WhisperConfig, generation: WhisperGeneration, tokenizer: ChatTokenizer
    ) -> None:
        self.config = config
        self.generation = generation
        self.tokenizer = tokenizer
        self.languages = {name.strip("<|>"): i for name, i in generation.lang_to_id.items()}

    def start(self, options: TranscriptionOptions, num_frames: int, duration_s: float) -> Recognition:
        return WhisperRecognition(self, options, num_frames, duration_s)

    def num_positions(self, ask: Ask) -> int:
        return self.config.max_source_positions  # a shorter window is filled up

    def language_of(self, options: TranscriptionOptions) -> str | None:
        """As the model knows it; None: to be detected."""
        if options.language is None:
            return None if self.generation.is_multilingual else ENGLISH
        language = options.language.strip().lower()
        known = self.languages if self.generation.is_multilingual else (ENGLISH,)
        if language not in known:
            raise BadRequest(
                f"`language` must be one of the codes {', '.join(sorted(known))}",
                param="language",
                code="unsupported_language",
            )
        return language

    def task_of(self, options: TranscriptionOptions) -> tuple[int, ...]:
        """The task's token; English-only models have none."""
        if options.task in self.generation.task_to_id:
            return (self.generation.task_to_id[options.task],)
        if options.task != "transcribe":
            raise BadRequest(f"this model cannot {options.task}", param="task", code="unsupported_value")
        return ()

    def before(self, prompt: str) -> tuple[int, ...]:
        """Text that went before, as much of its end as the reference keeps."""
        start = self.generation.prompt_start
        if not prompt.strip():
            return ()
        if start is None:
            raise BadRequest("this model takes no `prompt`", param="prompt", code="unsupported_value")
        ids = self.tokenizer.encode(" " + prompt.strip())
        return (start, *ids[-(self.config.max_target_positions // 2 - 1) :])


class WhisperRecognition:
    """See `Recognition`. Times are kept in mel frames."""

    def __init__(
        self,
        transcriber: WhisperTranscriber,
        options: TranscriptionOptions,
        num_frames: int,
        duration_s: float,
    ) -> None:
        assert num_frames > 0
        self._transcriber = transcriber
        self._config, self._generation = transcriber.config, transcriber.generation
        self._options = options
        self._num_frames = num_frames
        # Of them the sound itself; a rounding error of the duration makes no frame.
        self._num_heard = max(1, min(num_frames, ceil(duration_s / SECONDS_PER_FRAME - 1e-3)))
        self._timed = options.timestamps or self._num_heard > self._config.window_frames
        self._before = transcriber.before(options.prompt)
        self._task = transcriber.task_of(options)
        self._language = transcriber.language_of(options)
        self._told_language = False
        self._seek = 0
        self._windows_left = WINDOWS_PER_WINDOW * (1 + num_frames // self._config.window_frames)
        self._window: WindowTokens | None = None
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def next_ask(self) -> Ask | None:
        if self._language is None:
            return self._ask((self._generation.decoder_start_token_id,), max_tokens=1)
        if self._seek >= self._num_heard:
            return None
        self._windows_left -= 1
        prompt = (*self._before, self._generation.decoder_start_token_id)
        if self._generation.is_multilingual:
            prompt = (*prompt, self._transcriber.languages[self._language], *self._task)
        if not self._timed:
            prompt = (*prompt, self._generation.no_timestamps_token_id)
        heard = min(self._seek + self._config.window_frames, self._num_heard) - self._seek
        self._window = WindowTokens(heard, self._generation.first_timestamp)
        return self._ask(prompt, max_tokens=self._config.max_target_positions - len(prompt))

    def _ask(self, prompt: tuple[int, ...], max_tokens: int) -> Ask:
        sampling = SamplingParams(
            max_tokens=max_tokens,
            temperature=0.0 if self._language is None else self._options.temperature,
            seed=self._options.seed,
            logprobs=0 if self._timed else None,
        )
        end = min(self._seek + self._config.window_frames, self._num_frames)
        return Ask(prompt, self._seek, end, sampling)

    def take(self, delta: SampleDelta) -> list[TranscriptEvent]:
        events: list[TranscriptEvent] = []
        if self._language is None:
            (token_id,) = delta.token_ids
            codes = {i: code for code, i in self._transcriber.languages.items()}
            self._language = codes[token_id]
            return events
        if not self._told_language:
            self._told_language = True
            events.append(TranscriptLanguage(self._language))
        token_ids = delta.token_ids[:-1] if delta.stop_token_id is not None else delta.token_ids
        for index, token_id in enumerate(token_ids):
            events += self._take_token(token_id, delta.logprobs[index].chosen if self._timed else 0.0)
        if delta.finish_reason is not None:
            events += self._finish()
        return events

    def _take_token(self, token_id: int, logprob: float) -> list[TranscriptEvent]:
        assert self._window is not None
        piece = self._window.push(token_id, logprob)
        if self._timed:
            return [] if piece is None else self._segment(piece)
        text = self._utf8.decode(self._bytes_of(token_id))
        return [TranscriptText(text)] if text else []

    def _finish(self) -> list[TranscriptEvent]:
        assert self._window is not None
        if not self._timed:
            self._seek = self._num_heard
            tail = self._utf8.decode(b"", final=True)
            return [TranscriptText(tail)] if tail else []
        piece, num_frames = self._window.finish()
        events = [] if piece is None else self._segment(piece)
        assert num_frames > 0, "the rules let no segment end where its window starts"
        self._seek += num_frames if self._windows_left > 0 else self._window.num_frames
        return events

    def _segment(self, piece: Piece) -> list[TranscriptEvent]:
        text = b"".join(self._bytes_of(i) for i in piece.token_ids).decode("utf-8", errors="replace")
        offset_s = self._seek * SECONDS_PER_FRAME
        segment = TranscriptSegment(
            start_s=round(offset_s + piece.start * SECONDS_PER_TIMESTAMP, 2),
            end_s=round(offset_s + piece.end * SECONDS_PER_TIMESTAMP, 2),
            window_start_s=round(offset_s, 2),
            text=text,
            token_ids=piece.token_ids,
            avg_logprob=sum(piece.logprobs) / len(piece.logprobs),
        )
        return [TranscriptText(text), segment]

    def _bytes_of(self, token_id: int) -> bytes:
        """Text tokens come before all others."""
        if token_id >= self._generation.eos_token_id:
            return b""
        return self._transcriber.tokenizer.token_bytes(token_id)
