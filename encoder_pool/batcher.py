"""Which queued items run in the next forward: first come, first served, within budgets."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Protocol, TypeVar

from contracts.media import MediaItem


@dataclass(frozen=True)
class BatchLimits:
    """Bounds on one forward. An item is never split: one that exceeds a bound by itself runs alone."""

    max_tokens: int = 16384  # embedding rows, after spatial merging
    max_patches: int = 65536  # what the tower's memory grows with
    max_items: int = 64

    def __post_init__(self) -> None:
        assert min(self.max_tokens, self.max_patches, self.max_items) > 0


class Queued(Protocol):
    @property
    def item(self) -> MediaItem: ...


Q = TypeVar("Q", bound=Queued)


def form_batch(queue: Iterable[Q], limits: BatchLimits) -> list[Q]:
    """The longest prefix of `queue` within the limits, and always its first entry.

    A prefix, so that no item is overtaken: none can starve.
    """
    batch: list[Q] = []
    num_tokens = num_patches = 0
    for entry in queue:
        num_tokens += entry.item.num_tokens
        num_patches += prod(entry.item.grid_thw)
        over = num_tokens > limits.max_tokens or num_patches > limits.max_patches
        if batch and (over or len(batch) == limits.max_items):
            break
        batch.append(entry)
    return batch
