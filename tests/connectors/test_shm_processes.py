"""The shared-memory edge between two processes, and what is left of it when one of them is killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
from collections.abc import Iterator

import pytest
import torch

from connectors.shm import ShmEdge, ShmReceiver, ShmSender
from contracts.chunks import Chunk
from contracts.errors import PeerLost
from tests.connectors.children import child_process, kill, word
from tests.connectors.edges import chunk, edge_of, run
from tests.connectors.shm_child import block


@contextlib.contextmanager
def child(role: str, forth: ShmEdge, back: ShmEdge) -> Iterator[subprocess.Popen[str]]:
    """Attached and at work when it is handed out; killed at the end."""
    with child_process(
        "tests.connectors.shm_child", role, [forth.description(), back.description()], forth.fds + back.fds
    ) as process:
        yield process


@pytest.fixture
def edges() -> Iterator[tuple[ShmEdge, ShmEdge]]:
    names = set(os.listdir("/dev/shm"))
    with edge_of(64 << 10, 4) as forth, edge_of(64 << 10, 4) as back:
        yield forth, back
    assert set(os.listdir("/dev/shm")) == names


def test_two_processes_exchange_every_byte_in_order(edges: tuple[ShmEdge, ShmEdge]) -> None:
    forth, back = edges
    count = 300

    def sent(seq: int) -> Chunk:
        tensors = {"b": block(seq), "w": torch.full((seq % 9, 3), seq, dtype=torch.bfloat16)}
        return Chunk("r", "s", seq, seq == count - 1, tensors, {"seq": seq})

    async def produce(sender: ShmSender) -> None:
        for seq in range(count):
            await sender.send(sent(seq))
        await sender.send(chunk("stop", 0))

    async def main() -> None:
        sender, receiver = ShmSender(forth.description()), ShmReceiver(back.description())
        task = asyncio.create_task(produce(sender))
        for seq in range(count):
            got, expected = await receiver.receive(), sent(seq)
            assert (got.request_id, got.stream, got.seq, got.last) == ("r", "s", seq, seq == count - 1)
            assert got.meta == expected.meta
            assert {name: t.tolist() for name, t in got.tensors.items()} == {
                name: t.tolist() for name, t in expected.tensors.items()
            }
            receiver.release(got)
        await task
        assert (await receiver.receive()).request_id == "stop"
        sender.close()
        receiver.close()

    with child("echo", forth, back) as process:
        run(main())
        assert process.wait(20) == 0


def test_a_killed_receiver_leaves_every_credit_to_the_next(edges: tuple[ShmEdge, ShmEdge]) -> None:
    forth, back = edges

    async def main(process: subprocess.Popen[str]) -> None:
        sender = ShmSender(forth.description())
        for seq in range(4):
            await sender.send(chunk("old", seq, tensor=block(seq)))
        assert await word(process) == "holding 2"
        waiting = asyncio.create_task(sender.send(chunk("old", 4)))
        await asyncio.sleep(0)
        kill(process)
        forth.mark_dead("receiver")
        with pytest.raises(PeerLost):
            await waiting
        forth.reset()
        for seq in range(4):  # all credits, with nobody there yet
            await sender.send(chunk("old", seq, tensor=block(seq + 100)))
        receiver = ShmReceiver(forth.description())
        for seq in range(4):
            got = await receiver.receive()
            assert got.seq == seq
            assert torch.equal(got.tensors["x"], block(seq + 100))
            receiver.release(got)
        sender._follow()
        sender.check()
        assert not sender._in_use
        sender.close()
        receiver.close()

    with child("hold", forth, back) as process:
        run(main(process))


def test_a_sender_killed_in_a_stream_leaves_nothing_half_written(edges: tuple[ShmEdge, ShmEdge]) -> None:
    forth, back = edges

    async def drain(receiver: ShmReceiver, seq: int) -> None:
        while True:
            got = await receiver.receive()
            assert got.seq == seq
            assert torch.equal(got.tensors["x"], block(seq))
            receiver.release(got)
            seq += 1

    async def main(process: subprocess.Popen[str]) -> None:
        receiver = ShmReceiver(forth.description())
        for seq in range(50):
            got = await receiver.receive()
            assert torch.equal(got.tensors["x"], block(seq))
            receiver.release(got)
        held = await receiver.receive()
        kill(process)
        forth.mark_dead("sender")
        with pytest.raises(PeerLost):  # after what was sent, all of it whole
            await drain(receiver, 51)
        forth.reset()
        receiving = asyncio.create_task(receiver.receive())
        sender = ShmSender(forth.description())
        sending = asyncio.create_task(sender.send(chunk("new", 0, tensor=block(7))))
        await asyncio.sleep(0)
        assert torch.equal(held.tensors["x"], block(50))
        receiver.release(held)
        await sending
        got = await receiving
        assert got.request_id == "new"
        assert torch.equal(got.tensors["x"], block(7))
        sender.close()
        receiver.close()

    with child("flood", forth, back) as process:
        run(main(process))
