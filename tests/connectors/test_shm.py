"""The shared-memory edge in one process: bytes, credits in both units, cancellation, resets, nothing left."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import threading
from pathlib import Path

import pytest
import torch

from connectors import wire
from connectors.shm import ShmReceiver, ShmSender
from contracts.chunks import Chunk
from contracts.errors import EngineError, PeerLost
from tests.connectors.edges import TIMEOUT_S, chunk, edge_of, ends_of, run, settle


def kill(end: ShmSender | ShmReceiver) -> None:
    """It hears nothing any more, and goes on holding what it held."""
    end._bell.unwatch()


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def plain_dtypes() -> list[torch.dtype]:
    return [d for name, d in wire.DTYPES.items() if not name.startswith(("q", "bits"))]


def test_every_dtype_and_shape_arrives_byte_exact() -> None:
    async def main() -> None:
        with edge_of(1 << 20) as edge, ends_of(edge) as (sender, receiver):
            for seq, dtype in enumerate(plain_dtypes()):
                data = torch.randint(0, 2 if dtype == torch.bool else 256, (3 * 5 * 16,), dtype=torch.uint8)
                tensors = {
                    "some": data.view(dtype).view(3, 5, -1),
                    "empty": data[:0].view(dtype).view(0, 7),
                    "one": data[:16].view(dtype)[0],
                    "many": data.repeat(60).view(dtype),
                }
                await sender.send(Chunk("r", "s", seq, False, tensors, {"f": 0.1, "s": "ä", "i": -1}))
                got = await receiver.receive()
                assert got.meta == {"f": 0.1, "s": "ä", "i": -1}
                for name, tensor in tensors.items():
                    there = got.tensors[name]
                    assert (there.dtype, there.shape) == (dtype, tensor.shape)
                    assert raw(there) == raw(tensor), f"{dtype} {name}"
                receiver.release(got)

    run(main())


def test_views_that_are_not_plain_memory_arrive_as_what_they_show() -> None:
    async def main() -> None:
        with edge_of() as edge, ends_of(edge) as (sender, receiver):
            grid = torch.arange(24.0).view(4, 6)
            complex_ = torch.randn(5, dtype=torch.complex64)
            leaf = torch.randn(3, requires_grad=True)
            tensors = {"t": grid.t(), "strided": grid[:, ::2], "conj": complex_.conj(), "leaf": leaf}
            tensors |= {"expanded": grid[:1].expand(3, 6), "imag": complex_.conj().imag}
            await sender.send(Chunk("r", "s", 0, True, tensors))
            got = await receiver.receive()
            for name, tensor in tensors.items():
                assert torch.equal(got.tensors[name], tensor.resolve_conj().detach()), name
            receiver.release(got)

    run(main())


def test_a_received_tensor_is_a_view_of_the_edge_and_a_sent_one_is_copied() -> None:
    async def main() -> None:
        with edge_of() as edge, ends_of(edge) as (sender, receiver):
            for seq, numel in enumerate((10, 10_000)):  # inline, pooled
                tensor = torch.zeros(numel)
                await sender.send(chunk("r", seq, tensor=tensor))
                tensor.fill_(7)
                got = await receiver.receive()
                view = got.tensors["x"]
                assert not view.any()
                start = receiver._ring.memory.address
                assert start <= view.data_ptr() < start + edge.description().total_bytes
                receiver.release(got)

    run(main())


def test_a_chunk_larger_than_the_pool_is_refused_at_once() -> None:
    async def main() -> None:
        with edge_of(64 << 10) as edge, ends_of(edge) as (sender, receiver):
            with pytest.raises(EngineError, match="capacity_bytes"):
                await sender.send(chunk("r", 0, tensor=torch.zeros(64 << 10, dtype=torch.uint8)))
            await sender.send(chunk("r", 0, tensor=torch.zeros(60 << 10, dtype=torch.uint8)))
            receiver.release(await receiver.receive())

    run(main())


def test_bytes_are_credits_and_a_large_chunk_is_not_overtaken() -> None:
    async def main() -> None:
        with edge_of(64 << 10, 16) as edge, ends_of(edge) as (sender, receiver):
            block = torch.zeros(24 << 10, dtype=torch.uint8)
            await sender.send(chunk("a", 0, tensor=block))
            await sender.send(chunk("b", 0, tensor=block))
            large = asyncio.create_task(sender.send(chunk("c", 0, tensor=block.repeat(2))))
            await settle()
            small = asyncio.create_task(sender.send(chunk("d", 0)))
            await settle()
            assert (large.done(), small.done()) == (False, False)
            receiver.release(await receiver.receive())
            await settle()
            assert not large.done(), "two pieces of 24 KiB are not one of 48"
            receiver.release(await receiver.receive())
            await asyncio.gather(large, small)
            assert [(await receiver.receive()).request_id for _ in range(2)] == ["c", "d"]
            assert sender.stats.waits_total == 2
            assert sender.stats.wait.total_s > 0
            assert sender.stats.bytes_total == receiver.stats.bytes_total == 4 * (24 << 10)

    run(main())


def test_a_waiting_send_whose_task_is_cancelled_lets_the_next_go() -> None:
    async def main() -> None:
        with edge_of(64 << 10, 4) as edge, ends_of(edge) as (sender, receiver):
            await sender.send(chunk("a", 0, tensor=torch.zeros(40 << 10, dtype=torch.uint8)))
            large = asyncio.create_task(
                sender.send(chunk("b", 0, tensor=torch.zeros(40 << 10, dtype=torch.uint8)))
            )
            small = asyncio.create_task(sender.send(chunk("c", 0)))
            await settle()
            large.cancel()
            await small
            assert [(await receiver.receive()).request_id for _ in range(2)] == ["a", "c"]
            await sender.send(chunk("b", 0))

    run(main())


def test_a_sender_cancel_frees_what_lies_in_the_ring_though_nobody_receives() -> None:
    async def main() -> None:
        with edge_of(max_chunks=3) as edge, ends_of(edge) as (sender, receiver):
            await sender.send(chunk("a", 0))
            held = await receiver.receive()  # from here on the receiver hears the bell
            await sender.send(chunk("a", 1))
            await sender.send(chunk("b", 0))
            blocked = asyncio.create_task(sender.send(chunk("c", 0)))
            await settle()
            assert not blocked.done()
            sender.cancel("a")
            await blocked
            sender.forget("a")
            receiver.release(held)
            await sender.send(chunk("a", 0))
            order = [(got.request_id, got.seq) for got in [await receiver.receive() for _ in range(3)]]
            assert order == [("b", 0), ("c", 0), ("a", 0)]

    run(main())


def test_any_number_of_cancellations_fit() -> None:
    """Every slot lives, is cancelled and lives again while the receiver reads late."""

    async def main() -> None:
        with edge_of(max_chunks=2) as edge, ends_of(edge) as (sender, receiver):
            for round_ in range(20):
                await sender.send(chunk("a", 0))
                await sender.send(chunk("b", 0))
                first = await receiver.receive()
                second = await receiver.receive()
                sender.cancel("a")
                sender.cancel("b")
                receiver.release(first)
                receiver.release(second)
                for name in "ab":
                    sender.forget(name)
                    await sender.send(chunk(name, 0))
                    sender.cancel(name)
                    sender.forget(name)
                await sender.send(chunk("c", round_))
                got = await receiver.receive()
                assert (got.request_id, got.seq) == ("c", round_)
                receiver.release(got)

    run(main())


def test_random_traffic_between_two_loops_is_exact_and_leaves_every_credit() -> None:
    count = 400
    sizes = [random.Random(1).choice((0, 7, 1000, 5000, 30_000)) for _ in range(count)]

    async def produce(sender: ShmSender) -> None:
        for i, size in enumerate(sizes):
            await sender.send(chunk("r", i, tensor=torch.full((size,), i % 251, dtype=torch.uint8)))

    async def consume(receiver: ShmReceiver) -> None:
        held: list[Chunk] = []
        order = random.Random(2)
        for i in range(count):
            got = await receiver.receive()
            assert got.seq == i
            held.append(got)
            while held and (len(held) >= 3 or order.random() < 0.6):
                done = held.pop(order.randrange(len(held)))
                expected = torch.full((sizes[done.seq],), done.seq % 251, dtype=torch.uint8)
                assert torch.equal(done.tensors["x"], expected), done.seq
                receiver.release(done)
        for done in held:
            receiver.release(done)

    with edge_of(100 << 10, 5) as edge, ends_of(edge) as (sender, receiver):
        thread = threading.Thread(target=lambda: run(produce(sender)))
        thread.start()
        try:
            run(consume(receiver))
        finally:
            thread.join(TIMEOUT_S)
        sender._follow()
        assert not sender._in_use
        assert sender._pool.take(100 << 10) == 0


def test_memory_is_flat_over_many_messages() -> None:
    async def main(count: int) -> None:
        async def produce() -> None:
            for i in range(count):
                await sender.send(chunk(str(i), 0, last=True))

        task = asyncio.create_task(produce())
        for _ in range(count):
            receiver.release(await receiver.receive())
        await task

    def private_kib() -> int:
        gc.collect()
        return int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0])

    with edge_of(max_chunks=32) as edge:
        for count in (10_000, 90_000):
            with ends_of(edge) as (sender, receiver):
                before = private_kib()
                run(main(count))
                grown = private_kib() - before
            edge.reset()
    assert grown < 1024, f"{grown} KiB over 90,000 messages"


# --- resets -------------------------------------------------------------------------------------------------


def test_a_sleeping_receiver_is_woken_before_the_chunk_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """And looks out for it, which takes no second ring; given up, the chunk's own ring wakes it."""
    rings: list[str] = []

    async def main(looks_ns: int) -> list[str]:
        monkeypatch.setattr("connectors.shm_receiver.LOOK_OUT_NS", looks_ns)
        with edge_of() as edge:
            sender, receiver = ShmSender(edge.description()), ShmReceiver(edge.description())
            ring, pack = sender._bell.ring, sender._pack
            monkeypatch.setattr(sender._bell, "ring", lambda: (rings.append("ring"), ring()))
            looking = threading.Event()
            thread_waits = [threading.Event(), threading.Event()]

            def consume() -> None:
                async def receive() -> None:
                    loop = asyncio.get_running_loop()
                    look_out, heard = receiver._look_out, receiver._heard
                    monkeypatch.setattr(receiver, "_heard", lambda: (heard(), looking.set()))
                    if looks_ns:
                        monkeypatch.setattr(receiver, "_look_out", lambda: (looking.set(), look_out()))
                    loop.call_soon(thread_waits[0].set)  # runs when the task below sleeps
                    receiver.release(await receiver.receive())
                    receiver.close()

                asyncio.run(receive())

            def pack_once_awake(chunk_: Chunk) -> wire.Packed:
                rings.append("pack")
                assert looking.wait(TIMEOUT_S)
                return pack(chunk_)

            monkeypatch.setattr(sender, "_pack", pack_once_awake)
            thread = threading.Thread(target=consume)
            thread.start()
            assert thread_waits[0].wait(TIMEOUT_S)
            sender._follow()
            await sender.send(chunk("r", 0))
            await asyncio.to_thread(thread.join, TIMEOUT_S)
            assert not thread.is_alive()
            sender.close()
        taken, rings[:] = list(rings), []
        return taken

    assert run(main(int(TIMEOUT_S * 1e9)))[:2] == ["ring", "pack"]
    assert run(main(0)) == ["ring", "pack", "ring", "ring"]  # the last is that of `close`


