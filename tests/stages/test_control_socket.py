"""Messages arrive all and in order, whoever sends meanwhile."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from contextlib import contextmanager

import pytest
import uvloop
import zmq

from stages.control_socket import ControlSocket

LIMIT_S = 20


@pytest.fixture(params=[None, uvloop.Loop], ids=["asyncio", "uvloop"])
def run(request):
    def run(main: Callable[[], object]) -> None:
        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(asyncio.wait_for(main(), LIMIT_S))

    return run


@contextmanager
def pair(take_in_front, take_in_worker):
    endpoint = f"ipc://@omnistage-test-{secrets.token_hex(8)}"
    front, worker = ControlSocket(zmq.ROUTER, take_in_front), ControlSocket(zmq.DEALER, take_in_worker)
    assert front.bind(endpoint) == endpoint
    worker.connect(endpoint)
    front.start()
    worker.start()
    try:
        yield front, worker
    finally:
        worker.close()
        front.close()


def test_both_ways_at_once_all_and_in_order(run):
    count = 3000
    seen: dict[str, list[int]] = {"front": [], "worker": []}

    async def main():
        done = asyncio.Event()

        def note(where: str, content: bytes) -> None:
            seen[where].append(int(content))
            if sum(map(len, seen.values())) == 2 * count:
                done.set()

        def front_takes(frames):
            identity, content = frames
            note("front", content)
            front.send(identity, content)

        with pair(front_takes, lambda frames: note("worker", frames[0])) as (front, worker):
            for i in range(count):
                worker.send(str(i).encode())
                if i % 100 == 0:
                    await asyncio.sleep(0)
            await done.wait()

    run(main)
    assert seen == {"front": list(range(count)), "worker": list(range(count))}


def test_a_message_that_cannot_be_taken_holds_up_no_other(run):
    async def main():
        failed, taken, last = [], [], asyncio.Event()
        asyncio.get_running_loop().set_exception_handler(lambda _, context: failed.append(context))

        def take(frames):
            if frames[1] == b"bad":
                raise ValueError("bad")
            taken.append(frames[1])
            if frames[1] == b"last":
                last.set()

        with pair(take, lambda frames: None) as (_, worker):
            for content in (b"first", b"bad", b"bad", b"last"):
                worker.send(content)
            await last.wait()
        assert taken == [b"first", b"last"]
        assert [type(context["exception"]) for context in failed] == [ValueError, ValueError]

    run(main)


def test_what_is_sent_before_anybody_listens_and_after_the_end(run):
    async def main():
        endpoint, first = f"ipc://@omnistage-test-{secrets.token_hex(8)}", asyncio.Event()
        worker = ControlSocket(zmq.DEALER, lambda frames: None)
        worker.connect(endpoint)
        worker.start()
        worker.send(b"early")
        front = ControlSocket(zmq.ROUTER, lambda frames: first.set())
        front.bind(endpoint)
        front.start()
        await first.wait()
        front.send(b"nobody", b"to a peer that is not there")
        worker.close()
        worker.send(b"late")
        front.close()

    run(main)


def test_no_call_when_nothing_comes(run):
    """An idle socket costs nothing: its descriptor does not stay readable."""

    async def main():
        reads = []

        class Counted(ControlSocket):
            def _read(self) -> None:
                reads.append(1)
                super()._read()

        answered = asyncio.Event()
        endpoint = f"ipc://@omnistage-test-{secrets.token_hex(8)}"
        front = Counted(zmq.ROUTER, lambda frames: answered.set())
        worker = ControlSocket(zmq.DEALER, lambda frames: None)
        front.bind(endpoint)
        worker.connect(endpoint)
        front.start()
        worker.start()
        worker.send(b"a")
        await answered.wait()
        for _ in range(200):
            await asyncio.sleep(0)
        assert len(reads) < 100
        worker.close()
        front.close()

    run(main)


def test_the_end_without_a_start(run):
    async def main():
        ControlSocket(zmq.DEALER, lambda frames: None).close()

    run(main)
