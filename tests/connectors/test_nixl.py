"""The NIXL edge between two processes: bytes, strangers, an idle core, and what a killed process leaves."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import time
from collections.abc import Iterator

import pytest
import torch

from connectors.link import connect
from connectors.nixl import NixlEdge, NixlReceiver, NixlSender
from connectors.nixl_messages import Attach, tell
from contracts.chunks import Chunk
from contracts.errors import EngineError, PeerLost
from tests.connectors.children import child_process, kill, word
from tests.connectors.edges import TIMEOUT_S, chunk, run
from tests.connectors.shm_child import block
from tests.connectors.test_contract import has_nixl

pytestmark = pytest.mark.skipif(not has_nixl(), reason="the extra omnistage[nixl] is not installed")


@pytest.fixture
def edges() -> Iterator[tuple[NixlEdge, NixlEdge]]:
    with contextlib.ExitStack() as stack:
        forth = stack.enter_context(contextlib.closing(NixlEdge.create("forth", 64 << 10, 4)))
        back = stack.enter_context(contextlib.closing(NixlEdge.create("back", 64 << 10, 4)))
        yield forth, back


@contextlib.contextmanager
def child(role: str, edges: tuple[NixlEdge, NixlEdge]) -> Iterator[subprocess.Popen[str]]:
    with child_process(
        "tests.connectors.nixl_child", role, [edge.description() for edge in edges]
    ) as process:
        yield process


def test_two_processes_exchange_every_byte_and_burn_nothing_while_they_wait(
    edges: tuple[NixlEdge, NixlEdge],
) -> None:
    count = 120

    def sent(seq: int) -> Chunk:
        tensors = {"b": block(seq), "w": torch.full((seq % 9, 3), seq, dtype=torch.bfloat16)}
        return Chunk("r", "s", seq, seq == count - 1, tensors, {"seq": seq})

    async def produce(sender: NixlSender) -> None:
        for seq in range(count):
            await sender.send(sent(seq))

    async def main(process: subprocess.Popen[str]) -> None:
        sender, receiver = NixlSender(edges[0].description()), NixlReceiver(edges[1].description())
        task = asyncio.create_task(produce(sender))
        for seq in range(count):
            got, expected = await receiver.receive(), sent(seq)
            assert (got.seq, got.last, got.meta) == (seq, seq == count - 1, expected.meta)
            assert all(torch.equal(got.tensors[name], t) for name, t in expected.tensors.items())
            receiver.release(got)
        await task
        assert await word(process) == "ready"
        await sender.send(chunk("idle", 0, last=True))
        receiver.release(await receiver.receive())
        used = time.process_time()
        with pytest.raises(TimeoutError):  # half a second in which nothing comes
            await asyncio.wait_for(receiver.receive(), 0.5)
        assert time.process_time() - used < 0.1
        await sender.send(chunk("wake", 0, last=True))
        said, share = (await word(process)).split()
        assert said == "idle"
        assert float(share) < 0.2, "it polls while nothing is under way"
        await sender.send(chunk("stop", 0, last=True))
        assert (await receiver.receive()).request_id == "stop"
        sender.check()
        sender.close()
        receiver.close()

    with child("echo", edges) as process:
        run(main(process))
        assert process.wait(TIMEOUT_S) == 0


def test_a_killed_receiver_is_told_at_once_and_the_next_begins_afresh(
    edges: tuple[NixlEdge, NixlEdge],
) -> None:
    forth, _ = edges

    async def main(process: subprocess.Popen[str]) -> None:
        sender = NixlSender(forth.description())
        for seq in range(4):
            await sender.send(chunk("old", seq, tensor=block(seq)))
        assert await word(process) == "holding 2"
        waiting = asyncio.create_task(sender.send(chunk("old", 4)))
        await asyncio.sleep(0)
        kill(process)
        with pytest.raises(PeerLost):  # without anybody's word
            await waiting
        with pytest.raises(PeerLost):
            await sender.send(chunk("new", 0))
        forth.mark_dead("receiver")
        forth.reset()
        receiver = NixlReceiver(forth.description())
        with pytest.raises(PeerLost, match="middle of a stream"):
            await _send_when_reset(sender, chunk("old", 4))
        for seq in range(4):
            await sender.send(chunk("old", seq, tensor=block(seq + 100)))
        for seq in range(4):
            got = await receiver.receive()
            assert torch.equal(got.tensors["x"], block(seq + 100))
            receiver.release(got)
        sender.close()
        receiver.close()

    with child("hold", edges) as process:
        run(main(process))


async def _send_when_reset(sender: NixlSender, sent: Chunk) -> None:
    while sender._is_gone():
        await asyncio.sleep(0)
        sender._follow()
    await sender.send(sent)


def test_a_killed_sender_leaves_whole_chunks_and_views_that_stay(edges: tuple[NixlEdge, NixlEdge]) -> None:
    forth, _ = edges

    async def main(process: subprocess.Popen[str]) -> None:
        receiver = NixlReceiver(forth.description())
        for seq in range(20):
            got = await receiver.receive()
            assert torch.equal(got.tensors["x"], block(seq))
            receiver.release(got)
        held = await receiver.receive()
        kill(process)
        with pytest.raises(PeerLost):
            await _drain(receiver)
        renewed = asyncio.create_task(receiver.renewed())
        await asyncio.sleep(0)
        assert not renewed.done()
        forth.mark_dead("sender")
        forth.reset()
        await renewed
        sender = NixlSender(forth.description())
        await sender.send(chunk("new", 0, tensor=block(7)))
        got = await receiver.receive()
        while got.request_id == "old":  # had arrived
            receiver.release(got)
            got = await receiver.receive()
        assert torch.equal(got.tensors["x"], block(7))
        assert torch.equal(held.tensors["x"], block(20)), "the view of the old epoch was written to"
        receiver.release(held)
        receiver.release(got)
        sender.close()
        receiver.close()

    with child("flood", edges) as process:
        run(main(process))


async def _drain(receiver: NixlReceiver) -> None:
    seq = 21
    while True:
        got = await receiver.receive()
        assert torch.equal(got.tensors["x"], block(seq))
        receiver.release(got)
        seq += 1


def test_strangers_are_kept_out_and_an_end_is_taken_once(edges: tuple[NixlEdge, NixlEdge]) -> None:
    description = edges[0].description()

    async def main() -> None:
        receiver = NixlReceiver(description)
        stranger = connect(description.host, description.port)
        tell(stranger, Attach("wrong", "sender", 0))
        noise = socket.create_connection((description.host, receiver._listener.getsockname()[1]))
        noise.sendall(b"GET / HTTP/1.1\r\n\r\n")
        while not stranger.is_ended:
            stranger.wait()
            stranger.receive()
        with pytest.raises(EngineError, match="reset it first"):
            NixlReceiver(description)
        sender = NixlSender(description)
        await sender.send(chunk("r", 0, tensor=block(3)))
        assert torch.equal((await receiver.receive()).tensors["x"], block(3))
        noise.close()
        for closable in (stranger, sender, receiver):
            closable.close()

    run(main())
