"""The embedding cache's second tier: evicted embeddings in host memory, bounded in bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

import torch
from torch import Tensor

from encoder_pool.slabs import Place, Slabs, aligned, pin

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, eq=False)
class _Demoted:
    embeddings: Tensor
    place: Place | None  # in a slab, which it is a view of

    @property
    def cost(self) -> int:
        """Bytes of memory behind it."""
        return aligned(self.embeddings.nbytes) if self.place is not None else self.embeddings.nbytes


class HostTier(Generic[K]):
    """Least recently demoted goes first. In slabs of pinned memory when the embeddings come from a CUDA
    device: one that no slab has room for yet, or that is larger than any may be, is forgotten.

    Copies run on the device's current stream in both directions, so a promotion cannot overtake the demotion
    that it reads, and no demotion what was read from its place before.
    """

    def __init__(self, capacity_bytes: int, device: torch.device, slabs: Slabs | None = None) -> None:
        self._capacity_bytes = capacity_bytes
        self._device = device
        if slabs is None and device.type == "cuda" and capacity_bytes:
            slabs = Slabs(capacity_bytes, partial(pin, device))
        self._slabs = slabs
        self._entries: OrderedDict[K, _Demoted] = OrderedDict()
        self._bytes = 0

    def put(self, key: K, embeddings: Tensor) -> None:
        """Copies `embeddings`; drops older entries, or the new one when it exceeds the tier."""
        self.discard(key)
        entry = self._on_heap(embeddings) if self._slabs is None else self._in_slab(embeddings, self._slabs)
        if entry is None:
            return
        entry.embeddings.copy_(embeddings, non_blocking=self._slabs is not None)
        self._entries[key] = entry
        self._bytes += entry.cost

    def take(self, key: K) -> Tensor | None:
        """Removes the entry and returns it as a tensor of its own on the device."""
        found = self._entries.get(key)
        if found is None:
            return None
        # Out of a slab as a copy; on a CPU encoder the host copy itself moves up.
        in_slab = found.place is not None
        promoted = found.embeddings.to(self._device, non_blocking=in_slab, copy=in_slab)
        self.discard(key)
        return promoted

    def discard(self, key: K) -> None:
        found = self._entries.pop(key, None)
        if found is None:
            return
        self._bytes -= found.cost
        if found.place is not None:
            assert self._slabs is not None
            self._slabs.give_back(found.place)

    def clear(self) -> None:
        for key in self.keys():
            self.discard(key)
        assert self._bytes == 0

    def keys(self) -> list[K]:
        return list(self._entries)

    @property
    def num_bytes(self) -> int:
        return self._bytes

    def check_integrity(self) -> str | None:
        held = sum(entry.cost for entry in self._entries.values())
        if held != self._bytes:
            return f"host tier holds {held} bytes but counts {self._bytes}"
        if held > self._capacity_bytes:
            return f"host tier holds {held} bytes, over its {self._capacity_bytes}"
        if self._slabs is None:
            return None
        places = [entry.place for entry in self._entries.values()]
        return self._slabs.check_integrity([place for place in places if place is not None])

    def _on_heap(self, embeddings: Tensor) -> _Demoted | None:
        if embeddings.nbytes > self._capacity_bytes:
            return None
        while self._bytes + embeddings.nbytes > self._capacity_bytes:
            self._drop_oldest()
        return _Demoted(torch.empty_like(embeddings, device="cpu"), None)

    def _in_slab(self, embeddings: Tensor, slabs: Slabs) -> _Demoted | None:
        if not embeddings.nbytes or not slabs.fits(embeddings.nbytes):
            return None
        while (place := slabs.take(embeddings.nbytes)) is None:
            self._drop_oldest()
        return _Demoted(place.memory.view(embeddings.dtype).view(embeddings.shape), place)

    def _drop_oldest(self) -> None:
        self.discard(next(iter(self._entries)))
