"""Incremental server-sent events: bytes in any split, complete events out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple


class SseEvent(NamedTuple):
    name: bytes
    data: bytes


class SseDecoder:
    """Holds at most one unfinished line and one unfinished event. Comments and ids are dropped."""

    def __init__(self) -> None:
        self._tail = b""
        self._name = b""
        self._data: list[bytes] = []

    @property
    def pending(self) -> bool:
        """True while bytes of an event whose end has not come are held."""
        return bool(self._tail or self._data)

    def feed(self, data: bytes) -> Iterator[SseEvent]:
        lines = (self._tail + data).split(b"\n")
        self._tail = lines.pop()
        for raw_line in lines:
            line = raw_line.removesuffix(b"\r")
            if not line:
                if self._data:
                    yield SseEvent(self._name, b"\n".join(self._data))
                self._name, self._data = b"", []
            elif line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif line.startswith(b"event:"):
                self._name = line[6:].strip()
