"""What the tests of the shared-memory edge share."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from connectors.shm import ShmEdge, ShmReceiver, ShmSender
from contracts.chunks import Chunk

TIMEOUT_S = 150  # a limit for what hangs; a machine may be busy


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, TIMEOUT_S))


def chunk(request_id: str, seq: int, *, stream: str = "s", last: bool = False, tensor=None) -> Chunk:
    tensors = {} if tensor is None else {"x": tensor}
    return Chunk(request_id, stream, seq, last, tensors, {"n": seq})


async def settle() -> None:
    """Lets every ready task of this loop run, and every bell be heard."""
    for _ in range(8):
        await asyncio.sleep(0)


@contextlib.contextmanager
def edge_of(capacity_bytes: int = 1 << 20, max_chunks: int = 4) -> Iterator[ShmEdge]:
    edge = ShmEdge.create("test", capacity_bytes, max_chunks)
    try:
        yield edge
    finally:
        edge.close()


@contextlib.contextmanager
def ends_of(edge: ShmEdge) -> Iterator[tuple[ShmSender, ShmReceiver]]:
    sender, receiver = ShmSender(edge.description()), ShmReceiver(edge.description())
    try:
        yield sender, receiver
        sender.check()
    finally:
        sender.close()
        receiver.close()
