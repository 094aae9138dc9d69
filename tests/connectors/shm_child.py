"""The other process of the tests of the shared-memory edge."""

from __future__ import annotations

import asyncio
import sys

import msgspec
import torch

from connectors.shm import ShmDescription, ShmReceiver, ShmSender
from tests.connectors.edges import chunk

BLOCK_BYTES = 9000


def say(word: str) -> None:
    print(word, flush=True)


def block(seq: int) -> torch.Tensor:
    return torch.full((BLOCK_BYTES,), seq % 251, dtype=torch.uint8)


async def echo(forth: ShmDescription, back: ShmDescription) -> None:
    """Sends back what comes, until its sender is gone."""
    receiver, sender = ShmReceiver(forth), ShmSender(back)
    say("ready")
    while True:
        got = await receiver.receive()
        await sender.send(got)
        receiver.release(got)
        if got.request_id == "stop":
            return


async def hold(forth: ShmDescription, _: ShmDescription) -> None:
    """Receives two chunks and never releases them."""
    receiver = ShmReceiver(forth)
    held = [await receiver.receive() for _ in range(2)]
    say(f"holding {len(held)}")
    await asyncio.Event().wait()


async def flood(forth: ShmDescription, _: ShmDescription) -> None:
    """Sends a stream without end."""
    sender, seq = ShmSender(forth), 0
    say("ready")
    while True:
        await sender.send(chunk("old", seq, tensor=block(seq)))
        seq += 1


if __name__ == "__main__":
    torch.set_num_threads(1)
    role = {"echo": echo, "hold": hold, "flood": flood}[sys.argv[1]]
    edges = [msgspec.json.decode(argument, type=ShmDescription) for argument in sys.argv[2:]]
    asyncio.run(role(edges[0], edges[1]))
