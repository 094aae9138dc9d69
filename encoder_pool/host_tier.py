"""The embedding cache's second tier: evicted embeddings in host memory, bounded in bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

import torch
from torch import Tensor

K = TypeVar("K", bound=Hashable)


class HostTier(Generic[K]):
    """Least recently demoted goes first. Pinned when the embeddings come from a CUDA device.

    Copies run on the device's current stream in both directions, so a promotion cannot overtake the demotion
    that it reads.
    """

    def __init__(self, capacity_bytes: int, device: torch.device) -> None:
        self._capacity_bytes = capacity_bytes
        self._device = device
        self._pinned = device.type == "cuda"
        self._entries: OrderedDict[K, Tensor] = OrderedDict()
        self._bytes = 0

    def put(self, key: K, embeddings: Tensor) -> None:
        """Copies `embeddings`; drops older entries, or the new one when it exceeds the tier."""
        cost = self._cost(embeddings)
        self.discard(key)
        if cost > self._capacity_bytes:
            return
        while self._bytes + cost > self._capacity_bytes:
            self.discard(next(iter(self._entries)))
        copy = torch.empty(embeddings.shape, dtype=embeddings.dtype, device="cpu", pin_memory=self._pinned)
        self._entries[key] = copy.copy_(embeddings, non_blocking=self._pinned)
        self._bytes += cost

    def take(self, key: K) -> Tensor | None:
        """Removes the entry and returns it as a tensor of its own on the device."""
        found = self._entries.get(key)
        if found is None:
            return None
        self.discard(key)
        # On a CPU encoder the host copy itself moves up.
        return found.to(self._device, non_blocking=self._pinned)

    def discard(self, key: K) -> None:
        found = self._entries.pop(key, None)
        if found is not None:
            self._bytes -= self._cost(found)

    def clear(self) -> None:
        self._entries.clear()
        self._bytes = 0

    def keys(self) -> list[K]:
        return list(self._entries)

    @property
    def num_bytes(self) -> int:
        return self._bytes

    def check_integrity(self) -> str | None:
        held = sum(self._cost(t) for t in self._entries.values())
        if held != self._bytes:
            return f"host tier holds {held} bytes but counts {self._bytes}"
        if held > self._capacity_bytes:
            return f"host tier holds {held} bytes, over its {self._capacity_bytes}"
        return None

    def _cost(self, embeddings: Tensor) -> int:
        """Bytes of memory behind the entry: torch's pinned allocator hands out powers of two."""
        if not self._pinned or embeddings.nbytes == 0:
            return embeddings.nbytes
        return 1 << (embeddings.nbytes - 1).bit_length()
