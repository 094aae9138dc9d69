"""The protocol of the CUDA IPC edge over a fake device: order of copies, both kinds of credit, resets."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Iterator

import pytest
import torch

from connectors.cuda_ipc import POOL_GRANULE, CudaIpcEdge, CudaIpcReceiver, CudaIpcSender
from contracts.chunks import Chunk
from contracts.errors import EngineError, PeerLost
from tests.connectors.edges import chunk, run, settle
from tests.connectors.fake_device import FakeReceiveLane, FakeSendLane

DEVICE_BYTES = POOL_GRANULE


@pytest.fixture
def edge() -> Iterator[CudaIpcEdge]:
    with contextlib.closing(CudaIpcEdge.create("test", DEVICE_BYTES, 4, "cuda:0", "cuda:1")) as edge:
        yield edge


def sender_of(edge: CudaIpcEdge) -> CudaIpcSender:
    return CudaIpcSender(edge.description(), FakeSendLane(edge.description().device_bytes))


def receiver_of(edge: CudaIpcEdge) -> CudaIpcReceiver:
    return CudaIpcReceiver(edge.description(), FakeReceiveLane())


def lane_of(sender: CudaIpcSender) -> FakeSendLane:
    assert isinstance(sender._lane, FakeSendLane)
    return sender._lane


def block(value: int, nbytes: int = 1024) -> torch.Tensor:
    return torch.full((nbytes,), value, dtype=torch.uint8)


async def shown(receiver: CudaIpcReceiver) -> None:
    """Returns once a chunk can be received: its copy may take long."""
    while not receiver._queue:
        receiver._bell.watch(receiver._heard)
        receiver._collect()
        if not receiver._queue:
            await receiver._naps.nap()


def test_a_chunk_arrives_whole_by_both_ways_and_outlives_its_release(edge: CudaIpcEdge) -> None:
    async def main() -> None:
        sender, receiver = sender_of(edge), receiver_of(edge)
        tensors = {
            "host": torch.arange(5, dtype=torch.int32),
            "device": torch.randn(7, 3),
            "odd": torch.randn(11, dtype=torch.bfloat16),
            "none": torch.zeros(0, 4),
        }
        for seq in range(40):  # spans and slots come round many times
            sent = {name: tensor + seq for name, tensor in tensors.items()}
            await sender.send(Chunk("r", "s", seq, False, sent, {"seq": seq}))
            got = await receiver.receive()
            receiver.release(got)
            assert got.meta == {"seq": seq}
            assert got.nbytes == sum(tensor.nbytes for tensor in sent.values())
            assert {name: t.tolist() for name, t in got.tensors.items()} == {
                name: t.tolist() for name, t in sent.items()
            }
        sender.check()
        sender.close()
        receiver.close()

    run(main())


def test_send_does_not_wait_for_the_device_and_a_chunk_shows_in_order_once_its_copy_is_there(
    edge: CudaIpcEdge,
) -> None:
    async def main() -> None:
        sender, receiver = sender_of(edge), receiver_of(edge)
        lane = lane_of(sender)
        lane.go.clear()
        await sender.send(chunk("r", 0, tensor=block(3)))  # returns while the stream stands still
        await sender.send(chunk("r", 1))  # nothing of it is on the device, but it is behind
        receiving = asyncio.create_task(receiver.receive())
        await settle()
        assert not receiving.done()
        lane.go.set()
        got = await receiving
        assert torch.equal(got.tensors["x"], block(3))
        assert (await receiver.receive()).seq == 1
        sender.close()
        receiver.close()

    run(main())


def test_a_chunk_cancelled_while_it_is_copied_is_never_shown_and_its_room_comes_back(
    edge: CudaIpcEdge,
) -> None:
    async def main() -> None:
        sender, receiver = sender_of(edge), receiver_of(edge)
        lane = lane_of(sender)
        lane.go.clear()
        await sender.send(chunk("a", 0, tensor=block(1, DEVICE_BYTES)))
        sender.cancel("a")
        waiting = asyncio.create_task(sender.send(chunk("b", 0, tensor=block(2, DEVICE_BYTES))))
        await settle()
        assert not waiting.done(), "the device still writes there"
        lane.go.set()
        await waiting
        got = await receiver.receive()
        assert (got.request_id, got.tensors["x"][0]) == ("b", 2)
        receiver.release(got)
        sender.check()
        sender.close()
        receiver.close()

    run(main())


def test_what_was_sent_before_the_sender_closed_is_still_there(edge: CudaIpcEdge) -> None:
    async def main() -> None:
        sender, receiver = sender_of(edge), receiver_of(edge)
        lane = lane_of(sender)
        lane.go.clear()
        await sender.send(chunk("r", 0, tensor=block(7)))
        threading.Timer(0.02, lane.go.set).start()
        sender.close()
        assert lane.was_read, "the receiver may be copying"
        assert torch.equal((await receiver.receive()).tensors["x"], block(7))
        with pytest.raises(PeerLost):
            await receiver.receive()
        receiver.close()

    run(main())


def test_a_reset_forgets_what_was_being_copied(edge: CudaIpcEdge) -> None:
    async def main() -> None:
        sender, receiver = sender_of(edge), receiver_of(edge)
        lane = lane_of(sender)
        lane.go.clear()
        await sender.send(chunk("old", 0, tensor=block(1, DEVICE_BYTES)))
        edge.mark_dead("receiver")
        edge.reset()
        dead, receiver = receiver, receiver_of(edge)
        sending = asyncio.create_task(sender.send(chunk("new", 0, tensor=block(2, DEVICE_BYTES))))
        await settle()
        lane.go.set()
        await sending
        got = await receiver.receive()
        assert (got.request_id, got.tensors["x"][0]) == ("new", 2)
        receiver.release(got)
        for end in (dead, receiver):
            end.close()
        sender.close()
        assert lane.was_read is False

    run(main())


def test_a_chunk_of_a_sender_that_another_has_replaced_is_lost(edge: CudaIpcEdge) -> None:
    """Its pool is not the new one's, where other bytes lie at its place."""

    async def main() -> None:
        sender, receiver = sender_of(edge), receiver_of(edge)
        await sender.send(chunk("old", 0, tensor=block(1)))
        await shown(receiver)
        edge.mark_dead("sender")
        edge.reset()
        dead, sender = sender, sender_of(edge)
        with pytest.raises(PeerLost):
            await receiver.receive()
        await asyncio.wait_for(receiver.renewed(), 120)
        await sender.send(chunk("new", 0, tensor=block(2)))
        assert (await receiver.receive()).tensors["x"][0] == 2
        for end in (dead, sender, receiver):
            end.close()

    run(main())


