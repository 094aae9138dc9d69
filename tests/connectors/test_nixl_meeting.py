"""How the ends of a NIXL edge meet: at any moment, in any order, over networks that break, and never asleep
over what has come."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest
import torch

from connectors import nixl_sender, wire
from connectors.link import Link, connect
from connectors.nixl import NixlEdge, NixlReceiver, NixlSender
from connectors.nixl_agent import process_driver
from connectors.nixl_messages import Announce, Attach, Meet, Open, attach, from_parent, reach_parent, tell
from connectors.wire import Memory
from contracts.chunks import Chunk
from contracts.errors import EngineError
from tests.connectors.edges import chunk, run, settle
from tests.connectors.test_contract import has_nixl

pytestmark = pytest.mark.skipif(not has_nixl(), reason="the extra omnistage[nixl] is not installed")

NUM_MEETINGS, NUM_CHUNKS = 80, 12


@pytest.fixture
def edge() -> Iterator[NixlEdge]:
    with contextlib.closing(NixlEdge.create("test", 64 << 10, 4)) as edge:
        yield edge


def announcement(sent: Chunk) -> Announce:
    packed = wire.pack(sent)
    body = bytearray(packed.size)
    wire.write(Memory(memoryview(body)), 0, packed)
    return Announce(0, sent.request_id, len(packed.header), packed.size, None, 0, bytes(body))


def test_a_sender_that_connects_and_greets_later_is_heard(edge: NixlEdge) -> None:
    description = edge.description()

    async def main() -> None:
        with contextlib.closing(NixlReceiver(description)) as receiver:
            parent = reach_parent(description)
            epoch, said = attach(description, parent, "sender")
            while not said:
                parent.wait()
                said = from_parent(parent)
            (meet,) = said
            assert isinstance(meet, Meet)
            link = connect(meet.host, meet.port)
            receiving = asyncio.create_task(receiver.receive())
            await settle()  # it has found a connection that has said nothing
            tell(link, Open(description.token, epoch, process_driver().name, b"", 0))
            tell(link, announcement(chunk("r", 0)))
            assert (await receiving).request_id == "r"
            link.close()
            parent.close()

    run(main())


def test_every_meeting_of_two_loops_ends_in_all_chunks(edge: NixlEdge) -> None:
    """The two ends look at different moments of the other's coming, also on behalf of cancellations."""

    async def produce(sender: NixlSender, which: int) -> None:
        for seq in range(NUM_CHUNKS):
            await sender.send(chunk(f"r{which}", seq, tensor=torch.tensor([seq])))
            if seq % 3 == which % 3:
                sender.cancel("another")
                await asyncio.sleep(0)

    async def consume(receiver: NixlReceiver, which: int) -> list[int]:
        values = []
        for seq in range(NUM_CHUNKS):
            receiving = asyncio.create_task(receiver.receive())
            await asyncio.sleep(0)
            if seq % 2 == which % 2:
                receiver.cancel("another")
            got = await receiving
            values.append(int(got.tensors["x"]))
            receiver.release(got)
        return values

    for which in range(NUM_MEETINGS):
        with contextlib.ExitStack() as stack:
            sender = stack.enter_context(contextlib.closing(NixlSender(edge.description())))
            receiver = stack.enter_context(contextlib.closing(NixlReceiver(edge.description())))
            thread = threading.Thread(target=lambda s=sender, w=which: asyncio.run(produce(s, w)))
            thread.start()
            try:
                assert run(consume(receiver, which)) == list(range(NUM_CHUNKS))
            finally:
                thread.join()
        edge.mark_dead("sender")
        edge.mark_dead("receiver")
        edge.reset()


def test_an_end_that_died_unseen_leaves_the_edge_to_the_next(edge: NixlEdge) -> None:
    """A worker that is killed as it starts may be seen only after the reset that its death caused."""
    description = edge.description()

    async def main() -> None:
        with contextlib.closing(NixlSender(description)) as sender:
            sending = asyncio.create_task(sender.send(chunk("r", 0)))
            await settle()
            ghost = Link(socket.create_connection((description.host, description.port)))
            tell(ghost, Attach(description.token, "receiver", 1))
            ghost.close()
            while not sender._is_gone():
                await asyncio.sleep(0)
            with contextlib.suppress(EngineError):
                await sending
            with contextlib.closing(NixlReceiver(description)) as receiver:
                while sender._is_gone():
                    await asyncio.sleep(0)
                await sender.send(chunk("s", 0))
                assert (await receiver.receive()).request_id == "s"

    run(main())


def test_a_receiver_out_of_reach_is_an_error_and_not_a_wait(
    edge: NixlEdge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_sender, "GRACE_S", 0.05)
    description = edge.description()

    async def main() -> None:
        with contextlib.closing(NixlSender(description)) as sender, socket.socket() as nobody:
            nobody.bind(("127.0.0.1", 0))  # and does not listen
            parent = reach_parent(description)
            attach(description, parent, "receiver", nobody.getsockname()[1])
            with pytest.raises(EngineError, match="nobody answers at 127"):
                await sender.send(chunk("r", 0))
            parent.close()

    run(main())
