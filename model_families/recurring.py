"""Values that are needed again and again for the same keys, kept within a bound."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

LARGEST_SHARE = 4  # what takes more than this part of the bound would put out everything else


class Recurring(Generic[K, V]):
    """`make(key)`, kept for the keys used last. Values are shared: not to be written to.

    `size` of a key in the unit of `capacity`, which all kept values together never exceed.
    """

    def __init__(self, make: Callable[[K], V], size: Callable[[K], int], capacity: int) -> None:
        assert capacity > 0
        self._make = make
        self._size = size
        self._capacity = capacity
        self._kept: OrderedDict[K, V] = OrderedDict()  # the one used last at the end
        self._kept_size = 0

    def of(self, key: K) -> V:
        found = self._kept.get(key)
        if found is not None:
            self._kept.move_to_end(key)
            return found
        value = self._make(key)
        if self._size(key) * LARGEST_SHARE <= self._capacity:
            self._keep(key, value)
        return value

    def _keep(self, key: K, value: V) -> None:
        self._kept[key] = value
        self._kept_size += self._size(key)
        while self._kept_size > self._capacity:
            oldest, _ = self._kept.popitem(last=False)
            self._kept_size -= self._size(oldest)
        assert 0 < self._kept_size <= self._capacity

    def __len__(self) -> int:
        return len(self._kept)
