"""One sample's tokens becoming text: detokenizing, stop strings, and the log-probabilities beside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from api.detokenizer import Detokenizer, TokenTable
from api.stop_strings import StopStrings
from contracts.errors import EngineError
from contracts.messages import SampleDelta, TokenLogprobs

Finish = Literal["stop", "length"]


@dataclass(frozen=True)
class TextOptions:
    stops: tuple[str, ...] = ()
    include_stop_in_output: bool = False
    skip_special_tokens: bool = True
    min_tokens: int = 0
    logprobs: int | None = None
    stop_token_ids: frozenset[int] = frozenset()  # the client's own, to report as `stop_reason`


@dataclass(frozen=True)
class ScoredToken:
    """A token of the visible text. `offset`: characters of the sample's text before it."""

    token_id: int
    logprobs: TokenLogprobs
    offset: int


@dataclass(frozen=True)
class TextDelta:
    """New text of a sample. `finish` is set exactly once, on the last delta."""

    text: str
    tokens: tuple[ScoredToken, ...]
    finish: Finish | None
    stop_reason: str | int | None  # the stop string or the client's stop token that ended it
    num_tokens: int  # of this delta, hidden ones (end token, special tokens) included

    @property
    def visible(self) -> bool:
        return bool(self.text or self.tokens or self.finish)


class SampleText:
    """State of one sample between engine steps. Work per token does not grow with the text's length."""

    def __init__(self, table: TokenTable, options: TextOptions) -> None:
        self._options = options
        self._detokenizer = Detokenizer(table, skip_special_tokens=options.skip_special_tokens)
        self._stops = StopStrings(options.stops, include_in_output=options.include_stop_in_output)
        self._plain = not options.stops and options.logprobs is None  # no token is looked at by itself
        self._scored: list[ScoredToken] = []  # not yet released: their text is held back
        self._num_decoded_chars = 0
        self._num_sent_chars = 0
        self.num_tokens = 0
        self.finished = False

    def push(self, delta: SampleDelta) -> TextDelta:
        assert not self.finished, "a finished sample takes no tokens"
        before = self.num_tokens
        text, stop = self._consume(delta)
        finish: Finish | None = None
        if stop is not None:
            finish = "stop"
        elif delta.finish_reason is not None:
            finish = self._finish_reason(delta)
            tail, stop = self._end()
            text += tail
        self.finished = finish is not None
        self._num_sent_chars += len(text)
        reason: str | int | None = stop
        if stop is None and delta.stop_token_id in self._options.stop_token_ids:
            reason = delta.stop_token_id
        return TextDelta(text, self._release(), finish, reason, self.num_tokens - before)

    def _consume(self, delta: SampleDelta) -> tuple[str, str | None]:
        if self._plain and delta.stop_token_id is None:
            self.num_tokens += len(delta.token_ids)
            bytes_of = self._detokenizer.bytes_of
            text = self._detokenizer.push(b"".join([bytes_of(token_id) for token_id in delta.token_ids]))
            self._num_decoded_chars += len(text)
            return text, None
        hidden_end = delta.stop_token_id is not None and not self._options.include_stop_in_output
        num_visible = len(delta.token_ids) - hidden_end
        assert num_visible >= 0, "stop_token_id is the last of token_ids"
        pieces: list[str] = []
        for i, token_id in enumerate(delta.token_ids):
            self.num_tokens += 1
            if i == num_visible:
                break
            data = self._detokenizer.bytes_of(token_id)
            if self._options.logprobs is not None and data:
                self._scored.append(ScoredToken(token_id, delta.logprobs[i], self._num_decoded_chars))
            piece = self._detokenizer.push(data)
            self._num_decoded_chars += len(piece)
            certain, stop = self._match(piece)
            pieces.append(certain)
            if stop is not None:
                return "".join(pieces), stop
        return "".join(pieces), None

    def _match(self, piece: str) -> tuple[str, str | None]:
        if not self._options.stops:
            return piece, None
        if self.num_tokens <= self._options.min_tokens:
            return self._stops.bypass(piece), None
        return self._stops.push(piece)

    def _end(self) -> tuple[str, str | None]:
        tail = self._detokenizer.finish()
        self._num_decoded_chars += len(tail)
        certain, stop = self._match(tail)
        return certain + self._stops.flush(), stop

    def _finish_reason(self, delta: SampleDelta) -> Finish:
        match delta.finish_reason:
            case "stop" | "length":
                return delta.finish_reason
            case _:
                raise EngineError("the answer was cut off by the server; send the request again")

    def _release(self) -> tuple[ScoredToken, ...]:
        """Scored tokens whose text has gone out; of a cut text those beyond the cut never will."""
        if not self._scored:
            return ()
        count = 0
        while count < len(self._scored) and self._scored[count].offset < self._num_sent_chars:
            count += 1
        released = tuple(self._scored[:count])
        del self._scored[:count]
        return released
