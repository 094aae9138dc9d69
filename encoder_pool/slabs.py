"""Pinned host memory in large pieces that are kept: pinning takes milliseconds, finding a place none."""

from __future__ import annotations

import threading
from bisect import bisect
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

SLAB_BYTES = 64 << 20
ALIGNMENT = 512  # bytes; of every place

Allocate = Callable[[int], Tensor]
Start = Callable[[Callable[[], None]], None]


@dataclass(frozen=True)
class Place:
    """Bytes of a slab, until they are given back."""

    slab: int
    start: int
    memory: Tensor  # uint8, as many as were asked for

    @property
    def end(self) -> int:
        return self.start + aligned(self.memory.nbytes)


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def pin(device: torch.device, nbytes: int) -> Tensor:
    """`device`: a thread that pins for none in particular would open the first one, and take memory there."""
    with torch.cuda.device(device):
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


def in_a_thread(run: Callable[[], None]) -> None:
    threading.Thread(target=run, name="pin-memory", daemon=True).start()


class _Slab:
    """`gaps`: free (start, end), ascending; no two touch."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.gaps: list[tuple[int, int]] = [(0, memory.nbytes)]

    def take(self, nbytes: int) -> int | None:
        """Where the first gap of that size begins."""
        for index, (start, end) in enumerate(self.gaps):
            if end - start >= nbytes:
                self.gaps[index : index + 1] = [(start + nbytes, end)] if end - start > nbytes else []
                return start
        return None

    def give_back(self, start: int, end: int) -> None:
        index = bisect(self.gaps, (start, end))
        before, behind = self.gaps[:index], self.gaps[index:]
        assert not before or before[-1][1] <= start, "free already"
        assert not behind or end <= behind[0][0], "free already"
        if before and before[-1][1] == start:
            start = before.pop()[0]
        if behind and behind[0][0] == end:
            end = behind.pop(0)[1]
        self.gaps = [*before, (start, end), *behind]


class Slabs:
    """At most `capacity_bytes`, in powers of two, which is what torch pins. The first slab is begun at once,
    and the next when something is put into the last; `start` runs an allocation beside everything else.

    Used by one thread. Of whoever copies to or from a place: places that are given back are taken again at
    once, so all copies belong on one stream.
    """

    def __init__(
        self,
        capacity_bytes: int,
        allocate: Allocate,
        start: Start = in_a_thread,
        slab_bytes: int = SLAB_BYTES,
    ) -> None:
        self._left_bytes = capacity_bytes  # nothing is allocated of it yet
        self._allocate = allocate
        self._start = start
        self._slab_bytes = slab_bytes
        self._slabs: list[_Slab] = []
        self._arrived: list[Tensor] = []  # appended to by the thread that allocates
        self._num_begun = 0
        self._begin()

    def take(self, nbytes: int) -> Place | None:
        """None: there is no gap as large, now."""
        size = aligned(nbytes)
        self._adopt()
        for number, slab in enumerate(self._slabs):
            start = slab.take(size)
            if start is not None:
                if number == len(self._slabs) - 1:
                    self._begin()
                return Place(number, start, slab.memory[start : start + nbytes])
        return None

    def give_back(self, place: Place) -> None:
        self._slabs[place.slab].give_back(place.start, place.end)

    def fits(self, nbytes: int) -> bool:
        """Whether there is a slab as large; if not, one is begun, if it may be."""
        self._adopt()
        if any(slab.memory.nbytes >= aligned(nbytes) for slab in self._slabs):
            return True
        self._begin(aligned(nbytes))
        return False

    def check_integrity(self, used: list[Place]) -> str | None:
        """`used`: the places that have not been given back."""
        for number, slab in enumerate(self._slabs):
            parts = sorted([*slab.gaps, *((p.start, p.end) for p in used if p.slab == number)])
            ends = [0, *(end for _, end in parts)]
            if [start for start, _ in parts] != ends[:-1] or ends[-1] != slab.memory.nbytes:
                return f"places and gaps of slab {number} do not lie side by side: {parts}"
        return None

    def _adopt(self) -> None:
        while len(self._slabs) < len(self._arrived):
            self._slabs.append(_Slab(self._arrived[len(self._slabs)]))

    def _begin(self, at_least: int = ALIGNMENT) -> None:
        """Unless one is on its way, or `at_least` bytes are not left."""
        size = min(_power_from(max(at_least, self._slab_bytes)), _power_within(self._left_bytes))
        if self._num_begun > len(self._arrived) or size < at_least:
            return
        self._num_begun += 1
        self._left_bytes -= size
        self._start(lambda: self._arrived.append(self._allocate(size)))


def _power_from(nbytes: int) -> int:
    return 1 << (nbytes - 1).bit_length()


def _power_within(nbytes: int) -> int:
    return 1 << nbytes.bit_length() >> 1
