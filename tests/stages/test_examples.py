"""The example deployments: each is accepted for a model it is meant for, on a machine it is meant for."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from benchmarks.components.shape_folder import write_shape_folder
from lm_engine.gpu_target import GpuTarget
from model_families.census import take_census
from model_families.graphs import vision_pipeline
from model_families.registry import open_family
from stages import deployment_bounds, planning
from stages.deployment import DeploymentError
from stages.deployment_file import load_deployment
from stages.options import ServeOptions
from stages.planning import Plan
from tests.connectors.test_contract import has_nixl

EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples" / "deployments"
# file: the model's shape, GPUs, GiB of each
MEANT_FOR = {
    "one-gpu.toml": ("qwen2_5_vl_3b", 1, 79),
    "one-gpu-two-processes.toml": ("qwen2_5_vl_3b", 1, 79),
    "two-gpus-replicas.toml": ("qwen2_5_vl_3b", 2, 79),
    "two-gpus.toml": ("qwen2_5_vl_3b", 2, 79),
    "two-gpus-tensor-parallel.toml": ("qwen2_5_vl_3b", 2, 79),
    "two-machines.toml": ("qwen2_5_vl_3b", 1, 79),
    "omni-one-gpu.toml": ("qwen3_omni_30b_a3b", 1, 139),
    "omni-two-gpus.toml": ("qwen3_omni_30b_a3b", 2, 79),
}
HOPPER = GpuTarget((9, 0), 232448)
opened, counted = cache(open_family), cache(take_census)  # seconds each, of a large vocabulary


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("shapes")
    return cache(lambda shape: write_shape_folder(shape, folder / shape))


def plan_of(patch: pytest.MonkeyPatch, model: Path, file: str, gpus: int, gib: float) -> Plan:
    free = int(gib * (1 << 30))
    patch.setattr(torch.cuda, "is_available", lambda: True)
    patch.setattr(torch.cuda, "device_count", lambda: gpus)
    patch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: True)
    patch.setattr(torch.cuda, "mem_get_info", lambda device: (free, free))
    patch.setattr(planning, "target_of", lambda device: HOPPER)
    patch.setattr(deployment_bounds, "machine_bytes", lambda: 64 << 30)
    patch.setattr(planning, "open_family", opened)
    patch.setattr(planning, "take_census", counted)
    patch.setattr(type(opened(model)), "check_weights", lambda self: None)
    return planning.make_plan(ServeOptions(model=model, deployment=EXAMPLES / file))


def test_every_example_is_tried() -> None:
    assert {file.name for file in EXAMPLES.glob("*.toml")} == {*MEANT_FOR, "cpu.toml"}
    assert load_deployment(vision_pipeline("vl"), EXAMPLES / "cpu.toml").preprocess.workers == 1


@pytest.mark.parametrize("file", MEANT_FOR)
def test_it_fits_and_its_edges_have_connectors(
    shapes: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    shape, gpus, gib = MEANT_FOR[file]
    if "host =" in (EXAMPLES / file).read_text() and not has_nixl():
        pytest.skip("the extra omnistage[nixl] is not installed")
    plan = plan_of(monkeypatch, shapes(shape), file, gpus, gib)
    assert set(plan.connectors.values()) <= ({"nixl"} if plan.elsewhere else {"inproc", "shm", "cuda_ipc"})
    assert {stage.device for stage in plan.stages} == {f"cuda:{i}" for i in range(gpus)}
    with pytest.raises(DeploymentError, match=r"^device cuda:"):
        plan_of(monkeypatch, shapes(shape), file, gpus, 8)


def test_two_gpus_part_thinking_from_seeing_hearing_and_speaking(
    shapes: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(monkeypatch, shapes("qwen3_omni_30b_a3b"), "omni-two-gpus.toml", 2, 79)
    on_first = {stage.stage for stage in plan.stages if stage.device == "cuda:0"}
    assert on_first == {"thinker"}
    assert {stage.stage for stage in plan.stages} - on_first == {"vision", "audio", "talker", "vocoder"}
    # A context for each of as many answers as the vocoder takes, all of them as long as may be.
    talker = plan.family.talker_config
    assert talker is not None
    kv_tokens = plan.stage("talker").cache // talker.kv_bytes_per_token(torch.bfloat16)
    assert kv_tokens > 128 * 120 * 12.5
