"""One stream inside the vocoder pool: its model state, the frames that wait, and its player."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Generic

import torch
from torch import Tensor

from vocoder.model import S
from vocoder.player import Player
from vocoder.ramp import Arrivals, RampConfig, due_at_s

NEVER = float("inf")
AT_ONCE = float("-inf")


@dataclass(eq=False)
class Stream(Generic[S]):
    request_id: str
    state: S
    skip_samples: int  # still to be made and not handed out
    ended: bool = False  # no frames follow
    is_done: bool = False  # all is decoded
    num_pending: int = 0
    player: Player = field(default_factory=Player)
    arrivals: Arrivals = field(default_factory=Arrivals)
    _chunks: deque[Tensor] = field(default_factory=deque)  # [frames, groups] each, never empty ones

    @property
    def waits(self) -> bool:
        return self.ended or self.num_pending > 0

    @property
    def is_first(self) -> bool:
        """Whether a listener still waits for the first sample."""
        return not self.player.has_begun and self.skip_samples == 0

    def receive(self, codes_KQ: Tensor, last: bool, now_s: float, smoothing: float) -> None:
        assert not self.ended
        self.ended = last
        self.arrivals.receive(codes_KQ.shape[0], now_s, smoothing)
        if codes_KQ.shape[0]:
            self._chunks.append(codes_KQ)
            self.num_pending += codes_KQ.shape[0]

    def due_at_s(self, ramp: RampConfig, decode_s: float) -> float:
        """When to decode what waits."""
        if not self.waits:
            return NEVER
        nothing_to_wait_for = self.ended or self.skip_samples or self.num_pending >= ramp.max_chunk_frames
        return AT_ONCE if nothing_to_wait_for else due_at_s(ramp, self.player, self.arrivals, decode_s)

    def deadline_s(self, ramp: RampConfig) -> float:
        """Orders the streams that are due: when the listener begins to suffer."""
        if self.player.dry_at_s is not None:
            return self.player.dry_at_s - ramp.margin_s
        return AT_ONCE if self.arrivals.last_at_s is None else self.arrivals.last_at_s + ramp.margin_s

    def peek(self, size: int) -> Tensor:
        """The next `size` frames, left where they are until `advance`."""
        assert 1 <= size <= self.num_pending
        parts: list[Tensor] = []
        for chunk in self._chunks:
            num_frames = chunk.shape[0]  # one, of most: not worth a slice each
            parts.append(chunk if num_frames <= size else chunk[:size])
            size -= min(size, num_frames)
            if size == 0:
                break
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def advance(self, size: int, samples: Tensor) -> Tensor:
        """Forgets the `size` frames that became `samples`; returns those samples that are to be handed
        out."""
        self.num_pending -= size
        while size:
            head = self._chunks.popleft()
            if head.shape[0] > size:
                self._chunks.appendleft(head[size:])
            size -= min(size, head.shape[0])
        skipped = min(self.skip_samples, samples.shape[0])
        self.skip_samples -= skipped
        self.is_done = self.ended and self.num_pending == 0
        return samples[skipped:]

    def check_integrity(self) -> str | None:
        held = sum(chunk.shape[0] for chunk in self._chunks)
        if held != self.num_pending:
            return f"{self.request_id} holds {held} frames but counts {self.num_pending}"
        return f"{self.request_id} is done but still open" if self.is_done else None
