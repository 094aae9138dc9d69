"""Waits that end inside the callback that has the news."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable

import pytest

from connectors.naps import Naps


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[..., None]:
    factory = pytest.importorskip("uvloop").Loop if request.param == "uvloop" else None

    def run_on_loop(main: Callable[[], object]) -> None:
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(asyncio.wait_for(main(), 120))

    return run_on_loop


async def take(naps: Naps) -> None:
    await naps.nap()


def test_every_waiting_task_has_run_on_when_end_returns(run) -> None:
    async def main() -> None:
        naps, order = Naps(), []
        name = contextvars.ContextVar("name", default="nobody")

        async def wait(who: str) -> None:
            name.set(who)
            await naps.nap()
            order.append(name.get())

        tasks = [asyncio.create_task(wait(who)) for who in "ab"]
        await asyncio.sleep(0)
        asyncio.get_running_loop().call_soon(lambda: (naps.end(), order.append("end")))
        await asyncio.gather(*tasks)
        assert order == ["a", "b", "end"], "and each in its own context"

    run(main)


def test_a_task_may_wait_again_and_end_others_while_it_is_resumed(run) -> None:
    async def main() -> None:
        naps, rounds = Naps(), []

        async def wait() -> None:
            for i in range(3):
                await naps.nap()
                rounds.append(i)
            naps.end_soon()

        waiting, other = asyncio.create_task(wait()), None
        for _ in range(3):
            await asyncio.sleep(0)
            asyncio.get_running_loop().call_soon(naps.end)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            other = other or asyncio.create_task(take(naps))
        await asyncio.gather(waiting, other)
        assert rounds == [0, 1, 2]

    run(main)


def test_a_cancelled_wait_ends_once_and_leaves_nothing(run) -> None:
    async def main() -> None:
        naps = Naps()
        task = asyncio.create_task(take(naps))
        await asyncio.sleep(0)
        task.cancel()
        asyncio.get_running_loop().call_soon(naps.end)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not naps._naps
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await naps.nap()
        assert not naps._naps

    run(main)
