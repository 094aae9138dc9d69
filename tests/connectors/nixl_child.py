"""The other process of the tests of the NIXL edge."""

from __future__ import annotations

import asyncio
import sys
import time

import msgspec
import torch

from connectors.nixl import NixlDescription, NixlReceiver, NixlSender
from tests.connectors.edges import chunk
from tests.connectors.shm_child import block, say


async def echo(forth: NixlDescription, back: NixlDescription) -> None:
    """Sends back what comes, until it is told to stop; then says what share of a core waiting took."""
    receiver, sender = NixlReceiver(forth), NixlSender(back)
    say("ready")
    while True:
        got = await receiver.receive()
        await sender.send(got)
        receiver.release(got)
        if got.request_id == "stop":
            break
        if got.request_id == "idle":
            started, used = time.monotonic(), time.process_time()
            receiver.release(await receiver.receive())
            say(f"idle {(time.process_time() - used) / (time.monotonic() - started)}")


async def hold(forth: NixlDescription, _: NixlDescription) -> None:
    """Receives two chunks and never releases them."""
    receiver = NixlReceiver(forth)
    held = [await receiver.receive() for _ in range(2)]
    say(f"holding {len(held)}")
    await asyncio.Event().wait()


async def flood(forth: NixlDescription, _: NixlDescription) -> None:
    """Sends a stream without end."""
    sender, seq = NixlSender(forth), 0
    say("ready")
    while True:
        await sender.send(chunk("old", seq, tensor=block(seq)))
        seq += 1


if __name__ == "__main__":
    torch.set_num_threads(1)
    role = {"echo": echo, "hold": hold, "flood": flood}[sys.argv[1]]
    edges = [msgspec.json.decode(argument, type=NixlDescription) for argument in sys.argv[2:]]
    asyncio.run(role(edges[0], edges[1]))
