"""A decoder divided over two ranks: the same tokens as one, plans without pickle, and a rank that dies."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import queue
import socket
import struct
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from contracts.digests import ContentDigest
from contracts.errors import EngineError
from contracts.media import MediaItem, Prompt
from contracts.messages import EmbeddingsNeeded, Failed, Generate, Generated
from contracts.params import SamplingParams
from lm_engine import parallel
from lm_engine.engine import LMEngine
from lm_engine.parallel import OneRank, RankGroup, ShardedWeights, shard_config
from lm_engine.plan import Admission, SequenceStep, SpanPiece, StepPlan
from lm_engine.ranks import Followers, LeadingRunner, PlanDecoder, RankRunner, encode_plan
from stages.build import build_following_runner, build_lm_engine
from stages.deployment import DeploymentError
from stages.options import ServeOptions
from stages.placement import group_stages
from stages.planning import Plan, make_plan, plan_text
from stages.rank_processes import RankProcesses
from tests.lm_engine.random_decoder import tiny_config
from tests.tiny_models import VISION_FAMILIES, build_tiny

TIMEOUT_S = 120
SMALL = (
    "thinker.kv_memory=8MiB",
    "thinker.max_context=256",
    "thinker.max_step_tokens=24",
    "thinker.max_sequences=4",
)


def plan_of(folder: Path, *overrides: str) -> Plan:
    return make_plan(
        ServeOptions(model=folder, workers="per-stage", overrides=(*SMALL, "thinker.devices=cpu", *overrides))
    )


def build(plan: Plan, ranks: RankProcesses | None) -> LMEngine:
    share = plan.stage("thinker")
    engine, _ = build_lm_engine(
        plan.family, plan.deployment.lms["thinker"], share, plan.context_length, ranks
    )
    return engine


def prompts_of(plan: Plan) -> list[Prompt]:
    text = [plan.family.layout(list(range(20, 20 + n)), []) for n in (3, 40)]
    if not plan.family.media_specs.modalities:
        return text
    grid = (1, 4, 6)
    item = MediaItem(
        modality="image",
        bytes_digest=ContentDigest(bytes(16)),
        pixel_digest=ContentDigest(bytes(16)),
        num_tokens=6,
        grid_thw=grid,
        source_size=(8, 8),
    )
    ids = plan.family.tokenizer.encode("<|vision_start|><|image_pad|><|vision_end|>", parse_special=True)
    return [*text, plan.family.layout([30, *ids, 31, 32, *ids, 33], [item, item])]


async def answers(engine: LMEngine, prompts: list[Prompt]) -> dict[str, list[int]]:
    """Greedy and drawn, all at once."""
    tokens: dict[str, list[int]] = {}
    for index, prompt in enumerate(prompts):
        for temperature in (0.0, 1.0):
            sampling = SamplingParams(max_tokens=10, temperature=temperature, seed=index, ignore_eos=True)
            name = f"{index} {temperature}"
            engine.add(Generate(request_id=name, prompt=prompt, sampling=sampling))
            tokens[name] = []
    while engine.has_work() or not engine.is_idle():
        for message in (await engine.step()).messages:
            match message:
                case EmbeddingsNeeded(name, items):
                    for item in items:
                        width = engine.config.embedding_width
                        rows = torch.randn(6, width, generator=torch.Generator().manual_seed(item))
                        engine.embeddings_ready(name, item, rows)
                case Generated(request_id=name, deltas=deltas):
                    tokens[name] += [token for delta in deltas for token in delta.token_ids]
                case Failed():
                    raise AssertionError(message)
    assert engine.check_integrity() is None
    return tokens


def run(engine: LMEngine, prompts: list[Prompt]) -> dict[str, list[int]]:
    try:
        return asyncio.run(asyncio.wait_for(answers(engine, prompts), TIMEOUT_S))
    finally:
        engine.close()


class RankThreads(RankProcesses):
    """Rank 1 as a thread: everything but the process itself, many times faster."""

    def __init__(self, plan: Plan) -> None:
        self._meeting_fd = os.memfd_create("ranks")
        self._size, self.lost = 2, []
        ours, theirs = socket.socketpair()
        self._thread = threading.Thread(target=self._follow, args=(plan, os.dup(self._meeting_fd), theirs))
        self._thread.start()
        self.followers = Followers([ours], self.lost.append, self._thread.join)

    def _follow(self, plan: Plan, meeting_fd: int, channel: socket.socket) -> None:
        share = plan.stage("thinker", 1)
        group = RankGroup(1, 2, meeting_fd, torch.device(share.device))
        os.close(meeting_fd)
        config = plan.deployment.lms["thinker"]
        build_following_runner(plan.family, config, share, plan.context_length, group, channel).follow()


@pytest.mark.parametrize("family", ["llama", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"])
def test_two_ranks_give_the_tokens_of_one(family: str, tmp_path: Path) -> None:
    folder = build_tiny(family, tmp_path / family)
    alone, divided = plan_of(folder), plan_of(folder, "thinker.tensor_parallel=2")
    prompts = prompts_of(alone)
    assert bool(prompts[-1].spans) == (family in VISION_FAMILIES)
    ranks = RankThreads(divided)
    engine = build(divided, ranks)
    assert run(engine, prompts) == run(build(alone, None), prompts)
    assert not ranks.lost


def test_a_rank_is_a_process_and_its_death_is_told_at_once(tmp_path: Path) -> None:
    """With one KV head, both ranks hold it."""
    folder = build_tiny("llama", tmp_path / "llama", num_key_value_heads=1)
    alone, divided = plan_of(folder), plan_of(folder, "thinker.tensor_parallel=2")
    prompts = prompts_of(alone)
    lost, told = threading.Event(), []

    def tell(reason: str) -> None:
        told.append(reason)
        lost.set()

    ranks = RankProcesses(divided, "thinker", tell)
    engine = build(divided, ranks)
    expected = run(build(alone, None), prompts)
    assert asyncio.run(asyncio.wait_for(answers(engine, prompts), TIMEOUT_S)) == expected
    assert not told
    ranks.processes[0].kill()
    assert lost.wait(TIMEOUT_S)
    assert told == ["rank 1 is gone"]
    engine.close()


def two_groups() -> tuple[RankGroup, RankGroup]:
    meeting_fd = os.memfd_create("ranks")
    with ThreadPoolExecutor(2) as threads:
        made = threads.map(lambda rank: RankGroup(rank, 2, meeting_fd, torch.device("cpu")), (0, 1))
        one, other = made
    os.close(meeting_fd)  # nobody needs it any more
    return one, other


def test_a_rank_adds_nothing_up_while_it_is_apart() -> None:
    one, other = two_groups()
    with one.apart():
        assert one.add_up(torch.ones(2)).tolist() == [1, 1], "the other took no part"
    with ThreadPoolExecutor(2) as threads:
        sums = list(threads.map(lambda group: group.add_up(torch.ones(2)).tolist(), (one, other)))
    assert sums == [[2, 2], [2, 2]]


def test_rank_0_parts_when_the_others_are_told_and_no_graph_is_left(tmp_path: Path) -> None:
    """NCCL's end waits for every graph that holds sums, those of cycles too."""

    class Graphs:
        max_rows = 1

        def __init__(self) -> None:
            self.itself = self

        def compile_all(self) -> None: ...

        def capture_all(self) -> int:
            return 1

    told: list[object] = []

    class Group(OneRank):
        def close(self) -> None:
            told.append([graphs() for graphs in left])

    followers = Followers([], told.append, lambda: told.append("reaped"))
    engine = build(plan_of(build_tiny("llama", tmp_path / "llama", num_hidden_layers=1)), None)
    model, kv = engine._runner.model, engine._runner.kv
    runner = LeadingRunner(model, kv, Group(2), followers, max_sequences=2, max_length=64)
    runner._graphs, runner._passes = Graphs(), Graphs()
    left = [weakref.ref(runner._graphs), weakref.ref(runner._passes)]
    assert runner.capture_graphs() == 2
    runner.close()
    assert told == ["reaped", [None, None]]
    engine.close()