def test_a_returned_slot_rings_only_for_a_send_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        with edge_of(max_chunks=1) as edge, ends_of(edge) as (sender, receiver):
            rings: list[int] = []
            ring = receiver._bell.ring
            monkeypatch.setattr(receiver._bell, "ring", lambda: (rings.append(1), ring()))
            for _ in range(3):
                await sender.send(chunk("a", 0, last=True))
                receiver.release(await receiver.receive())
            assert not rings
            await sender.send(chunk("a", 0, last=True))
            waiting = asyncio.create_task(sender.send(chunk("b", 0)))
            await settle()
            receiver.release(await receiver.receive())
            await waiting
            assert rings

    run(main())


def test_an_end_is_taken_once_an_epoch() -> None:
    with edge_of() as edge, ends_of(edge) as (sender, _):
        with pytest.raises(EngineError, match="reset it first"):
            ShmSender(edge.description())
        sender.close()
        edge.reset()
        ShmSender(edge.description()).close()


@pytest.mark.parametrize("end", ["sender", "receiver"])
def test_a_dead_peer_is_told_at_once_until_a_reset(end: str) -> None:
    async def main() -> None:
        with edge_of(max_chunks=1) as edge, ends_of(edge) as (sender, receiver):
            await sender.send(chunk("r", 0))
            if end == "sender":
                receiver.release(await receiver.receive())
                waiting = asyncio.create_task(receiver.receive())
            else:
                waiting = asyncio.create_task(sender.send(chunk("r", 1)))
            await settle()
            assert not waiting.done()
            edge.mark_dead(end)
            with pytest.raises(PeerLost):
                await waiting
            with pytest.raises(PeerLost):
                await (receiver.receive() if end == "sender" else sender.send(chunk("r", 1)))
            edge.reset()
            await sender.send(chunk("new", 0))
            assert (await receiver.receive()).request_id == "new"

    run(main())


