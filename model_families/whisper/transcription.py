"""Whisper's way through a recording: the language, then windows of 30 s, each starting where the last one's
timestamps say that it understood everything. A window is heard again, less greedily, when its text looks
like a
model that lost its way (Radford et al. 2022, section 4.5); so text comes when its window is accepted."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from math import ceil, exp

import msgspec

from contracts.errors import BadRequest
from contracts.messages import Align, SampleDelta
from contracts.params import SamplingParams
from contracts.transcription import (
    TranscriptEvent,
    TranscriptionOptions,
    TranscriptLanguage,
    TranscriptSegment,
    TranscriptText,
    TranscriptWord,
)
from model_families.text import ChatTokenizer
from model_families.transcription import Ask, Recognition
from model_families.whisper.config import (
    FRAMES_PER_POSITION,
    SECONDS_PER_FRAME,
    SECONDS_PER_TIMESTAMP,
    WhisperConfig,
    WhisperGeneration,
)
from model_families.whisper.segments import Piece, WindowTokens
from model_families.whisper.words import words_of

# A model that lost its way may go on by a fiftieth of a second at a time.
WINDOWS_PER_WINDOW = 8  # on average; from then on the windows stand beside each other
ENGLISH = "en"
TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)  # one after another, when the client leaves it at 0
MAX_COMPRESSION_RATIO = 2.4  # text that repeats itself compresses better
MIN_AVG_LOGPROB = -1.0
# Nothing is said in a window where the model thinks so and is not sure of the text that it gives all the same
# (Radford et al. ask for less than -1 here; "you", of silence, has -0.9, as has many a word said alone).
MIN_NO_SPEECH, SURE_AVG_LOGPROB = 0.6, -0.5
CERTAIN = 1e6  # a bias that no logit comes near


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
            raise BadRequest(f"this model cannot {options.task}", param="model", code="unsupported_model")
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
        self._duration_s = round(duration_s, 3)
        self._before = transcriber.before(options.prompt)
        self._task = transcriber.task_of(options)
        self._language = transcriber.language_of(options)
        self._told_language = False
        self._seek = 0
        self._windows_left = WINDOWS_PER_WINDOW * (1 + num_frames // self._config.window_frames)
        self._temperatures = (options.temperature,) if options.temperature else TEMPERATURES
        self._attempt = 0  # at the window, an index of the temperatures
        self._asks_no_speech = False
        self._no_speech_prob: float | None = None  # of the window; None: not known yet
        self._waits_for_no_speech = False  # the window's text is there, and whether anything was said is not
        self._window: WindowTokens | None = None
        self._pieces: list[Piece] = []
        self._unaligned: list[
            TranscriptSegment
        ] = []  # accepted; the times of their words are being asked for

    def next_ask(self) -> Ask | None:
        if self._language is None:
            return self._ask((self._generation.decoder_start_token_id,), max_tokens=1, is_answer=False)
        if self._unaligned:
            return self._alignment_ask()
        if self._seek >= self._num_heard:
            return None
        if self._waits_for_no_speech or (self._options.timestamps and self._no_speech_prob is None):
            return self._no_speech_ask()
        self._windows_left -= not self._attempt
        prompt = (*self._before, *self._start_tokens())
        heard = min(self._seek + self._config.window_frames, self._num_heard) - self._seek
        self._window, self._pieces = WindowTokens(heard, self._generation.first_timestamp), []
        return self._ask(prompt, max_tokens=self._config.max_target_positions - len(prompt))

    def _start_tokens(self) -> tuple[int, ...]:
        assert self._language is not None
        start = (self._generation.decoder_start_token_id,)
        if not self._generation.is_multilingual:
            return start
        return (*start, self._transcriber.languages[self._language], *self._task)

    def _no_speech_ask(self) -> Ask:
        """How likely the token for silence is where the language would be said. It is forced, to learn its
        probability; its prompt is the beginning of the window's, so that all of it is computed once."""
        self._asks_no_speech = True
        sampling = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            logprobs=0,
            logit_bias=((self._generation.no_speech_token_id, CERTAIN),),
            ruled=False,
        )
        prompt = (*self._before, self._generation.decoder_start_token_id)
        end = min(self._seek + self._config.window_frames, self._num_frames)
        return Ask(prompt, self._seek, end, sampling, is_answer=False)

    def _ask(self, prompt: tuple[int, ...], max_tokens: int, is_answer: bool = True) -> Ask:
        sampling = SamplingParams(
            max_tokens=max_tokens,
            temperature=0.0 if self._language is None else self._temperatures[self._attempt],
            seed=self._options.seed,
            logprobs=0,
        )
        end = min(self._seek + self._config.window_frames, self._num_frames)
        return Ask(prompt, self._seek, end, sampling, is_answer=is_answer)

    def take(self, delta: SampleDelta) -> list[TranscriptEvent]:
        if self._language is None:
            (token_id,) = delta.token_ids
            codes = {i: code for code, i in self._transcriber.languages.items()}
            self._language = codes[token_id]
            return []
        if self._unaligned:
            return self._aligned(delta.alignment)
        if self._asks_no_speech:
            self._asks_no_speech = False
            self._no_speech_prob = exp(delta.logprobs[0].chosen)
            if not self._waits_for_no_speech:
                return []
            self._waits_for_no_speech = False
            return self._finish()
        assert self._window is not None
        for token_id, logprobs in zip(delta.token_ids, delta.logprobs, strict=True):
            if token_id == delta.stop_token_id:
                self._window.end_logprob = logprobs.chosen
            elif (piece := self._window.push(token_id, logprobs.chosen)) is not None:
                self._pieces.append(piece)
        return [] if delta.finish_reason is None else self._finish()

    def _finish(self) -> list[TranscriptEvent]:
        assert self._window is not None
        if not self._attempt and self._may_be_silent():
            if self._no_speech_prob is None:
                self._waits_for_no_speech = True
                return []
            if self._no_speech_prob > MIN_NO_SPEECH:
                return self._leave_window(self._window.num_frames)
        if self._attempt + 1 < len(self._temperatures) and self._is_doubtful():
            self._attempt += 1
            return []
        piece, num_frames = self._window.finish()
        segments = [*map(self._segment, [*self._pieces, *([] if piece is None else [piece])])]
        if self._options.words and any(map(self._text_tokens, segments)):
            self._unaligned = segments
        assert num_frames > 0, "the rules let no segment end where its window starts"
        events = self._leave_window(num_frames if self._windows_left > 0 else self._window.num_frames)
        return events if self._unaligned else [*events, *_told(segments)]

    def _leave_window(self, num_frames: int) -> list[TranscriptEvent]:
        """On to the next; the language is told once."""
        assert self._language is not None
        self._seek += num_frames
        self._attempt = 0
        self._no_speech_prob = None
        if self._told_language:
            return []
        self._told_language = True
        return [TranscriptLanguage(self._language)]

    def _may_be_silent(self) -> bool:
        """The model is not sure of the window's text, or there is no word in it."""
        assert self._window is not None
        text = self._text_of(tuple(self._window.token_ids))
        return self._window.avg_logprob < SURE_AVG_LOGPROB or not any(map(str.isalnum, text))

    def _is_doubtful(self) -> bool:
        assert self._window is not None
        text = self._text_of(tuple(self._window.token_ids)).strip().encode()
        ratio = len(text) / len(zlib.compress(text))
        return ratio > MAX_COMPRESSION_RATIO or self._window.avg_logprob < MIN_AVG_LOGPROB

    def _segment(self, piece: Piece) -> TranscriptSegment:
        offset_s = self._seek * SECONDS_PER_FRAME
        # A timestamp may lie in the silence that a short recording is filled up with.
        start_s, end_s = (
            min(round(offset_s + steps * SECONDS_PER_TIMESTAMP, 2), self._duration_s)
            for steps in (piece.start, piece.end)
        )
        return TranscriptSegment(
            start_s=start_s,
            end_s=end_s,
            window_start_s=round(offset_s, 2),
            text=self._text_of(piece.token_ids),
            token_ids=piece.token_ids,
            avg_logprob=sum(piece.logprobs) / len(piece.logprobs),
            no_speech_prob=self._no_speech_prob or 0.0,
            temperature=self._temperatures[self._attempt],
        )

    # --- when each word is said ---------------------------------------------------------------------------
    def _text_tokens(self, segment: TranscriptSegment) -> list[int]:
        return [i for i in segment.token_ids if i < self._generation.eos_token_id]

    def _alignment_ask(self) -> Ask:
        """The window's text as if it had been told without timestamps. The attention of a position is that
        of the
        token which it foretells, so the token before the text counts, too."""
        start = self._start_tokens()
        text = [i for segment in self._unaligned for i in self._text_tokens(segment)]
        text = text[: self._config.max_target_positions - len(start) - 2]
        prompt = (*start, self._generation.no_timestamps_token_id, *text)
        seek = round(self._unaligned[0].window_start_s / SECONDS_PER_FRAME)
        heard = min(self._config.window_frames, self._num_heard - seek)
        align = Align(num_tokens=1 + len(text), num_positions=max(1, heard // FRAMES_PER_POSITION))
        end = min(seek + self._config.window_frames, self._num_frames)
        sampling = SamplingParams(max_tokens=1, temperature=0.0)
        return Ask(prompt, seek, end, sampling, align, is_answer=False)

    def _aligned(self, first_positions: tuple[int, ...]) -> list[TranscriptEvent]:
        assert self._language is not None
        segments, self._unaligned = self._unaligned, []
        offset_s = segments[0].window_start_s
        times_s = [round(offset_s + at * SECONDS_PER_TIMESTAMP, 2) for at in first_positions]
        first, timed = 0, []
        for segment in segments:
            words: list[TranscriptWord] = []
            for text, num_tokens in words_of(self._text_tokens(segment), self._bytes_of, self._language):
                # What attention says and what the timestamps say are two opinions, which differ most where
                # nothing is to be heard; the segment's, told in every format, is the one that stands.
                start_s, end_s = (
                    min(max(times_s[min(i, len(times_s) - 1)], segment.start_s), segment.end_s)
                    for i in (first, first + num_tokens)
                )
                words.append(TranscriptWord(start_s=start_s, end_s=end_s, text=text))
                first += num_tokens
            timed.append(msgspec.structs.replace(segment, words=tuple(words)))
        return _told(timed)

    def _text_of(self, token_ids: tuple[int, ...]) -> str:
        return b"".join(map(self._bytes_of, token_ids)).decode("utf-8", errors="replace")

    def _bytes_of(self, token_id: int) -> bytes:
        """Text tokens come before all others."""
        if token_id >= self._generation.eos_token_id:
            return b""
        return self._transcriber.tokenizer.token_bytes(token_id)


def _told(segments: Iterable[TranscriptSegment]) -> list[TranscriptEvent]:
    return [event for segment in segments for event in (TranscriptText(segment.text), segment)]