def test_device_bytes_are_credits_too(edge: CudaIpcEdge) -> None:
    async def main() -> None:
        sender, receiver = sender_of(edge), receiver_of(edge)
        await sender.send(chunk("a", 0, tensor=block(1, DEVICE_BYTES // 4 * 3)))
        waiting = asyncio.create_task(sender.send(chunk("b", 0, tensor=block(2, DEVICE_BYTES // 4 * 3))))
        small = asyncio.create_task(sender.send(chunk("c", 0)))
        await settle()
        assert (waiting.done(), small.done()) == (False, False), "the small one would overtake"
        got = await receiver.receive()
        await settle()
        assert not waiting.done()
        receiver.release(got)
        await asyncio.gather(waiting, small)
        assert torch.equal((await receiver.receive()).tensors["x"], block(2, DEVICE_BYTES // 4 * 3))
        with pytest.raises(EngineError, match="capacity_bytes"):
            await sender.send(chunk("d", 0, tensor=block(1, DEVICE_BYTES + 1)))
        sender.close()
        receiver.close()

    run(main())


def test_a_cancelled_chunk_gives_its_device_memory_back(edge: CudaIpcEdge) -> None:
    async def main() -> None:
        sender, receiver = sender_of(edge), receiver_of(edge)
        await sender.send(chunk("a", 0, tensor=block(1, DEVICE_BYTES)))
        waiting = asyncio.create_task(sender.send(chunk("b", 0, tensor=block(2, DEVICE_BYTES))))
        await shown(receiver)
        receiver.cancel("a")
        await waiting
        assert torch.equal((await receiver.receive()).tensors["x"], block(2, DEVICE_BYTES))
        sender.close()
        receiver.close()

    run(main())


@pytest.mark.parametrize("dies", ["sender", "receiver"])
def test_the_next_holder_of_an_end_is_met_afresh(edge: CudaIpcEdge, dies: str) -> None:
    async def main() -> None:
        sender, receiver = sender_of(edge), receiver_of(edge)
        await sender.send(chunk("old", 0, tensor=block(1, DEVICE_BYTES)))
        receiver.release(await receiver.receive())
        await sender.send(chunk("old", 1, tensor=block(2, DEVICE_BYTES)))
        edge.mark_dead("sender" if dies == "sender" else "receiver")
        edge.reset()
        if dies == "sender":
            dead, sender = sender, sender_of(edge)
        else:
            dead, receiver = receiver, receiver_of(edge)
            with pytest.raises(PeerLost, match="middle of a stream"):
                await sender.send(chunk("old", 2))
        for value in (5, 6):
            await sender.send(chunk(f"new{value}", 0, last=True, tensor=block(value, DEVICE_BYTES)))
            got = await receiver.receive()
            assert torch.equal(got.tensors["x"], block(value, DEVICE_BYTES))
            receiver.release(got)
        for end in (sender, receiver, dead):
            end.close()

    run(main())


def test_nothing_is_named_or_left_open() -> None:
    names, before = set(os.listdir("/dev/shm")), len(os.listdir("/proc/self/fd"))
    edge = CudaIpcEdge.create("test", DEVICE_BYTES, 4, "cuda:0", "cuda:0")
    assert set(os.listdir("/dev/shm")) == names
    edge.close()
    assert len(os.listdir("/proc/self/fd")) <= before + 2  # the mapping's own, closed with it
