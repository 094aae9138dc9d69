"""Stages apart by NIXL and a language model over two ranks: the answers of one process, also when a rank or
the encoder dies."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.connectors.test_contract import has_nixl
from tests.parity.test_matrix import A, B
from tests.served import Served, Turn

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("nixl_cu13") is None, reason="the extra omnistage[nixl] is not installed"),
]

DEPLOYMENT = """
[[worker]]
name = "encoder"
stages = ["vision"]
[[worker]]
name = "lm"
stages = ["thinker"]
[stage.thinker]
tensor_parallel = 2
devices = "cpu"
[[edge]]
source = "vision"
target = "thinker"
connector = "nixl"
"""
QUESTIONS: list[Sequence[Turn]] = [
    [("user", ["hello there, the answer is"])],
    [("user", [A, "what is it?"])],
    [("user", [B, "and this", A, "compare"])],
]
SAMPLING = {"max_tokens": 40, "ignore_eos": True}


def children_of(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


@pytest.mark.skipif(not has_nixl(), reason="the extra omnistage[nixl] is not installed")
def test_nixl_and_ranks_serve_what_one_process_does_and_outlive_their_dead(
    tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    folder, file = tiny("qwen2_5_vl"), tmp_path / "deployment.toml"
    file.write_text(DEPLOYMENT)
    with Served(folder, "thinker.kv_memory=8MiB") as served:
        expected = [answer.token_ids for answer in served.ask_all(QUESTIONS, **SAMPLING)]

    async def ask_while(served: Served, blow: Callable[[], None], stage: str) -> None:
        answers = [asyncio.create_task(served.answer(question, **SAMPLING)) for question in QUESTIONS]
        await asyncio.sleep(0)
        blow()
        assert [(await answer).token_ids for answer in answers] == expected
        await served.worker_restarted(stage, 1)
        again = [await served.answer(question, **SAMPLING) for question in QUESTIONS]
        assert [answer.token_ids for answer in again] == expected

    with Served(folder, "thinker.kv_memory=8MiB", deployment=file, workers="file") as served:
        assert [answer.token_ids for answer in served.ask_all(QUESTIONS, **SAMPLING)] == expected
        pids = {worker.stages[0]: worker.pid for worker in served.service.workers()}
        (rank,) = children_of(pids["thinker"])
        served.reset_cache()
        served.run(ask_while(served, lambda: os.kill(rank, signal.SIGKILL), "thinker"))
        served.reset_cache()
        served.run(ask_while(served, lambda: os.kill(pids["vision"], signal.SIGKILL), "vision"))
        served.assert_clean()
        (rank,) = children_of(next(w.pid for w in served.service.workers() if "thinker" in w.stages))
    assert not Path(f"/proc/{rank}").exists()
