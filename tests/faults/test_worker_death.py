"""A worker that dies or hangs under load: no request fails, and no token is repeated, missing or
different."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.parity.test_matrix import A, B, C, D
from tests.served import Answer, Served, Turn

pytestmark = pytest.mark.slow

QUESTIONS: list[Sequence[Turn]] = [
    [("user", ["hello there, the answer is"])],
    [("user", [A, "what is it?"])],
    [("user", ["who is in the house"])],
    [("user", [B, "and this", C, "compare"])],
    [("user", [D, "what?"]), ("assistant", ["a thing"]), ("user", ["again"])],
    [("user", ["in the end"])],
    [("user", [C, A, "which one?"])],
    [("user", [D, "where is it?"])],
]
SAMPLINGS = ({"temperature": 0.0}, {"temperature": 0.8, "seed": 11}, {"temperature": 1.0, "seed": 3, "n": 2})
# A slow machine may see a hang where there is none: it costs a replay, never a request.
SETTINGS = (
    "thinker.kv_memory=8MiB",
    "server.heartbeat_s=0.2",
    "server.max_replays=100",
    "server.max_restarts=100",
)


def sampling_of(index: int) -> dict:
    return {"max_tokens": 40, "ignore_eos": True, **SAMPLINGS[index % len(SAMPLINGS)]}


def pid_of(served: Served, stage: str) -> int:
    (worker,) = (w for w in served.service.workers() if stage in w.stages)
    return worker.pid


def fork_server_of(served: Served) -> int:
    stat = Path(f"/proc/{pid_of(served, 'thinker')}/stat").read_text()
    return int(stat.rpartition(")")[2].split()[1])  # the parent


def streams_go_on(served: Served, stage: str, num_blows: int, seed: str, strike: Callable[[], None]) -> None:
    """Under 8 streams, `strike`s at random moments; each time waits until the worker of `stage` is back."""
    rng = random.Random(seed)
    undisturbed = [served.ask(q, **sampling_of(i)) for i, q in enumerate(QUESTIONS)]

    async def stream(index: int, stop: asyncio.Event) -> int:
        """Asks again and again; every answer must equal the undisturbed one."""
        count = 0
        while not stop.is_set():
            answer: Answer = await served.answer(QUESTIONS[index], **sampling_of(index))
            assert answer.token_ids == undisturbed[index].token_ids, QUESTIONS[index]
            assert answer.finish_reasons == undisturbed[index].finish_reasons
            count += 1
        return count

    async def strike_often(stop: asyncio.Event) -> None:
        try:
            for number in range(num_blows):
                await served.progress(rng.randrange(1, 200))  # of some 350 to 500 for an answer each
                strike()
                await served.worker_restarted(stage, number + 1)
                await served.service.reset_cache()  # so that pictures are encoded again
        finally:
            stop.set()

    async def main() -> list[int]:
        stop = asyncio.Event()
        streams = [asyncio.create_task(stream(i, stop)) for i in range(len(QUESTIONS))]
        await asyncio.gather(strike_often(stop), *streams)
        return [task.result() for task in streams]

    assert min(served.run(main())) >= 1
    served.assert_clean()


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hanging"])
@pytest.mark.parametrize("stage", ["thinker", "vision"])
def test_streams_go_on_over_the_death_of_a_stage(tiny: Callable[[str], Path], stage: str, blow: int) -> None:
    num_blows = 5 if blow == signal.SIGKILL else 2
    hang_after_s = 60 if blow == signal.SIGKILL else 2
    settings = (*SETTINGS, f"server.hang_after_s={hang_after_s}")
    with Served(tiny("qwen2_5_vl"), *settings, workers="per-stage") as served:

        def strike() -> None:
            os.kill(pid_of(served, stage), blow)

        streams_go_on(served, stage, num_blows, f"{stage}{blow}", strike)


def test_streams_go_on_over_the_death_of_the_fork_server(tiny: Callable[[str], Path]) -> None:
    """All workers die with it."""
    with Served(tiny("qwen2_5_vl"), *SETTINGS, "server.hang_after_s=60", workers="per-stage") as served:

        def strike() -> None:
            os.kill(fork_server_of(served), signal.SIGKILL)

        streams_go_on(served, "thinker", 2, "fork server", strike)
        assert all(worker.restarts >= 2 for worker in served.service.workers())


def test_a_dead_preprocessing_worker_fails_nobody(tiny: Callable[[str], Path]) -> None:
    with Served(tiny("qwen2_5_vl"), *SETTINGS, "preprocess.workers=2") as served:
        expected = [served.ask(q, **sampling_of(i)).token_ids for i, q in enumerate(QUESTIONS)]
        pool = served.service.preprocessor.pool

        async def main() -> None:
            for _ in range(5):
                served.service.preprocessor.index.clear()  # so that every picture is decoded again
                asks = [
                    asyncio.create_task(served.answer(q, **sampling_of(i))) for i, q in enumerate(QUESTIONS)
                ]
                await asyncio.sleep(0)
                os.kill(pool.worker_pids()[0], signal.SIGKILL)
                assert [a.token_ids for a in await asyncio.gather(*asks)] == expected

        served.run(main())
        served.assert_clean()