def test_a_receiver_is_told_when_the_lost_sender_can_come_back() -> None:
    async def main() -> None:
        with edge_of() as edge, ends_of(edge) as (sender, receiver):
            for number in range(3):  # however often
                edge.mark_dead("sender")
                with pytest.raises(PeerLost):
                    await receiver.receive()
                renewed = asyncio.create_task(receiver.renewed())
                await settle()
                assert not renewed.done()
                edge.reset()
                await renewed
                await sender.send(chunk(f"new {number}", 0))
                got = await receiver.receive()
                assert got.request_id == f"new {number}"
                receiver.release(got)

    run(main())


def test_a_sender_that_outlives_the_receiver() -> None:
    async def main() -> None:
        with edge_of(64 << 10, 2) as edge:
            sender, dead = ShmSender(edge.description()), ShmReceiver(edge.description())
            block = torch.ones(30 << 10, dtype=torch.uint8)
            await sender.send(chunk("old", 0, tensor=block))
            await sender.send(chunk("old", 1, tensor=block))
            await dead.receive()  # held for ever
            kill(dead)
            waiting = asyncio.create_task(sender.send(chunk("old", 2)))
            await settle()
            edge.mark_dead("receiver")
            edge.reset()
            with pytest.raises(PeerLost):
                await waiting
            with pytest.raises(PeerLost, match="middle of a stream"):
                await sender.send(chunk("old", 2))
            await sender.send(chunk("old", 0, tensor=block))  # replayed, before the next receiver is there
            await sender.send(chunk("new", 0, tensor=block))
            receiver = ShmReceiver(edge.description())
            got = [await receiver.receive() for _ in range(2)]
            assert [(g.request_id, g.seq) for g in got] == [("old", 0), ("new", 0)]
            assert torch.equal(got[0].tensors["x"], block)
            sender.check()
            for end in (sender, receiver, dead):
                end.close()

    run(main())