def test_an_end_that_waits_for_a_graph_which_is_left_is_left_behind(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gone = threading.Event()

    class Group:
        def __del__(self) -> None:
            gone.wait()

    group, _ = two_groups()
    group._group = Group()
    monkeypatch.setattr(parallel, "CLOSE_LIMIT_S", 0.01)
    group.close()
    assert "NCCL has not ended" in caplog.text
    gone.set()


def test_graphs_are_compiled_apart_and_captured_together(tmp_path: Path) -> None:
    """Compiling runs steps on several threads, in an order that no other rank would share."""
    folder = build_tiny("llama", tmp_path / "llama", num_hidden_layers=1)
    group, _ = two_groups()
    was_apart: dict[str, bool] = {}

    class Graphs:
        max_rows = 1

        def compile_all(self) -> None:
            was_apart["compile"] = group._is_apart

        def capture_all(self) -> int:
            was_apart["capture"] = group._is_apart
            return 1

    engine = build(plan_of(folder), None)
    model, kv = engine._runner.model, engine._runner.kv
    runner = RankRunner(model, kv, group, max_sequences=2, max_length=64)
    runner._graphs = runner._passes = Graphs()
    assert runner.capture_graphs() == 2
    assert was_apart == {"compile": True, "capture": False}
    runner.close()
    engine.close()


def test_a_stage_that_starts_again_measures_no_rank_anew(tmp_path: Path) -> None:
    """Measuring runs a step, in which the ranks would wait for those that do not measure. Nor does it leave
    graphs for later, which all ranks capture in the same order."""
    folder = build_tiny("llama", tmp_path / "llama", num_hidden_layers=1)
    small = [f"thinker.{name}" for name in ("max_context=64", "max_step_tokens=24", "max_sequences=4")]
    overrides = (*small, "thinker.devices=cpu", "thinker.tensor_parallel=2")
    plan = make_plan(ServeOptions(model=folder, workers="per-stage", overrides=overrides))
    plan = plan.with_kv_blocks({"thinker": 37}).starting_again()
    lost: list[str] = []
    engine = build(plan, RankProcesses(plan, "thinker", lost.append))
    assert engine.config.num_blocks == 37
    assert len(run(engine, prompts_of(plan)[:1])) == 2
    assert not lost


def test_ranks_that_draw_something_else_are_told() -> None:
    ours, theirs = socket.socketpair()
    told: queue.SimpleQueue[str] = queue.SimpleQueue()
    followers = Followers([ours], told.put)
    for step, found in ((1, 5), (2, 6)):
        followers.ran(step, 5)
        theirs.sendall(struct.pack("<qq", step, found))
    assert told.get(timeout=TIMEOUT_S) == "rank 1 and rank 0 differ in step 2"
    theirs.close()
    followers.close()
    assert told.empty()


def test_a_plan_crosses_as_it_is() -> None:
    positions = np.arange(6, dtype=np.int64).reshape(3, 2)
    sampling = SamplingParams(temperature=0.5, logit_bias=((3, 1.5),), stop_token_ids=(4,))
    plan = StepPlan(
        step_id=7,
        released_slots=(1,),
        admissions=(Admission(2, [5, 6], 2, positions, -1, sampling, 2**64 - 1, (8, 9), (4,)),),
        block_copies=((1, 2),),
        sequences=(SequenceStep(2, 0, 2, (3,), True),),
        span_pieces=(SpanPiece(2, 0, 2, torch.zeros(2, 3, dtype=torch.bfloat16), 0),),
    )
    there = PlanDecoder(torch.device("cpu")).decode(encode_plan(plan))
    assert np.array_equal(there.admissions[0].positions_AL, positions)
    assert there.span_pieces[0].embeddings.shape == (2, 3)
    assert there.span_pieces[0].embeddings.dtype == torch.bfloat16

    def rest(plan: StepPlan) -> StepPlan:
        admissions = tuple(dataclasses.replace(a, positions_AL=None) for a in plan.admissions)
        pieces = tuple(dataclasses.replace(p, embeddings=None) for p in plan.span_pieces)
        return dataclasses.replace(plan, admissions=admissions, span_pieces=pieces)

    assert rest(there) == rest(plan)


class _Whole:
    """Weights whose every value tells its place."""

    device, dtype = torch.device("cpu"), torch.float32

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.arange(np.prod(shape), dtype=torch.float32).view(shape)


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_hold_every_row_and_column_once_and_kv_heads_as_often_as_needed(size: int) -> None:
    whole = tiny_config(num_heads=8, num_kv_heads=2, head_dim=4, intermediate_size=16)
    share = shard_config(whole, size)
    assert share.num_kv_heads == max(1, 2 // size)
    ranks = [ShardedWeights(_Whole(), whole, rank, size) for rank in range(size)]
    hidden, inner = whole.hidden_size, share.intermediate_size
    gate = torch.cat([r.take("layers.0.gate.weight", (inner, hidden)) for r in ranks])
    assert torch.equal(gate, _Whole().take("", (16, hidden)))
    down = torch.cat([r.take("layers.0.down.weight", (hidden, inner)) for r in ranks], dim=1)
    assert torch.equal(down, _Whole().take("", (hidden, 16)))
    bias = sum(r.take("layers.0.o.bias", (hidden,)) for r in ranks)
    assert torch.equal(bias, _Whole().take("", (hidden,)))
    keys = [r.take("layers.0.k.weight", (share.num_kv_heads * 4, hidden)) for r in ranks]
    heads = _Whole().take("", (2, 4, hidden))
    for rank, key in enumerate(keys):
        assert torch.equal(key.view(-1, 4, hidden)[0], heads[rank * 2 // size])


def test_what_cannot_be_divided_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="4 attention heads cannot be divided by 3"):
        shard_config(tiny_config(num_heads=4, num_kv_heads=1), 3)
    with pytest.raises(EngineError, match="6 KV heads cannot be divided by 4"):
        shard_config(tiny_config(num_heads=12, num_kv_heads=6), 4)
    folder = build_tiny("llama", tmp_path / "llama", num_hidden_layers=1)
    with pytest.raises(DeploymentError, match=r"stage.thinker.devices: .* 2 different devices"):
        plan_of(folder, "thinker.tensor_parallel=2", "thinker.devices=cuda:1")
    options = ServeOptions(model=folder, overrides=("thinker.tensor_parallel=2", "thinker.devices=cpu"))
    with pytest.raises(DeploymentError, match="worker process of their own"):
        group_stages(make_plan(options).deployment, options)
    assert "thinker/1" in plan_text(dataclasses.replace(options, workers="per-stage"))
