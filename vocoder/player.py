"""The player a stream is made for: plays at 1x from its first sample on; knows when it runs dry."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(eq=False)
class Player:
    """Follows the samples as they are handed out; times are seconds of one monotonic clock."""

    dry_at_s: float | None = None  # when all that was handed out has been played; None: not begun
    underruns: int = 0
    underrun_s: float = 0.0

    @property
    def has_begun(self) -> bool:
        return self.dry_at_s is not None

    def receive(self, duration_s: float, now_s: float) -> float:
        """Takes the next samples; returns for how long the player had been silent before them."""
        if self.dry_at_s is None:
            self.dry_at_s = now_s
        silence_s = max(0.0, now_s - self.dry_at_s)
        self.dry_at_s = max(self.dry_at_s, now_s) + duration_s
        self.underruns += silence_s > 0
        self.underrun_s += silence_s
        return silence_s
