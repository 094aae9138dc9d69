"""The allocator of an edge's pool: best fit over free spans that merge. Used by the sender alone."""

from __future__ import annotations

import bisect


class SpanPool:
    """Spans of `size` units. Lengths are the caller's to align."""

    def __init__(self, size: int) -> None:
        assert size > 0
        self.size = size
        self._free: list[tuple[int, int]] = [(0, size)]  # (offset, length), ascending, never adjacent
        self._taken: dict[int, int] = {}  # offset → length

    def take(self, length: int) -> int | None:
        """The offset of a new span, the lowest of the best fits; None when no free span is long enough."""
        assert 0 < length <= self.size
        fits = [(free, offset, i) for i, (offset, free) in enumerate(self._free) if free >= length]
        if not fits:
            return None
        free, offset, index = min(fits)
        self._free[index : index + 1] = [(offset + length, free - length)] if free > length else []
        self._taken[offset] = length
        return offset

    def give_back(self, offset: int) -> None:
        start, end = offset, offset + self._taken.pop(offset)
        index = bisect.bisect(self._free, (start, 0))
        if index < len(self._free) and self._free[index][0] == end:
            end += self._free.pop(index)[1]
        if index > 0 and sum(self._free[index - 1]) == start:
            index -= 1
            start = self._free.pop(index)[0]
        self._free.insert(index, (start, end - start))

    def check(self) -> None:
        """Free and taken spans cover the pool once, and no two free spans touch."""
        spans = [(o, n, True) for o, n in self._free] + [(o, n, False) for o, n in self._taken.items()]
        position, was_free = 0, False
        for offset, length, is_free in sorted(spans):
            assert offset == position, f"gap or overlap at {min(offset, position)}"
            assert not (is_free and was_free), f"adjacent free spans at {offset}"
            position, was_free = offset + length, is_free
        assert position == self.size, f"{position} of {self.size} accounted for"
