"""One window's tokens as they come: segments between timestamps, and how far the next window starts."""

from __future__ import annotations

from dataclasses import dataclass, field

from model_families.whisper.config import FRAMES_PER_POSITION


@dataclass(frozen=True)
class Piece:
    """Tokens of a segment, its timestamps included; times in timestamp steps from the window's start."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    start: int
    end: int


@dataclass
class WindowTokens:
    """A segment ends where two timestamps meet. What follows the last such place is heard again by the next
    window, unless a single timestamp at the very end says that no more speech follows.

    `num_frames`: mel frames of the recording in this window. `first_timestamp`: the token of 0.00 s.
    """

    num_frames: int
    first_timestamp: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    num_cut: int = 0  # tokens in segments so far
    end_logprob: float | None = None  # of the end token, which is none of `token_ids`

    @property
    def avg_logprob(self) -> float:
        """Of the tokens and of the one that ended them; 0 of nothing."""
        logprobs = self.logprobs if self.end_logprob is None else [*self.logprobs, self.end_logprob]
        return sum(logprobs) / max(1, len(logprobs))

    def push(self, token_id: int, logprob: float) -> Piece | None:
        """The segment that this token completes."""
        self.token_ids.append(token_id)
        self.logprobs.append(logprob)
        end = len(self.token_ids) - 1
        if end < 1 or not self._is_time(end) or not self._is_time(end - 1):
            return None
        return self._cut(end)

    def finish(self) -> tuple[Piece | None, int]:
        """The last segment, if any, and the mel frames by which to go on."""
        count = len(self.token_ids)
        if not self.num_cut:
            return self._whole(), self.num_frames
        if count >= 2 and self._is_time(count - 1) and not self._is_time(count - 2):
            return self._cut(count), self.num_frames
        return None, self._time(self.num_cut - 1) * FRAMES_PER_POSITION

    def _cut(self, end: int) -> Piece:
        first, last = self.num_cut, end - 1
        self.num_cut = end
        start = self._time(first) if self._is_time(first) else 0
        return self._piece(first, end, start, self._time(last))

    def _whole(self) -> Piece | None:
        count = len(self.token_ids)
        if not count:
            return None
        last = next((i for i in reversed(range(count)) if self._is_time(i)), None)
        end = self.num_frames // FRAMES_PER_POSITION
        if last is not None and self._time(last):
            end = self._time(last)
        return self._piece(0, count, 0, end)

    def _piece(self, first: int, end: int, start: int, stop: int) -> Piece:
        return Piece(tuple(self.token_ids[first:end]), tuple(self.logprobs[first:end]), start, stop)

    def _is_time(self, index: int) -> bool:
        return self.token_ids[index] >= self.first_timestamp

    def _time(self, index: int) -> int:
        return self.token_ids[index] - self.first_timestamp
