"""A worker that dies or hangs under load: no request fails, and no token is repeated, missing or
different. Once for each kind of worker and blow; again and again where tests may be slow."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from tests.parity.test_matrix import A, B, C, D
from tests.served import Answer, Served, Turn

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
NUM_TOKENS = 20
NUM_BLOWS = 5
# A slow machine may see a hang where there is none: it costs a replay, never a request.
SETTINGS = (
    "thinker.kv_memory=8MiB",
    "preprocess.workers=1",
    "server.heartbeat_s=0.1",
    "server.hang_after_s=1.5",
    "server.max_replays=100",
    "server.max_restarts=1000",
)


@pytest.fixture(scope="module")
def per_stage(tiny: Callable[[str], Path]) -> Iterator[tuple[Served, list[Answer]]]:
    """One server for all that strikes its workers, and the undisturbed answers."""
    with Served(tiny("qwen2_5_vl"), *SETTINGS, workers="per-stage") as served:
        yield served, undisturbed_answers(served)


def undisturbed_answers(served: Served) -> list[Answer]:
    return [served.ask(q, **sampling_of(i)) for i, q in enumerate(QUESTIONS)]


def sampling_of(index: int) -> dict:
    return {"max_tokens": NUM_TOKENS, "ignore_eos": True, **SAMPLINGS[index % len(SAMPLINGS)]}


def pid_of(served: Served, stage: str) -> int:
    (worker,) = (w for w in served.service.workers() if stage in w.stages)
    return worker.pid


def fork_server_of(served: Served) -> int:
    stat = Path(f"/proc/{pid_of(served, 'thinker')}/stat").read_text()
    return int(stat.rpartition(")")[2].split()[1])  # the parent


def strike(served: Served, stage: str, blow: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # a slow machine has just taken it for hanging
        os.kill(pid_of(served, stage), blow)


@dataclass(frozen=True)
class Blow:
    """`strike`, and what tells that the worker of `stage` has died and is back."""

    stage: str
    strike: Callable[[], None]


def streams_go_on(served: Served, undisturbed: Sequence[Answer], seed: str, blows: Sequence[Blow]) -> None:
    """Under 8 streams, strikes at random moments; each time waits until the worker is back."""
    rng = random.Random(seed)

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
            for blow in blows:
                await served.progress(rng.randrange(1, 100))  # of some 200 for an answer each
                (worker,) = (w for w in served.service.workers() if blow.stage in w.stages)
                blow.strike()
                await served.worker_restarted(blow.stage, worker.restarts + 1)
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


def test_streams_go_on_over_a_death_of_each_kind(tiny: Callable[[str], Path]) -> None:
    with Served(tiny("qwen2_5_vl"), *SETTINGS, workers="per-stage") as served:
        undisturbed = undisturbed_answers(served)
        kinds = [("thinker", signal.SIGKILL), ("vision", signal.SIGSTOP)]
        kinds += [("vision", signal.SIGKILL), ("thinker", signal.SIGSTOP)]
        blows = [Blow(stage, partial(strike, served, stage, blow)) for stage, blow in kinds]
        streams_go_on(served, undisturbed, "each", blows)
        served.run(decoded_anew(served, undisturbed))
        served.assert_clean()


async def decoded_anew(served: Served, undisturbed: Sequence[Answer]) -> None:
    """All questions at once, while a preprocessing worker dies over the pictures."""
    served.service.preprocessor.index.clear()
    asks = [asyncio.create_task(served.answer(q, **sampling_of(i))) for i, q in enumerate(QUESTIONS)]
    await asyncio.sleep(0)
    os.kill(served.service.preprocessor.pool.worker_pids()[0], signal.SIGKILL)
    assert [a.token_ids for a in await asyncio.gather(*asks)] == [a.token_ids for a in undisturbed]


@pytest.mark.slow
@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hanging"])
@pytest.mark.parametrize("stage", ["thinker", "vision"])
def test_streams_go_on_over_the_death_of_a_stage(
    per_stage: tuple[Served, list[Answer]], stage: str, blow: int
) -> None:
    served, undisturbed = per_stage
    blows = [Blow(stage, partial(strike, served, stage, blow))] * NUM_BLOWS
    streams_go_on(served, undisturbed, f"{stage}{blow}", blows)


@pytest.mark.slow
def test_streams_go_on_over_the_death_of_the_fork_server(tiny: Callable[[str], Path]) -> None:
    """All workers die with it."""
    with Served(tiny("qwen2_5_vl"), *SETTINGS, workers="per-stage") as served:

        def strike_it() -> None:
            os.kill(fork_server_of(served), signal.SIGKILL)

        blows = [Blow("thinker", strike_it)] * NUM_BLOWS
        streams_go_on(served, undisturbed_answers(served), "fork server", blows)
        assert all(worker.restarts >= NUM_BLOWS for worker in served.service.workers())


@pytest.mark.slow
def test_a_dead_preprocessing_worker_fails_nobody(tiny: Callable[[str], Path]) -> None:
    with Served(tiny("qwen2_5_vl"), *SETTINGS, "preprocess.workers=2") as served:
        undisturbed = undisturbed_answers(served)
        for _ in range(NUM_BLOWS):
            served.run(decoded_anew(served, undisturbed))
        served.assert_clean()
