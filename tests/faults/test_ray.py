"""Workers placed by Ray on two nodes of one machine: the answers of one process, also when a node dies."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.connectors.test_contract import has_nixl
from tests.parity.test_matrix import A, B
from tests.served import TIMEOUT_S, Served, Turn

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("ray") is None, reason="the extra omnistage[ray] is not installed"),
    pytest.mark.skipif(not has_nixl(), reason="the extra omnistage[nixl] is not installed"),
    pytest.mark.filterwarnings(
        "ignore::ResourceWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"
    ),
]

QUESTIONS: list[Sequence[Turn]] = [
    [("user", ["hello there, the answer is"])],
    [("user", [A, "what is it?"])],
    [("user", [B, "and this", A, "compare"])],
]
LONG = {"max_tokens": 400, "ignore_eos": True}  # a node takes a second to die
NODE = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": 80 << 20}


RAY = {  # read as ray is imported; a machine may be busy
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_raylet_start_wait_time_s": "120",
    "RAY_worker_niceness": "0",
}


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A head that has no room for workers."""
    for name, value in RAY.items():
        monkeypatch.setenv(name, value)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from ray.cluster_utils import Cluster

        made = Cluster(initialize_head=True, head_node_args=NODE | {"num_cpus": 0})
        try:
            yield made
        finally:
            made.shutdown()


def test_workers_placed_by_ray_answer_as_one_process_and_move_when_a_node_dies(
    tiny: Callable[[str], Path], cluster: Any
) -> None:
    folder = tiny("qwen2_5_vl")
    with Served(folder, "thinker.kv_memory=8MiB") as served:
        expected = [answer.token_ids for answer in served.ask_all(QUESTIONS, **LONG)]
    nodes = [cluster.add_node(**NODE) for _ in range(2)]

    async def ask_while(served: Served, blow: Callable[[], object]) -> list[dict[int, list[int]]]:
        answers = [asyncio.create_task(served.answer(question, **LONG)) for question in QUESTIONS]
        await served.progress(5)
        blow()
        return [(await answer).token_ids for answer in answers]

    async def moved(served: Served) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while not any(w.restarts and w.state == "ready" for w in served.service.workers()):
                await served.service.stages_changed()

    with Served(folder, "thinker.kv_memory=8MiB", workers="per-stage", ray=cluster.address) as served:
        assert [answer.token_ids for answer in served.ask_all(QUESTIONS, **LONG)] == expected
        served.reset_cache()
        cluster.add_node(**NODE)  # room for whoever loses a node
        assert served.run(ask_while(served, lambda: nodes[0].kill_raylet())) == expected
        served.run(moved(served))
        served.reset_cache()
        assert [answer.token_ids for answer in served.ask_all(QUESTIONS, **LONG)] == expected
        served.assert_clean()
