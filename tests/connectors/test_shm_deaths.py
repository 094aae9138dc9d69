"""An end of a shared-memory edge that dies before any of its stores; wake-ups that must not be lost."""

from __future__ import annotations

import asyncio
import random
import select
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from connectors import wire
from connectors.ring import Ring
from connectors.shm import ShmReceiver, ShmSender
from contracts.chunks import Chunk
from contracts.errors import PeerLost
from tests.connectors.edges import TIMEOUT_S, chunk, edge_of, ends_of, run, settle


class Killed(BaseException):
    pass


class Life:
    """Of an end: it does so many stores and then none, whatever it tries."""

    def __init__(self, ring: Ring, num_stores: int) -> None:
        self._left = num_stores
        self._words = ring._words
        ring._words = self  # type: ignore[assignment]

    def spend(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise Killed

    def __getitem__(self, index: int) -> int:
        return self._words[index]

    def __setitem__(self, index: int, value: int) -> None:
        self.spend()
        self._words[index] = value


@pytest.fixture
def lives(monkeypatch: pytest.MonkeyPatch) -> list[Life]:
    """The one in it, if any, pays for what is copied, too."""
    lives: list[Life] = []
    write_header, write_tensors = wire.write_header, wire.write_tensors

    def copy_header(*args) -> int:
        for life in lives:
            life.spend()
        return write_header(*args)

    def copy_tensors(*args) -> None:
        for life in lives:
            life.spend()
        write_tensors(*args)

    monkeypatch.setattr(wire, "write_header", copy_header)
    monkeypatch.setattr(wire, "write_tensors", copy_tensors)
    return lives


def test_a_sender_may_die_before_any_store(lives: list[Life]) -> None:
    """The chunk is there whole or not at all, and the next sender's chunks are what they are."""

    async def send_and_die(num_stores: int) -> bool:
        with edge_of(max_chunks=2) as edge:
            dying, receiver = ShmSender(edge.description()), ShmReceiver(edge.description())
            await dying.send(chunk("old", 0, tensor=torch.full((500,), 1)))
            receiver.release(await receiver.receive())
            receiving = asyncio.create_task(receiver.receive())
            await settle()
            lives[:] = [Life(dying._ring, num_stores)]
            dies = False
            try:
                await dying.send(chunk("old", 1, tensor=torch.full((500,), 2)))
            except Killed:
                dies = True
            dying._bell.unwatch()
            lives.clear()
            await settle()
            edge.mark_dead("sender")
            if receiving.done() or not dies:
                got = await receiving
                assert (got.seq, got.tensors["x"].tolist()) == (1, [2] * 500)
                receiver.release(got)
                receiving = asyncio.create_task(receiver.receive())
            with pytest.raises(PeerLost):
                await receiving
            edge.reset()
            receiving, sender = asyncio.create_task(receiver.receive()), ShmSender(edge.description())
            await settle()
            for value in (3, 4, 5):
                await sender.send(chunk(f"new{value}", 0, tensor=torch.full((600,), value)))
                got = await receiving
                assert (got.request_id, got.tensors["x"].tolist()) == (f"new{value}", [value] * 600)
                receiver.release(got)
                receiving = asyncio.create_task(receiver.receive())
                await settle()
            sender._follow()
            sender.check()
            receiving.cancel()
            sender.close()
            receiver.close()
        return dies

    num_stores = 0
    while run(send_and_die(num_stores)):
        num_stores += 1
    assert num_stores > 8, "copies and words were counted"


def test_a_receiver_may_die_before_any_store(lives: list[Life]) -> None:
    """All credits are there for the next."""

    async def receive_and_die(num_stores: int) -> bool:
        with edge_of(max_chunks=2) as edge:
            sender, dying = ShmSender(edge.description()), ShmReceiver(edge.description())
            life = Life(dying._ring, num_stores)
            dies = False
            try:
                for seq in range(2):
                    await sender.send(chunk("old", seq))
                first, second = await dying.receive(), await dying.receive()
                dying.release(second)
                dying.release(first)
                dying._look_out()
            except Killed:
                dies = True
            del life
            dying._bell.unwatch()
            edge.mark_dead("receiver")
            edge.reset()
            receiver = ShmReceiver(edge.description())
            for seq in range(2):
                await sender.send(chunk("new", seq))
            for seq in range(2):
                got = await receiver.receive()
                assert (got.request_id, got.seq) == ("new", seq)
                receiver.release(got)
            sender._follow()
            sender.check()
            assert not sender._in_use
            sender.close()
            receiver.close()
        return dies

    num_stores = 0
    while run(receive_and_die(num_stores)):
        num_stores += 1
    assert num_stores >= 4


class Steps:
    """The words of an end's ring; `before` is told how many steps it has done whenever it does another."""

    def __init__(self, ring: Ring, before: Callable[[int], None]) -> None:
        self.count = 0
        self._words, self._before = ring._words, before
        ring._words = self  # type: ignore[assignment]
        ring._load = self.__getitem__

    def _step(self) -> None:
        self._before(self.count)
        self.count += 1

    def __getitem__(self, index: int) -> int:
        self._step()
        return self._words[index]

    def __setitem__(self, index: int, value: int) -> None:
        self._step()
        self._words[index] = value


class _Clock:
    def __init__(self) -> None:
        self._now_ns = 0

    def monotonic_ns(self) -> int:
        self._now_ns += 1
        return self._now_ns


@dataclass(frozen=True)
class _Outcome:
    was_begun: bool  # the rest of the send, before the receiver was through
    was_held: bool  # the send, before it was through
    is_lost: bool


def _meet(receiver_step: int, sender_step: int) -> _Outcome:
    """A send whose foretelling the receiver has heard: it goes on when the receiver is at one step, and stops
    at
    a step of its own until the receiver is through."""
    foretold, begin, stopped, go_on = (threading.Event() for _ in range(4))
    was_held = was_begun = False

    def send_begins(sender: ShmSender) -> None:
        pack = sender._pack

        def pack_when_told(sent: Chunk) -> wire.Packed:
            foretold.set()
            assert begin.wait(TIMEOUT_S)
            Steps(sender._ring, stop)
            return pack(sent)

        def stop(step: int) -> None:
            nonlocal was_held
            if step == sender_step:
                was_held = True
                stopped.set()
                assert go_on.wait(TIMEOUT_S)

        sender._pack = pack_when_told  # type: ignore[method-assign]
        with pytest.raises(StopIteration):
            sender.send(chunk("r", 0, tensor=torch.zeros(3))).send(None)
        stopped.set()

    def let_send(step: int) -> None:
        nonlocal was_begun
        if step == receiver_step:
            was_begun = True
            begin.set()
            assert stopped.wait(TIMEOUT_S)

    with edge_of(max_chunks=2) as edge, ends_of(edge) as (sender, receiver):
        thread = threading.Thread(target=send_begins, args=(sender,))
        thread.start()
        assert foretold.wait(TIMEOUT_S)
        steps = Steps(receiver._ring, let_send)
        receiver._heard()
        receiver._ring._words, receiver._ring._load = steps._words, steps._words.__getitem__
        begin.set()
        go_on.set()
        thread.join(TIMEOUT_S)
        is_rung = bool(select.select([receiver._bell._own_fd], [], [], 0)[0])
        return _Outcome(was_begun, was_held, not receiver._queue and not is_rung)


def test_no_wake_up_is_lost_however_a_send_and_a_look_out_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ways in which the one goes on between two steps of the other, and stops between two of its own."""
    monkeypatch.setattr("connectors.shm_receiver.time", _Clock())
    monkeypatch.setattr("connectors.shm_receiver.LOOK_OUT_NS", 3)
    receiver_step, num_met = 0, 0
    while (outcome := _meet(receiver_step, 0)).was_begun:
        sender_step = 0
        while outcome.was_held:
            assert not outcome.is_lost, f"at step {receiver_step} of the look-out, {sender_step} of the send"
            sender_step += 1
            outcome = _meet(receiver_step, sender_step)
        assert not outcome.is_lost, f"at step {receiver_step} of the look-out, the whole send"
        receiver_step += 1
        num_met += sender_step
    assert num_met > 50


def test_no_wake_up_is_lost_whenever_the_receiver_gives_up_looking(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk at a time between two threads that change places after every few instructions; each would
    wait for ever for a wake-up that is lost."""
    rounds = 500
    patience = random.Random(5)
    monkeypatch.setattr("connectors.shm_receiver.LOOK_OUT_NS", _Patience(patience))
    interval = sys.getswitchinterval()

    async def answer(receiver: ShmReceiver, sender: ShmSender) -> None:
        for seq in range(rounds):
            got = await receiver.receive()
            assert got.seq == seq
            value = got.tensors["x"].clone()
            receiver.release(got)
            await sender.send(chunk("r", seq, tensor=value))

    async def ask(sender: ShmSender, receiver: ShmReceiver) -> None:
        for seq in range(rounds):
            await sender.send(chunk("r", seq, tensor=torch.tensor([seq])))
            got = await receiver.receive()
            assert (got.seq, got.tensors["x"].tolist()) == (seq, [seq])
            receiver.release(got)

    with edge_of(max_chunks=2) as forth, edge_of(max_chunks=2) as back:
        ends = [ShmSender(forth.description()), ShmReceiver(back.description())]
        far_ends = [ShmReceiver(forth.description()), ShmSender(back.description())]
        thread = threading.Thread(target=lambda: run(answer(*far_ends)))
        sys.setswitchinterval(1e-5)
        thread.start()
        try:
            run(ask(*ends))
        finally:
            sys.setswitchinterval(interval)
            thread.join(TIMEOUT_S)
            for end in ends + far_ends:
                end.close()


class _Patience:
    """Another time to look out whenever it is asked for."""

    def __init__(self, order: random.Random) -> None:
        self._order = order

    def __radd__(self, now_ns: int) -> int:
        return now_ns + self._order.choice((0, 0, 1_000, 20_000, 300_000))
