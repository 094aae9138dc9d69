"""Which blocks hold the KV of which content: chained keys, compared in full on every hit."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from itertools import count

from lm_engine.block_pool import BlockPool

ROOT = 0  # identity of "nothing before": the parent of every first block

Extras = tuple[Hashable, ...]


BlockContent = tuple[bytes, Extras]
"""What a full block holds, given what lies before it: tokens and extras.

The tokens are the block's ids as 4-byte integers. Extras tell apart what token ids cannot: for each run of
media rows (pixel digest, first row, first position in the block, length), and in a first block the cache salt
and the adapter. A plain tuple: a prompt is hundreds of them, made, hashed and compared before its first step.
"""


class BlockKey:
    """Content after a parent, under a hash function of its own; with Python's the key is the pair itself. The
    hash only chooses a bucket: equality compares all of it."""

    __slots__ = ("_hash", "content", "parent")

    def __init__(self, parent: int, content: BlockContent, hash_function: Callable[[Hashable], int]) -> None:
        self.parent = parent
        self.content = content
        self._hash = hash_function((parent, content))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BlockKey) and self.parent == other.parent and self.content == other.content


@dataclass(frozen=True, slots=True)
class CachedBlock:
    """`identity` names the content and all before it. It is never given twice, so a child of an evicted
    parent can never be reached through whatever takes the parent's place."""

    block: int
    identity: int


class PrefixCache:
    """Registered blocks by key. The pool keeps them hittable after they are freed; reuse unregisters them."""

    def __init__(self, pool: BlockPool, hash_function: Callable[[Hashable], int] = hash) -> None:
        self._pool = pool
        self._hash_function = None if hash_function is hash else hash_function
        self._by_key: dict[Hashable, CachedBlock] = {}
        self._key_of: dict[int, Hashable] = {}
        self._identities = count(ROOT + 1)
        pool.on_reuse = self._forget

    def __len__(self) -> int:
        return len(self._by_key)

    def lookup(self, contents: Iterable[BlockContent]) -> list[CachedBlock]:
        """The longest chain of registered blocks that starts the contents. Takes no references."""
        hits: list[CachedBlock] = []
        find, hashes = self._by_key.get, self._hash_function
        parent = ROOT
        for content in contents:
            hit = find((parent, content) if hashes is None else BlockKey(parent, content, hashes))
            if hit is None:
                break
            hits.append(hit)
            parent = hit.identity
        return hits

    def register(self, block: int, parent: int, content: BlockContent) -> int:
        """Names the content of an owned, full block; returns its identity. When another block already holds
        the same content that one stays registered and its identity is returned."""
        hashes = self._hash_function
        key = (parent, content) if hashes is None else BlockKey(parent, content, hashes)
        known = self._by_key.get(key)
        if known is not None:
            return known.identity
        assert block not in self._key_of, f"block {block} is registered twice"
        entry = CachedBlock(block, next(self._identities))
        self._by_key[key] = entry
        self._key_of[block] = key
        self._pool.mark_cached(block)
        return entry.identity

    def reset(self) -> None:
        """Forgets everything, also of blocks in use: nothing computed before is ever hit again."""
        for block in list(self._key_of):
            self._forget(block)

    def _forget(self, block: int) -> None:
        del self._by_key[self._key_of.pop(block)]
        self._pool.unmark_cached(block)

    def check_integrity(self) -> str | None:
        if len(self._by_key) != len(self._key_of):
            return f"{len(self._by_key)} cached keys for {len(self._key_of)} cached blocks"
        for key, entry in self._by_key.items():
            if self._key_of.get(entry.block) is not key:
                return f"cached block {entry.block} has another key"
        marked = [block for block in range(self._pool.num_blocks) if self._pool.is_cached(block)]
        if sorted(self._key_of) != marked:
            return f"{len(marked)} blocks are marked cached, {len(self._key_of)} are registered"
        return None