def test_a_receiver_that_outlives_the_sender_keeps_its_views_until_release() -> None:
    async def main() -> None:
        with edge_of(64 << 10, 3) as edge:
            dead, receiver = ShmSender(edge.description()), ShmReceiver(edge.description())
            block = torch.ones(40 << 10, dtype=torch.uint8)
            await dead.send(chunk("old", 0, tensor=block))
            await dead.send(chunk("old", 1))
            held = await receiver.receive()
            receiving = asyncio.create_task(asyncio.wait_for(_skip_first(receiver), TIMEOUT_S))
            await settle()
            edge.reset()
            sender = ShmSender(edge.description())
            sending = asyncio.create_task(sender.send(chunk("new", 0, tensor=block * 2)))
            await settle()
            assert not sending.done(), "the memory of a held view is written to"
            assert torch.equal(held.tensors["x"], block)
            receiver.release(held)
            await sending
            got = await receiving
            assert got.request_id == "new"
            assert torch.equal(got.tensors["x"], block * 2)
            for end in (sender, receiver, dead):
                end.close()

    async def _skip_first(receiver: ShmReceiver) -> Chunk:
        receiver.release(await receiver.receive())  # old/1; the next one is of the new sender
        return await receiver.receive()

    run(main())


def test_what_an_old_epoch_still_publishes_counts_for_nothing() -> None:
    """The end that lives on may be in the middle of a send or a release when the parent resets."""

    async def main() -> None:
        with edge_of(max_chunks=2) as edge:
            sender, dead = ShmSender(edge.description()), ShmReceiver(edge.description())
            await sender.send(chunk("old", 0))
            edge.mark_dead("receiver")
            edge.reset()
            sender._put_message(1)
            sender._publish()  # of the old epoch, after the reset
            receiver = ShmReceiver(edge.description())
            receiving = asyncio.create_task(receiver.receive())
            await settle()
            assert not receiving.done()
            await sender.send(chunk("new", 0))
            assert (await receiving).request_id == "new"
            for end in (sender, receiver, dead):
                end.close()

    run(main())


def test_a_chunk_whose_copy_fails_is_never_seen_and_gives_its_credit_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("the device is lost")

    async def main() -> None:
        with edge_of(max_chunks=1) as edge, ends_of(edge) as (sender, receiver):
            for again in range(5):  # more often than there are slots, and entries
                monkeypatch.setattr(wire, "write_tensors", fail)
                with pytest.raises(RuntimeError, match="device"):
                    await sender.send(chunk(f"a{again}", 0))
                monkeypatch.undo()
                receiving = asyncio.create_task(receiver.receive())
                await settle()
                assert not receiving.done()
                await sender.send(chunk(f"b{again}", 0, tensor=torch.arange(9)))
                got = await receiving
                assert (got.request_id, got.tensors["x"].tolist()) == (f"b{again}", list(range(9)))
                receiver.release(got)

    run(main())


def test_nothing_is_named_or_left_open() -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    async def main() -> None:
        with edge_of() as edge, ends_of(edge) as (sender, receiver):
            await sender.send(chunk("r", 0, tensor=torch.zeros(9000)))
            receiver.release(await receiver.receive())
            assert set(os.listdir("/dev/shm")) == names

    gc.collect()
    names, before = set(os.listdir("/dev/shm")), descriptors()
    run(main())
    gc.collect()
    assert descriptors() == before
    assert "omnistage-test" not in Path("/proc/self/maps").read_text()
