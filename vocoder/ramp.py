"""When a stream's frames are decoded, and how many at once: the first alone, then ever more, never too late.

The player holds what it was given; frames arrive every `interval_s`. A stream waits for one more frame as
long as
that frame is expected early enough to be decoded before the player runs dry, so a chunk grows with the lead
that the
stream has won, from one frame to `max_chunk_frames`. A talker no faster than the player gets chunks of one
frame.
"""

from __future__ import annotations

from dataclasses import dataclass

from vocoder.player import Player


@dataclass(frozen=True)
class RampConfig:
    max_chunk_frames: int = 16
    margin_s: float = 0.1  # kept between a chunk's delivery and the moment the player would run dry
    smoothing: float = 0.3  # weight of the newest gap between frames

    def __post_init__(self) -> None:
        assert self.max_chunk_frames >= 1
        assert self.max_chunk_frames & (self.max_chunk_frames - 1) == 0
        assert self.margin_s >= 0
        assert 0 < self.smoothing <= 1


@dataclass(eq=False)
class Arrivals:
    """The pace at which a stream's frames come."""

    last_at_s: float | None = None
    interval_s: float | None = None  # None: fewer than two arrivals

    def receive(self, num_frames: int, now_s: float, smoothing: float) -> None:
        if self.last_at_s is not None and num_frames:
            gap_s = (now_s - self.last_at_s) / num_frames
            old_s = gap_s if self.interval_s is None else self.interval_s
            self.interval_s = old_s + smoothing * (gap_s - old_s)
        if num_frames:
            self.last_at_s = now_s


def due_at_s(config: RampConfig, player: Player, arrivals: Arrivals, decode_s: float) -> float:
    """The moment by which a stream with frames waiting, more of which are to come, must be decoded."""
    assert arrivals.last_at_s is not None
    if player.dry_at_s is None or arrivals.interval_s is None:
        return arrivals.last_at_s
    latest_s = player.dry_at_s - config.margin_s - decode_s
    # Waiting pays only if another frame comes meanwhile.
    return latest_s if arrivals.last_at_s + arrivals.interval_s <= latest_s else arrivals.last_at_s


def chunk_frames(config: RampConfig, num_pending: int, *, first: bool) -> int:
    """A power of two, so that streams at different places meet in one batch."""
    if first or num_pending == 0:
        return min(1, num_pending)
    return min(config.max_chunk_frames, 1 << (num_pending.bit_length() - 1))
