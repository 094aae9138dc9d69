"""The KV blocks of one engine: who holds each, and the order in which free ones are reused."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

SCRATCH = 0  # padding rows write there; as it is never owned, it doubles as the free list's sentinel


class BlockPool:
    """Blocks 1 … num_blocks - 1 are either owned (references ≥ 1) or in the free list.

    The free list is doubly linked through two arrays, least recently used first. A freed block that holds
    cached content (`mark_cached`) stays hittable there until `allocate` takes it, which calls `on_reuse`.
    """

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 2, num_blocks
        self.num_blocks = num_blocks
        self.num_free = num_blocks - 1
        self.on_reuse: Callable[[int], None] | None = None
        self._references = [0] * num_blocks
        self._cached = bytearray(num_blocks)
        self._next = [(i + 1) % num_blocks for i in range(num_blocks)]
        self._previous = [(i - 1) % num_blocks for i in range(num_blocks)]

    @property
    def num_owned(self) -> int:
        return self.num_blocks - 1 - self.num_free

    def allocate(self, count: int) -> list[int]:
        """Takes the least recently used free blocks; the caller has checked `num_free`."""
        assert 0 <= count <= self.num_free, f"{count} blocks of {self.num_free}"
        taken = []
        for _ in range(count):
            block = self._next[SCRATCH]
            self._unlink(block)
            if self._cached[block]:
                assert self.on_reuse is not None, "a cached block without a cache"
                self.on_reuse(block)
                assert not self._cached[block], f"block {block} is reused and still cached"
            self._references[block] = 1
            taken.append(block)
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """One more owner for each; free ones leave the free list."""
        references = self._references
        for block in blocks:
            assert block != SCRATCH, "the scratch block has no owner"
            if references[block] == 0:
                self._unlink(block)
            references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """One owner less for each. Tail first, so that a prefix outlives what depends on it."""
        for block in reversed(blocks):
            assert self._references[block] > 0, f"block {block} has no owner"
            self._references[block] -= 1
            if self._references[block] == 0:
                self._link(block)

    def num_unowned(self, blocks: Iterable[int]) -> int:
        return list(map(self._references.__getitem__, blocks)).count(0)

    def is_owned(self, block: int) -> bool:
        return self._references[block] > 0

    def mark_cached(self, block: int) -> None:
        assert self._references[block] > 0, f"block {block} is registered without an owner"
        self._cached[block] = 1

    def unmark_cached(self, block: int) -> None:
        self._cached[block] = 0

    def is_cached(self, block: int) -> bool:
        return bool(self._cached[block])

    def _link(self, block: int) -> None:
        # Blocks without content are reused before any cached one.
        before = self._previous[SCRATCH] if self._cached[block] else SCRATCH
        after = self._next[before]
        self._next[before] = self._previous[after] = block
        self._previous[block], self._next[block] = before, after
        self.num_free += 1

    def _unlink(self, block: int) -> None:
        before, after = self._previous[block], self._next[block]
        self._next[before], self._previous[after] = after, before
        self.num_free -= 1

    def check_integrity(self, owners: Mapping[int, int]) -> str | None:
        """`owners`: how many sequences hold each block. Returns the first broken law, or None."""
        free: list[int] = []
        block = self._next[SCRATCH]
        while block != SCRATCH and len(free) < self.num_blocks:
            if self._previous[self._next[block]] != block:
                return f"free list is broken at block {block}"
            free.append(block)
            block = self._next[block]
        if len(free) != self.num_free:
            return f"{len(free)} blocks in the free list, counted {self.num_free}"
        for block in free:
            if self._references[block] != 0:
                return f"block {block} is free with {self._references[block]} references"
        for block in range(self.num_blocks):
            if self._references[block] != owners.get(block, 0):
                return f"block {block}: {self._references[block]} references, {owners.get(block, 0)} owners"
        num_owned = sum(count > 0 for count in self._references)
        if num_owned + len(free) != self.num_blocks - 1:
            return f"{num_owned} owned + {len(free)} free blocks of {self.num_blocks - 1}"
        return None
