"""The embedding cache: per item, bounded in bytes, reference-counted, with a second tier in host memory.

inserted ──▶ in use ──last user releases──▶ idle (LRU) ──trimmed──▶ host tier ──hit──▶ in use
               ▲                              │
               └──────────── hit ─────────────┘
An entry dropped from the index while in use is detached: its last user frees it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from contracts.digests import ContentDigest
from encoder_pool.host_tier import HostTier


@dataclass(frozen=True)
class EmbeddingKey:
    pixel_digest: ContentDigest
    encoder_id: str
    cache_salt: str | None


@dataclass(frozen=True)
class User:
    """Who holds an entry: one item of one request, once per delivery it has not released yet."""

    request_id: str
    item_index: int


@dataclass(frozen=True)
class CacheConfig:
    """Both 0 turns the cache off: embeddings are forgotten when their last user releases them."""

    device_bytes: int = 1 << 30
    host_bytes: int = 0


@dataclass(eq=False)
class _Entry:
    key: EmbeddingKey
    embeddings: Tensor
    users: Counter[User] = field(default_factory=Counter)

    @property
    def nbytes(self) -> int:
        return self.embeddings.nbytes


@dataclass
class CacheCounters:
    queries: int = 0
    hits: int = 0
    host_hits: int = 0
    evictions: int = 0
    invalid: int = 0  # entries that did not fit the item that hit them


class EmbeddingCache:
    """Single-threaded. An entry with users is never evicted. Of what is idle nothing is beyond `device_bytes`
    after `trim`, which the owner calls once what is new has been handed over: evicting it first would make
    whoever waits for new embeddings wait for copies of old ones.
    """

    def __init__(self, config: CacheConfig, device: torch.device) -> None:
        self._capacity_bytes = config.device_bytes
        self._host: HostTier[EmbeddingKey] = HostTier(config.host_bytes, device)
        self._index: dict[EmbeddingKey, _Entry] = {}
        self._idle: OrderedDict[EmbeddingKey, _Entry] = OrderedDict()  # the indexed ones without users, LRU
        self._held: dict[User, list[_Entry]] = {}
        self._index_bytes = 0
        self._idle_bytes = 0
        self._held_bytes = 0
        self._since_trim_bytes = 0  # inserted or released
        self.counters = CacheCounters()

    # --- acquire and release ------------------------------------------------------------------------------
    def acquire(
        self, key: EmbeddingKey, shape: tuple[int, int], dtype: torch.dtype, user: User
    ) -> Tensor | None:
        """The cached embeddings, now held by `user`; None on a miss.

        A key is a hint: an entry of another shape or dtype than the item needs is dropped, a miss.
        """
        self.counters.queries += 1
        entry = self._index.get(key)
        if entry is not None and not _fits(entry.embeddings, shape, dtype):
            self._drop(entry)
            self.counters.invalid += 1
            entry = None
        if entry is None:
            return self._promote(key, shape, dtype, user)
        self.counters.hits += 1
        self._hold(entry, user)
        return entry.embeddings

    def insert(self, key: EmbeddingKey, embeddings: Tensor, users: Sequence[User]) -> Tensor:
        """Keeps fresh embeddings, held by `users`; returns them as stored. Evicts nothing: see `trim`."""
        assert users, "embeddings nobody waits for"
        entry = _Entry(key, _own_storage(embeddings))
        stale = self._index.get(key)
        if stale is not None:
            self._drop(stale)
        self._host.discard(key)
        self._index[key] = entry
        self._index_bytes += entry.nbytes
        self._since_trim_bytes += entry.nbytes
        for user in users:
            self._hold(entry, user)
        return entry.embeddings

    def release(self, user: User) -> None:
        """Returns one hold of `user`. Unknown users are ignored: an abort may have released it already."""
        held = self._held.get(user)
        if not held:
            return
        entry = held.pop(0)
        if not held:
            del self._held[user]
        self._unhold(entry, user)

    def release_request(self, request_id: str) -> None:
        for user in [u for u in self._held if u.request_id == request_id]:
            for entry in self._held.pop(user):
                self._unhold(entry, user)

    @property
    def excess_bytes(self) -> int:
        """What `trim` would free, at least."""
        return min(self._idle_bytes, max(0, self._index_bytes - self._capacity_bytes))

    def trim(self) -> None:
        """Evicts idle entries, the one used last last, until all that are left are within `device_bytes`."""
        while self.excess_bytes:
            entry = next(iter(self._idle.values()))
            self._drop(entry)
            self._host.put(entry.key, entry.embeddings)
            self.counters.evictions += 1
        self._since_trim_bytes = 0

    def reset(self) -> None:
        """Forgets everything. Entries in use stay valid for their users and are freed by the last one."""
        self._host.clear()
        for entry in list(self._index.values()):
            self._drop(entry)

    # --- numbers and laws ---------------------------------------------------------------------------------
    @property
    def held_bytes(self) -> int:
        """Bytes of all entries that somebody holds, indexed or detached."""
        return self._held_bytes

    def stats(self) -> dict[str, float]:
        c = self.counters
        return {
            "encoder_cache_queries_total": c.queries,
            "encoder_cache_hits_total": c.hits,
            "encoder_cache_host_hits_total": c.host_hits,
            "encoder_cache_evictions_total": c.evictions,
            "encoder_cache_invalid_total": c.invalid,
            "encoder_cache_entries": len(self._index),
            "encoder_cache_bytes": self._index_bytes,
            "encoder_cache_host_bytes": self._host.num_bytes,
            "encoder_cache_held_bytes": self.held_bytes,
        }

    def check_integrity(self) -> str | None:
        """The first broken conservation law, or None."""
        indexed = sum(e.nbytes for e in self._index.values())
        idle = {key for key, e in self._index.items() if not e.users}
        owners: Counter[tuple[int, User]] = Counter(
            (id(entry), user) for user, held in self._held.items() for entry in held
        )
        counted = Counter({(id(e), u): n for e in self._held_entries() for u, n in e.users.items()})
        if indexed != self._index_bytes:
            return f"entries hold {indexed} bytes but {self._index_bytes} are counted"
        if self.excess_bytes > self._since_trim_bytes:
            return f"{self.excess_bytes} bytes idle beyond {self._capacity_bytes}, trimmed before most came"
        if idle != set(self._idle) or self._idle_bytes != sum(e.nbytes for e in self._idle.values()):
            return "the idle list differs from the entries without users"
        if owners != counted:
            return "reference counts differ from the users that hold entries"
        if self._held_bytes != sum(e.nbytes for e in self._held_entries()):
            return "the bytes in use differ from the entries that are held"
        if both := set(self._index) & set(self._host.keys()):
            return f"{len(both)} entries are in both tiers"
        return self._host.check_integrity()

    # --- inside -------------------------------------------------------------------------------------------
    def _promote(
        self, key: EmbeddingKey, shape: tuple[int, int], dtype: torch.dtype, user: User
    ) -> Tensor | None:
        embeddings = self._host.take(key)
        if embeddings is None:
            return None
        if not _fits(embeddings, shape, dtype):
            self.counters.invalid += 1
            return None
        self.counters.hits += 1
        self.counters.host_hits += 1
        return self.insert(key, embeddings, [user])

    def _drop(self, entry: _Entry) -> None:
        """Takes an entry out of the index; one in use becomes detached."""
        assert self._index.pop(entry.key) is entry
        self._index_bytes -= entry.nbytes
        if not entry.users:
            del self._idle[entry.key]
            self._idle_bytes -= entry.nbytes

    def _hold(self, entry: _Entry, user: User) -> None:
        if not entry.users:
            self._held_bytes += entry.nbytes
            if self._idle.pop(entry.key, None) is not None:
                self._idle_bytes -= entry.nbytes
        entry.users[user] += 1
        self._held.setdefault(user, []).append(entry)

    def _unhold(self, entry: _Entry, user: User) -> None:
        assert entry.users[user] > 0
        entry.users[user] -= 1
        if not entry.users[user]:
            del entry.users[user]
        if entry.users:
            return
        self._held_bytes -= entry.nbytes
        if self._index.get(entry.key) is entry:
            self._idle[entry.key] = entry
            self._idle_bytes += entry.nbytes
            self._since_trim_bytes += entry.nbytes

    def _held_entries(self) -> list[_Entry]:
        return list({id(e): e for held in self._held.values() for e in held}.values())


def _fits(embeddings: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> bool:
    return tuple(embeddings.shape) == shape and embeddings.dtype == dtype


def _own_storage(embeddings: Tensor) -> Tensor:
    """A slice of a batch's output would keep the whole batch alive: copy it out."""
    embeddings = embeddings.detach()
    if embeddings.is_contiguous() and embeddings.untyped_storage().nbytes() == embeddings.nbytes:
        return embeddings
    return embeddings.clone(memory_format=torch.contiguous_format)
