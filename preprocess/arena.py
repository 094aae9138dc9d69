"""The shared arena of preprocessed features: one memfd, an allocator whose free bytes are the credits, and
leases.

Only the creating process allocates and frees. Workers and consumers inherit the file descriptor, map the
same pages and find a place by its FeatureRef. A memfd has no name: nothing can stay in /dev/shm.
"""

from __future__ import annotations

import asyncio
import bisect
import fcntl
import itertools
import mmap
import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from contracts.media import FeatureRef

PAGE = mmap.PAGESIZE
_serial = itertools.count()


class ArenaMapping:
    """The arena's pages in this process. `writable` is for preprocessing workers; consumers read."""

    def __init__(self, fd: int, name: str, size: int, *, writable: bool = False) -> None:
        """Maps `fd` and does not keep it (the mapping outlives it)."""
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self.name = name
        self.size = size
        self._pages = mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=protection)

    def view(self, ref: FeatureRef) -> np.ndarray:
        """Zero-copy array at `ref`, valid until its lease is released. Writable in a writable mapping."""
        assert ref.arena == self.name, (ref.arena, self.name)
        assert 0 <= ref.offset <= ref.offset + ref.nbytes <= self.size
        flat = np.frombuffer(self._pages, np.uint8, ref.nbytes, ref.offset)
        return flat.view(np.dtype(ref.dtype)).reshape(ref.shape)


@dataclass(frozen=True)
class Block:
    """`capacity` is `nbytes` rounded up to pages."""

    offset: int
    nbytes: int

    @property
    def capacity(self) -> int:
        return -(-self.nbytes // PAGE) * PAGE


class Lease:
    """One holder's claim on a block. The block is freed when the last lease on it is released."""

    def __init__(self, arena: Arena, block: Block) -> None:
        self._arena = arena
        self.block = block
        self.released = False
        arena._add_holder(block)

    def share(self) -> Lease:
        """Another claim on the same block, released on its own."""
        assert not self.released
        return Lease(self._arena, self.block)

    def release(self) -> None:
        """Idempotent. Views of the block must not be used any more."""
        if not self.released:
            self.released = True
            self._arena._drop_holder(self.block)


class Arena(ArenaMapping):
    """Creates the memfd and owns its allocation. All methods are called on one event loop."""

    def __init__(self, size: int) -> None:
        assert size > 0
        size = -(-size // PAGE) * PAGE
        self.fd = _sealed_memfd(size)
        super().__init__(self.fd, f"arena-{os.getpid()}-{next(_serial)}", size)
        self._free: list[tuple[int, int]] = [(0, size)]  # (offset, length), ascending, never adjacent
        self._holders: dict[int, int] = {}  # offset → leases on the block
        self._blocks: dict[int, Block] = {}
        self._waiting: deque[tuple[int, asyncio.Future[Block]]] = deque()
        self.on_pressure: Callable[[], None] | None = None  # called when a request has to wait

    @property
    def allocated_bytes(self) -> int:
        return sum(block.capacity for block in self._blocks.values())

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def request(self, nbytes: int) -> asyncio.Future[Block]:
        """A future block, granted in order of asking: when the arena is full it waits for releases.

        The caller owns the block once granted (wrap it in a Lease, or `give_back`), and must `withdraw` the
        future instead of cancelling it.
        """
        assert 0 < nbytes <= self.size
        future: asyncio.Future[Block] = asyncio.get_running_loop().create_future()
        self._waiting.append((nbytes, future))
        self._grant()
        if not future.done() and self.on_pressure is not None:
            self.on_pressure()
        return future

    def withdraw(self, future: asyncio.Future[Block]) -> None:
        """Ends a request, granted or not."""
        if future.done():
            self.give_back(future.result())
            return
        self._waiting = deque(entry for entry in self._waiting if entry[1] is not future)
        future.cancel()
        self._grant()

    def give_back(self, block: Block) -> None:
        """Frees a block that no lease holds."""
        assert block.offset not in self._holders
        self._free_block(block)

    def check_integrity(self) -> str | None:
        """None when allocated and free bytes add up to the size without overlap; else the first problem."""
        spans = [(offset, length, "free") for offset, length in self._free]
        spans += [(b.offset, b.capacity, "allocated") for b in self._blocks.values()]
        position, previous = 0, ""
        for offset, length, kind in sorted(spans):
            if offset != position:
                return (
                    f"{'overlap' if offset < position else 'gap'} at {min(offset, position)} of {self.name}"
                )
            if kind == previous == "free":
                return f"adjacent free spans at {offset} of {self.name}"
            position, previous = offset + length, kind
        if position != self.size:
            return f"{self.name}: {position} bytes accounted for, {self.size} exist"
        if not set(self._holders) <= set(self._blocks):
            return f"{self.name}: a lease on a freed block"
        return None

    def close(self) -> None:
        """Closes the descriptor; pages live on while a mapping or a view of them does."""
        os.close(self.fd)

    def _grant(self) -> None:
        while self._waiting:
            nbytes, future = self._waiting[0]
            block = self._take(nbytes)
            if block is None:
                return  # strictly in order: a small request never starves a large one
            self._waiting.popleft()
            future.set_result(block)

    def _take(self, nbytes: int) -> Block | None:
        block = Block(0, nbytes)
        fits = [(length, i) for i, (_, length) in enumerate(self._free) if length >= block.capacity]
        if not fits:
            return None
        length, index = min(fits)  # best fit
        offset = self._free[index][0]
        rest = (offset + block.capacity, length - block.capacity)
        self._free[index : index + 1] = [rest] if rest[1] else []
        block = Block(offset, nbytes)
        assert offset not in self._blocks
        self._blocks[offset] = block
        return block

    def _free_block(self, block: Block) -> None:
        owned = self._blocks.pop(block.offset)
        assert owned == block
        start, end = block.offset, block.offset + block.capacity
        index = bisect.bisect(self._free, (start, 0))
        if index < len(self._free) and self._free[index][0] == end:
            end += self._free.pop(index)[1]
        if index > 0 and sum(self._free[index - 1]) == start:
            index -= 1
            start = self._free.pop(index)[0]
        self._free.insert(index, (start, end - start))
        self._grant()

    def _add_holder(self, block: Block) -> None:
        assert self._blocks[block.offset] == block
        self._holders[block.offset] = self._holders.get(block.offset, 0) + 1

    def _drop_holder(self, block: Block) -> None:
        self._holders[block.offset] -= 1
        if self._holders[block.offset] == 0:
            del self._holders[block.offset]
            self._free_block(block)


def _sealed_memfd(size: int) -> int:
    fd = os.memfd_create("omnistage-features", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    # A worker gone wrong must not shrink the file: reading past its end would kill this process (SIGBUS).
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return fd
