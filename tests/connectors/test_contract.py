"""One contract, every connector: order, credits, cancel, peer death, large, empty, many streams,
byte-exact."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from connectors.cuda_ipc import CudaIpcEdge, CudaIpcReceiver, CudaIpcSender
from connectors.inproc import inproc_pair
from connectors.interface import Receiver, Sender
from connectors.nixl import NixlEdge, NixlReceiver, NixlSender
from connectors.shm import ShmEdge, ShmReceiver, ShmSender
from contracts.chunks import Chunk
from contracts.errors import PeerLost
from tests.connectors.fake_device import FakeReceiveLane, FakeSendLane

POOL_BYTES = 24 << 20
Factory = Callable[[int], tuple[Sender, Receiver]]
LOOP: dict[str, Callable[[], asyncio.AbstractEventLoop] | None] = {"factory": None}


def has_nixl() -> bool:
    return importlib.util.find_spec("nixl_cu13") is not None


NIXL = pytest.param(
    "nixl", marks=pytest.mark.skipif(not has_nixl(), reason="the extra omnistage[nixl] is not installed")
)


@pytest.fixture(params=["inproc", "shm", "shm on uvloop", "cuda_ipc", NIXL])
def pair(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Factory]:
    if request.param.endswith("uvloop"):
        monkeypatch.setitem(LOOP, "factory", pytest.importorskip("uvloop").Loop)
    with contextlib.ExitStack() as stack:

        def shm_pair(capacity: int) -> tuple[Sender, Receiver]:
            edge = ShmEdge.create("test", POOL_BYTES, capacity)
            stack.callback(edge.close)
            sender, receiver = ShmSender(edge.description()), ShmReceiver(edge.description())
            stack.callback(sender.close)
            stack.callback(receiver.close)
            return sender, receiver

        def nixl_pair(capacity: int) -> tuple[Sender, Receiver]:
            edge = NixlEdge.create("test", POOL_BYTES, capacity)
            stack.callback(edge.close)
            sender, receiver = NixlSender(edge.description()), NixlReceiver(edge.description())
            stack.callback(sender.close)
            stack.callback(receiver.close)
            return sender, receiver

        def cuda_ipc_pair(capacity: int) -> tuple[Sender, Receiver]:
            edge = CudaIpcEdge.create("test", POOL_BYTES, capacity, "cuda:0", "cuda:0")
            stack.callback(edge.close)
            sender = CudaIpcSender(edge.description(), FakeSendLane(edge.description().device_bytes))
            stack.callback(sender.close)
            receiver = CudaIpcReceiver(edge.description(), FakeReceiveLane())
            stack.callback(receiver.close)
            return sender, receiver

        makers = {"shm": shm_pair, "shm on uvloop": shm_pair, "cuda_ipc": cuda_ipc_pair, "nixl": nixl_pair}
        makers["inproc"] = lambda capacity: inproc_pair("test", capacity)
        yield makers[request.param]


def chunk(request_id: str, seq: int, *, stream: str = "s", last: bool = False, tensor=None) -> Chunk:
    tensors = {} if tensor is None else {"x": tensor}
    return Chunk(request_id, stream, seq, last, tensors, {"n": seq})


def run(coroutine):
    with asyncio.Runner(loop_factory=LOOP["factory"]) as runner:
        return runner.run(asyncio.wait_for(coroutine, 120))


async def settle() -> None:
    """Lets every ready task of this loop run."""
    for _ in range(5):
        await asyncio.sleep(0)


def test_chunks_arrive_in_order_and_byte_exact(pair: Factory) -> None:
    async def main() -> None:
        sender, receiver = pair(4)
        sent = [torch.randn(n, 3) for n in range(20)]

        async def produce() -> None:
            for i, tensor in enumerate(sent):
                await sender.send(chunk("r", i, tensor=tensor, last=i == 19))

        task = asyncio.create_task(produce())
        for i, tensor in enumerate(sent):
            got = await receiver.receive()
            assert (got.seq, got.meta["n"], got.last) == (i, i, i == 19)
            assert torch.equal(got.tensors["x"], tensor)
            receiver.release(got)
        await task

    run(main())


def test_a_full_edge_makes_send_wait_until_a_release(pair: Factory) -> None:
    async def main() -> None:
        sender, receiver = pair(2)
        await sender.send(chunk("r", 0))
        await sender.send(chunk("r", 1))
        third = asyncio.create_task(sender.send(chunk("r", 2)))
        await settle()
        assert not third.done()
        first = await receiver.receive()
        await settle()
        assert not third.done(), "receiving alone returns no credit"
        receiver.release(first)
        await third
        assert [(await receiver.receive()).seq for _ in range(2)] == [1, 2]

    run(main())


def test_many_at_once_are_as_many_one_by_one(pair: Factory) -> None:
    """Whatever a transport takes of them at once; the others wait for credits."""

    async def main() -> None:
        sender, receiver = pair(4)
        sender.cancel("gone")
        names = [("a", 0), ("b", 0), ("gone", 0), ("a", 1), ("b", 1), ("a", 2), ("b", 2)]
        chunks = [chunk(name, seq, tensor=torch.tensor([seq])) for name, seq in names]
        num_sent = sender.send_now(chunks)
        assert num_sent in (0, 4), "four credits, one of them not needed"

        async def send_others() -> None:
            for one in chunks[num_sent:]:
                await sender.send(one)

        others, found = asyncio.create_task(send_others()), []
        while len(found) < 6:
            got = [await receiver.receive(), *receiver.receive_now()]
            found += [(one.request_id, one.seq, int(one.tensors["x"])) for one in got]
            receiver.release(*got)
        await others
        assert found == [(name, seq, seq) for name, seq in names if name != "gone"]
        assert receiver.receive_now() == []
        assert (sender.stats.chunks_total, receiver.stats.chunks_total) == (6, 6)
        for seq in range(3, 7):
            await sender.send(chunk("a", seq))  # all credits are back

    run(main())


def test_many_at_once_to_nobody_are_lost(pair: Factory) -> None:
    async def main() -> None:
        sender, receiver = pair(4)
        receiver.close()
        with contextlib.suppress(PeerLost):
            assert sender.send_now([chunk("a", 0), chunk("b", 0)]) == 0

    run(main())


def test_cancel_frees_credits_and_spares_other_requests(pair: Factory) -> None:
    async def main() -> None:
        sender, receiver = pair(2)
        await sender.send(chunk("a", 0))
        await sender.send(chunk("b", 0))
        blocked = asyncio.create_task(sender.send(chunk("c", 0)))
        await settle()
        assert not blocked.done()
        receiver.cancel("a")
        await blocked
        assert [(await receiver.receive()).request_id for _ in range(2)] == ["b", "c"]

    run(main())


def test_a_receiver_cancel_does_not_break_the_senders_stream(pair: Factory) -> None:
    async def main() -> None:
        sender, receiver = pair(2)
        await sender.send(chunk("a", 0))
        receiver.cancel("a")
        await sender.send(chunk("a", 1))  # it has not heard of the end yet
        assert (await receiver.receive()).seq == 1

    run(main())


def test_sender_cancel_ends_a_waiting_send_and_drops_later_ones(pair: Factory) -> None:
    async def main() -> None:
        sender, receiver = pair(1)
        await sender.send(chunk("a", 0))
        waiting = asyncio.create_task(sender.send(chunk("b", 0)))
        await settle()
        sender.cancel("b")
        await waiting
        got = await receiver.receive()
        assert got.request_id == "a"
        receiver.release(got)
        await sender.send(chunk("b", 1))  # dropped
        sender.forget("b")
        await sender.send(chunk("b", 0))
        assert (await receiver.receive()).request_id == "b"

    run(main())


def test_a_cancel_that_takes_in_a_chunk_wakes_who_waits_for_it(pair: Factory) -> None:
    async def main() -> None:
        sender, receiver = pair(2)
        await sender.send(chunk("a", 0))
        receiver.release(await receiver.receive())
        receiving = asyncio.create_task(receiver.receive())
        await settle()
        await sender.send(chunk("b", 0))
        receiver.cancel("other")  # before the loop has looked
        assert (await receiving).request_id == "b"

    run(main())


@pytest.mark.parametrize("taker", ["cancel", "send"])
def test_whoever_takes_in_a_credit_wakes_who_waits_for_it(pair: Factory, taker: str) -> None:
    async def main() -> None:
        sender, receiver = pair(1)
        await sender.send(chunk("a", 0))
        got = await receiver.receive()
        waiting = asyncio.create_task(sender.send(chunk("b", 0)))
        await settle()
        receiver.release(got)
        sends = [waiting]
        if taker == "cancel":
            sender.cancel("other")  # before the loop has looked
        else:
            sends.append(asyncio.create_task(sender.send(chunk("c", 0))))
        for _ in sends:
            receiver.release(await receiver.receive())
        await asyncio.gather(*sends)

    run(main())


def test_a_gap_in_a_stream_is_an_error(pair: Factory) -> None:
    async def main() -> None:
        sender, _ = pair(4)
        await sender.send(chunk("a", 0))
        with pytest.raises(AssertionError, match="expected 1"):
            await sender.send(chunk("a", 2))

    run(main())


def test_streams_are_independent(pair: Factory) -> None:
    async def main() -> None:
        sender, receiver = pair(200)
        for seq in range(3):
            for stream in range(60):
                await sender.send(chunk("r", seq, stream=str(stream), last=seq == 2))
        seen: dict[str, list[int]] = {}
        for _ in range(180):
            got = await receiver.receive()
            seen.setdefault(got.stream, []).append(got.seq)
            receiver.release(got)
        assert all(order == [0, 1, 2] for order in seen.values())
        assert len(seen) == 60

    run(main())


@pytest.mark.parametrize("numel", [0, 1, 5 << 20])
def test_empty_and_large_payloads(pair: Factory, numel: int) -> None:
    async def main() -> None:
        sender, receiver = pair(1)
        tensor = torch.arange(numel, dtype=torch.float32)
        await sender.send(chunk("r", 0, tensor=tensor))
        got = await receiver.receive()
        assert torch.equal(got.tensors["x"], tensor)
        receiver.release(got)

    run(main())


@pytest.mark.parametrize("closer", ["sender", "receiver"])
def test_peer_death_is_told_at_once(pair: Factory, closer: str) -> None:
    async def main() -> None:
        sender, receiver = pair(1)
        await sender.send(chunk("r", 0))
        sending = asyncio.create_task(sender.send(chunk("r", 1)))
        await settle()
        if closer == "receiver":
            receiver.close()
            with pytest.raises(PeerLost):
                await sending
            return
        receiver.release(await receiver.receive())
        await sending
        receiver.release(await receiver.receive())
        receiving = asyncio.create_task(receiver.receive())
        await settle()
        sender.close()
        with pytest.raises(PeerLost):
            await receiving

    run(main())


def test_release_of_a_chunk_not_held_is_an_error(pair: Factory) -> None:
    async def main() -> None:
        sender, receiver = pair(1)
        await sender.send(chunk("r", 0))
        got = await receiver.receive()
        receiver.release(got)
        with pytest.raises(AssertionError):
            receiver.release(got)

    run(main())


def test_two_loops_in_two_threads(pair: Factory) -> None:
    sender, receiver = pair(3)
    count = 500
    all_came = threading.Event()

    async def produce() -> None:
        for i in range(count):
            await sender.send(chunk("r", i, tensor=torch.tensor([i])))
        await asyncio.to_thread(all_came.wait)  # an end's loop goes on for as long as the end is used

    thread = threading.Thread(target=lambda: run(produce()))
    thread.start()

    async def consume() -> list[int]:
        values = []
        for _ in range(count):
            got = await receiver.receive()
            values.append(int(got.tensors["x"]))
            receiver.release(got)
        return values

    try:
        assert run(consume()) == list(range(count))
    finally:
        all_came.set()
        thread.join(20)
