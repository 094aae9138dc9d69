"""The connector contract: what every transport of chunks promises."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from connectors.stats import EdgeStats
from contracts.chunks import Chunk


class Sender(Protocol):
    @property
    def stats(self) -> EdgeStats: ...

    async def send(self, chunk: Chunk) -> None:
        """Waits for a free credit. Raises PeerLost when the receiver is gone. A chunk of a cancelled
        request is dropped."""
        ...

    def send_now(self, chunks: Sequence[Chunk]) -> int:
        """Sends the first of them, as many as there are credits for, all at once; returns how many: the
        others take `send`. None where a transport gains nothing by it. PeerLost as `send`."""
        ...

    def cancel(self, request_id: str) -> None:
        """Drops what is queued of the request; later sends of it are dropped too, until `forget`."""
        ...

    def forget(self, request_id: str) -> None:
        """The request is over on this side: keep no memory of its cancellation."""
        ...

    def close(self) -> None: ...


class Receiver(Protocol):
    @property
    def stats(self) -> EdgeStats: ...

    hands_over: bool  # tensors stay valid after `release` (in-process); else copy what outlives it

    async def receive(self) -> Chunk:
        """The next chunk, in order per (request, stream); its tensors are valid until `release`. Raises
        PeerLost."""
        ...

    def receive_now(self) -> list[Chunk]:
        """As many `receive`s as there are chunks now, at once; may leave them to `receive`."""
        ...

    async def renewed(self) -> None:
        """Right after PeerLost: returns when the edge was reset and `receive` waits for the next sender;
        never, where no sender can come back."""
        ...

    def release(self, *chunks: Chunk) -> None:
        """Returns their credits. Exactly once per received chunk."""
        ...

    def cancel(self, request_id: str) -> None:
        """Drops queued chunks of the request and frees their credits."""
        ...

    def close(self) -> None: ...
