"""EarlyChunks: an edge may be faster than the control plane, so what comes before a request's opening message
waits for it."""

from __future__ import annotations

from contracts.chunks import Chunk


class EarlyChunks:
    """Remembers a request from its first chunk or its opening, whichever is first, until `forget`.

    Holds at most what an answer has of chunks, for at most the requests that the front process lets in. The
    coordinator has a stage forget only when nothing of the request can come from above any more.
    """

    def __init__(self) -> None:
        self._held: dict[str, list[Chunk]] = {}
        self._open: set[str] = set()

    def open(self, request_id: str) -> list[Chunk]:
        """The chunks that came before, in order; later ones are passed on as they come."""
        assert request_id not in self._open, f"{request_id} is open already"
        self._open.add(request_id)
        return self._held.pop(request_id, [])

    def accept(self, chunk: Chunk) -> list[Chunk]:
        """The chunk, if its request is open."""
        if chunk.request_id in self._open:
            return [chunk]
        self._held.setdefault(chunk.request_id, []).append(chunk)
        return []

    def forget(self, request_id: str) -> None:
        self._open.discard(request_id)
        self._held.pop(request_id, None)

    @property
    def is_empty(self) -> bool:
        return not self._open and not self._held

    @property
    def num_held(self) -> int:
        return sum(len(chunks) for chunks in self._held.values())
