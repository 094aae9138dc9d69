"""Stages on a second GPU, and a decoder divided over two: the same tokens as on the first one alone."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
import torch

from lm_engine.engine import LMEngine
from stages.build import build_lm_engine
from stages.planning import Plan
from stages.rank_processes import RankProcesses
from tests.stages.test_tensor_parallel import TIMEOUT_S, answers, plan_of, prompts_of
from tests.tiny_models import build_tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
SHAPE = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny("qwen2", tmp_path_factory.mktemp("qwen2"), **SHAPE)


def engine_of(plan: Plan, ranks: RankProcesses | None = None) -> tuple[LMEngine, str]:
    share = plan.stage("thinker")
    return build_lm_engine(
        plan.family, plan.deployment.lms["thinker"], share, plan.contexts["thinker"], ranks
    )


def tokens_of(engine: LMEngine, plan: Plan) -> dict[str, list[int]]:
    return asyncio.run(asyncio.wait_for(answers(engine, prompts_of(plan)), TIMEOUT_S))


def on(folder: Path, device: str, *overrides: str) -> Plan:
    return plan_of(folder, f"thinker.devices={device}", 'thinker.dtype="float32"', *overrides)


def in_a_thread(engine_and_tokens: list[object], plan: Plan) -> None:
    """As a stage's thread: another than the one that has used the first GPU."""
    engine, detail = engine_of(plan)
    engine_and_tokens += [detail, tokens_of(engine, plan)]
    engine.close()


def test_a_stage_on_the_second_gpu_leaves_the_first_alone(folder: Path) -> None:
    """Its threads launch, capture and copy there, although a process begins with the first."""
    first = on(folder, "cuda:0")
    engine, detail = engine_of(first)
    expected = tokens_of(engine, first)
    engine.close()
    assert "decode graphs" in detail
    before = torch.cuda.memory_allocated("cuda:0")
    found: list[object] = []
    thread = threading.Thread(target=in_a_thread, args=(found, on(folder, "cuda:1")))
    thread.start()
    thread.join(TIMEOUT_S)
    assert found, "the stage on the second GPU failed"
    detail, tokens = found
    assert "cuda:1" in str(detail)
    assert "decode graphs" in str(detail)
    assert tokens == expected
    assert torch.cuda.memory_allocated("cuda:0") == before


def test_two_ranks_on_two_gpus_give_the_tokens_of_one(folder: Path) -> None:
    """With graphs, which hold the ranks' sums; greedy tokens and drawn ones, in float32."""
    alone = on(folder, "cuda:0")
    engine, _ = engine_of(alone)
    expected = tokens_of(engine, alone)
    engine.close()
    divided = on(folder, '["cuda:0", "cuda:1"]', "thinker.tensor_parallel=2")
    told: list[str] = []
    ranks = RankProcesses(divided, "thinker", told.append)
    engine, detail = engine_of(divided, ranks)
    try:
        assert "2 ranks" in detail
        assert "decode graphs" in detail
        for _ in range(3):
            engine.reset_cache()
            assert tokens_of(engine, divided) == expected
    finally:
        engine.close()
    assert not told


def test_the_death_of_a_rank_on_a_gpu_is_told(folder: Path) -> None:
    divided = on(folder, '["cuda:0", "cuda:1"]', "thinker.tensor_parallel=2")
    lost, told = threading.Event(), []

    def tell(reason: str) -> None:
        told.append(reason)
        lost.set()

    ranks = RankProcesses(divided, "thinker", tell)
    engine, _ = engine_of(divided, ranks)
    ranks.processes[0].kill()
    assert lost.wait(TIMEOUT_S)
    assert told == ["rank 1 is gone"]
    engine.close()  # nothing was under way that would wait for the dead
