"""The protocol of the CUDA IPC edge over a fake device: order of copies, both kinds of credit, resets."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Iterator

import pytest
import torch

from connectors.cuda_ipc import CudaIpcEdge, CudaIpcReceiver, CudaIpcSender
from contracts.chunks import Chunk
from contracts.errors import EngineError, PeerLost
from tests.connectors.edges import chunk, run, settle
from tests.connectors.fake_device import FakeReceiveLane, FakeSendLane

DEVICE_BYTES = 4096


@pytest.fixture
def edge() -> Iterator[CudaIpcEdge]:
    with contextlib.closing(CudaIpcEdge.create("test", DEVICE_BYTES, 4, "cuda:0", "cuda:1")) as edge:
        yield edge


def sender_of(edge: CudaIpcEdge) -> CudaIpcSender:
    return CudaIpcSender(edge.description(), FakeSendLane(edge.description().device_bytes, 4))


def receiver_of(edge: CudaIpcEdge) -> CudaIpcReceiver:
    return CudaIpcReceiver(edge.description(), FakeReceiveLane(4))


def block(value: int, nbytes: int = 1024) -> torch.Tensor:
    return torch.full((nbytes,), value, dtype=torch.uint8)


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


def test_the_host_does_not_wait_for_the_senders_stream_but_the_copy_out_does(edge: CudaIpcEdge) -> None:
    async def main() -> None:
        sender, receiver = sender_of(edge), receiver_of(edge)
        lane = sender._lane
        assert isinstance(lane, FakeSendLane)
        lane.go.clear()
        await sender.send(chunk("r", 0, tensor=block(3)))  # returns while the stream stands still
        timer = threading.Timer(0.05, lane.go.set)
        timer.start()
        got = await receiver.receive()
        assert torch.equal(got.tensors["x"], block(3))
        timer.join()
        sender.close()
        receiver.close()

    run(main())


def test_device_bytes_are_credits_too(edge: CudaIpcEdge) -> None:
    async def main() -> None:
        sender, receiver = sender_of(edge), receiver_of(edge)
        await sender.send(chunk("a", 0, tensor=block(1, 3000)))
        waiting = asyncio.create_task(sender.send(chunk("b", 0, tensor=block(2, 3000))))
        small = asyncio.create_task(sender.send(chunk("c", 0)))
        await settle()
        assert (waiting.done(), small.done()) == (False, False), "the small one would overtake"
        got = await receiver.receive()
        await settle()
        assert not waiting.done()
        receiver.release(got)
        await asyncio.gather(waiting, small)
        assert torch.equal((await receiver.receive()).tensors["x"], block(2, 3000))
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
        await settle()
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
