"""Planning: what cannot work is refused before a weight loads, by the name of its field."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from api import cli
from benchmarks.components.shape_folder import write_shape_folder
from lm_engine.gpu_target import GpuTarget
from model_families.registry import open_family
from stages import deployment_bounds, planning
from stages.deployment import DeploymentError
from stages.memory_plan import (
    ENCODER_GRAPH_BYTES,
    ENCODER_LIBRARY_BYTES,
    StagePlan,
    render_plan,
    tower_graph_bytes,
)
from stages.options import ServeOptions, for_machine
from stages.planning import make_plan


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("thinker.kv_memory=1MiB", "stage.thinker.kv_memory: 1.0 MiB hold no context of 4096 tokens"),
        ("thinker.kv_memory=0", "stage.thinker.kv_memory: 0.0 MiB"),
        ("thinker.memory=1MiB", "stage.thinker.memory: needs"),
    ],
)
def test_too_little_memory_is_refused(tiny: Callable[..., Path], override: str, message: str) -> None:
    with pytest.raises(DeploymentError) as caught:
        make_plan(ServeOptions(model=tiny("llama"), dtype="float32", overrides=(override,)))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("preprocess.workers=33",), "preprocess.workers: at most 32 here, is 33: each is a process, this"),
        (("server.threads=33",), "server.threads: at most 32 here, is 33: each is a thread"),
        (("thinker.replicas=33",), "stage.thinker.replicas: at most 32 here, is 33: all compute with"),
        (("thinker.tensor_parallel=33",), "stage.thinker.tensor_parallel: at most 32 here, is 33"),
        (
            ("preprocess.arena_bytes=5GiB",),
            "preprocess.arena_bytes: 5.3 GiB are to be kept in this machine's",
        ),
        (
            ("preprocess.arena_bytes=1GiB", "vision.embedding_cache_host=3.5GiB"),
            "stage.vision.embedding_cache_host: 4.6 GiB are to be kept in this machine's memory"
            " (stage.vision.embedding_cache_host 3.5 GiB, preprocess.arena_bytes 1.0 GiB, edge"
            " vision->thinker.capacity_bytes 0.1 GiB), which is 4.0 GiB",
        ),
    ],
)
def test_what_is_too_many_for_this_machine_is_refused_here_and_can_be_planned_for_another(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...], message: str
) -> None:
    monkeypatch.setattr(deployment_bounds, "num_cores", lambda: 8)
    monkeypatch.setattr(deployment_bounds, "machine_bytes", lambda: 4 << 30)
    options = ServeOptions(model=tiny("qwen2_5_vl"), dtype="float32", workers="per-stage")
    small = ("thinker.devices=cpu", "thinker.kv_memory=8MiB", "vision.devices=cpu")
    small += ("vision.embedding_cache=0",)
    with pytest.raises(DeploymentError) as caught:
        make_plan(replace(options, overrides=(*small, *overrides)))
    assert message in str(caught.value)
    if "tensor_parallel" not in overrides[0]:  # which the tiny model's heads do not allow
        make_plan(replace(options, overrides=(*small, *overrides), assumed_gpu_memory="1GiB"))


@pytest.mark.parametrize(
    "override", ["preprocess.workers=16", "server.threads=16", "vision.replicas=16", "preprocess.workers=0"]
)
def test_what_many_a_deployment_says_is_allowed_on_a_machine_of_one_core(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, override: str
) -> None:
    monkeypatch.setattr(deployment_bounds, "num_cores", lambda: 1)
    small = ("thinker.devices=cpu", "vision.devices=cpu", "vision.embedding_cache=0", override)
    make_plan(ServeOptions(model=tiny("qwen2_5_vl"), dtype="float32", overrides=small))


def test_the_plan_is_printed_and_what_does_not_fit_refused_before_anything_loads(
    tiny: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def load(*_: object, **__: object) -> None:
        raise AssertionError("a plan loads nothing")

    for name in ("load_decoder", "load_encoder"):
        monkeypatch.setattr(type(open_family(tiny("qwen2_5_vl"))), name, load)
    file = tmp_path / "d.toml"
    file.write_text(
        '[stage.vision]\nreplicas = 2\n[[edge]]\nsource = "vision"\ntarget = "thinker"\ncapacity = 3\n'
        '[[worker]]\nname = "eyes"\nstages = ["vision.0", "vision.1"]\n'
        '[[worker]]\nname = "mind"\nstages = ["thinker"]\n'
    )
    asked = ["plan", str(tiny("qwen2_5_vl")), "--deployment", str(file), "--dtype", "float32"]
    assert cli.main([*asked, "--kv-memory", "8MiB"]) == 0
    text = capsys.readouterr().out
    assert "qwen2_5_vl" in text
    assert "context 4096 tokens" in text
    for edge in ("preprocess -> vision.0", "preprocess -> vision.1"):
        assert re.search(rf"{edge}  features over shared memory", text), text
    for edge in ("vision.0 -> thinker", "vision.1 -> thinker"):
        assert re.search(rf"{edge}  embeddings over shm, capacity 3\b", text), text
    rows = {line.split()[0]: line for line in text.splitlines() if line.strip()}
    for stage in ("vision.0", "vision.1", "thinker"):
        assert re.search(r"\bcpu\b.*\bfloat32\b", rows[stage]), text
    assert "8.0 MiB" in rows["thinker"]
    assert "worker eyes  vision.0, vision.1\n" in text
    assert "worker mind  thinker\n" in text
    assert cli.main([*asked, "--kv-memory", "400TiB"]) == 1
    out, error = capsys.readouterr()
    assert out == ""
    assert "thinker" in error
    assert "Traceback" not in error


def test_a_plan_without_workers_says_so(
    tiny: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", str(tiny("qwen2_5_vl")), "--set", "vision.replicas=2"]) == 0
    assert "\n  the front process  vision.0, vision.1, thinker\n" in capsys.readouterr().out


def test_a_smaller_context_fits_a_smaller_memory(tiny: Callable[..., Path]) -> None:
    overrides = ("thinker.kv_memory=1MiB", "thinker.max_context=512")
    plan = make_plan(ServeOptions(model=tiny("llama"), dtype="float32", overrides=overrides))
    assert plan.context_length == 512


def test_a_gpu_that_is_not_there_is_refused(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ServeOptions(model=tiny("llama"), overrides=("thinker.devices=cuda:2",))
    for num_gpus, there in ((0, "no CUDA device"), (2, "cuda:0 to cuda:1")):
        monkeypatch.setattr(torch.cuda, "device_count", lambda num_gpus=num_gpus: num_gpus)
        with pytest.raises(DeploymentError, match=rf"stage\.thinker\.devices: no cuda:2 .* {there}"):
            make_plan(options)


def test_another_machine_s_gpus_can_be_planned_for(tiny: Callable[..., Path]) -> None:
    overrides = ("thinker.devices=cuda:2", "thinker.kv_memory=64MiB")
    options = ServeOptions(model=tiny("llama"), overrides=overrides, assumed_gpu_memory="1GiB")
    assert make_plan(options).stage("thinker").device == "cuda:2"
    with pytest.raises(DeploymentError, match=r"cuda:2.* 8\.0 MiB"):
        make_plan(replace(options, assumed_gpu_memory="8MiB"))
    with pytest.raises(DeploymentError, match="--gpu-memory: 'much' is no size"):
        make_plan(replace(options, assumed_gpu_memory="much"))


def test_planning_imports_no_compiler(tiny: Callable[..., Path]) -> None:
    """Its import takes longer than all the rest of a plan."""
    code = (
        "import sys; from pathlib import Path; from stages.options import ServeOptions;"
        " from stages.planning import make_plan; make_plan(ServeOptions(model=Path(sys.argv[1])));"
        " assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(tiny("qwen2_5_vl"))], check=True, timeout=300)


@pytest.mark.parametrize("shape", ["qwen2_5_vl_3b", "qwen3_vl_4b", "qwen3_omni_30b_a3b"])
def test_the_large_models_can_be_planned(tmp_path: Path, shape: str) -> None:
    """From their published configurations, which leave to the families' defaults what they do not say."""
    plan = make_plan(ServeOptions(model=write_shape_folder(shape, tmp_path / shape)), check_memory=False)
    stages = {stage.stage for stage in plan.stages}
    assert stages == {s.name for s in plan.pipeline.stages if s.kind != "preprocess"}


@pytest.fixture(scope="module")
def large_omni(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shape_folder("qwen3_omni_30b_a3b", tmp_path_factory.mktemp("large") / "omni")


HOPPER = GpuTarget((9, 0), 232448)


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """A machine with one GPU of so many free bytes, as far as planning looks."""

    def arrange(free: int) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, free))
        monkeypatch.setattr(planning, "target_of", lambda device: HOPPER)

    return arrange


ON_GPU = tuple(f"{stage}.devices=cuda:0" for stage in ("vision", "audio", "thinker", "talker", "vocoder"))


def test_stages_share_what_their_gpu_has(large_omni: Path, one_gpu: Callable[[int], None]) -> None:
    """A whole omni model on one GPU fits by default: its KV caches divide what the weights leave."""
    one_gpu(139 << 30)
    plan = make_plan(ServeOptions(model=large_omni, overrides=ON_GPU))
    assert sum(stage.total for stage in plan.stages) <= 0.9 * (139 << 30)
    assert sum(stage.total for stage in plan.stages) > 0.89 * (139 << 30)
    assert plan.stage("thinker").cache > 2 * plan.stage("talker").cache > 1 << 30
    assert plan.options.gpu_targets == (("cuda:0", HOPPER),)


def test_a_worker_that_starts_again_plans_as_before(large_omni: Path, one_gpu: Callable[[int], None]) -> None:
    one_gpu(139 << 30)
    plan = make_plan(ServeOptions(model=large_omni, overrides=ON_GPU))
    one_gpu(20 << 30)  # the other stages have loaded
    sent = msgspec.json.decode(
        msgspec.json.encode(plan.options, enc_hook=str), type=ServeOptions, dec_hook=_path
    )
    assert sent == plan.options
    assert make_plan(sent, check_memory=False).stages == plan.stages


@pytest.mark.parametrize("reached", [True, False])
def test_a_worker_asks_no_gpu_which_connectors_were_chosen(
    large_omni: Path, one_gpu: Callable[[int], None], monkeypatch: pytest.MonkeyPatch, reached: bool
) -> None:
    """Who has asked has touched a GPU: its kernels could not be compiled by forks of it any more."""
    one_gpu(139 << 30)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: reached)
    overrides = tuple(setting.replace("cuda:0", "cuda:1") for setting in ON_GPU[3:])
    options = ServeOptions(model=large_omni, overrides=ON_GPU[:3] + overrides, workers="per-stage")
    plan = make_plan(options)
    assert plan.connectors["thinker", "talker"] == ("cuda_ipc" if reached else "shm")

    def ask(one: object, other: object) -> bool:
        raise AssertionError("asked a GPU")

    monkeypatch.setattr(torch.cuda, "can_device_access_peer", ask)
    again = make_plan(for_machine(plan.options, ""), check_memory=False, check_weights=False)
    assert again.connectors == plan.connectors
    assert again.stages == plan.stages


def _path(kind: type, value: object) -> object:
    return kind(value)


@pytest.mark.parametrize("limit", ["", "30GiB"])
def test_what_edges_hold_on_a_gpu_is_planned(
    large_omni: Path, one_gpu: Callable[[int], None], tmp_path: Path, limit: str
) -> None:
    """By the sender, and where it has a limit within that."""
    one_gpu(139 << 30)
    file = tmp_path / "deployment.toml"
    file.write_text(
        '[[edge]]\nsource = "talker"\ntarget = "vocoder"\ncapacity_bytes = "3MiB"\n'
        '[[edge]]\nsource = "vision"\ntarget = "thinker"\nconnector = "shm"\n'
    )
    overrides = ON_GPU + ((f"talker.memory={limit}",) if limit else ())
    options = ServeOptions(model=large_omni, overrides=overrides, deployment=file)
    together = make_plan(options)
    assert {stage.edges for stage in together.stages} == {0}, "in one process nothing is copied"
    apart = make_plan(replace(options, workers="per-stage"))
    pools = {stage.stage: stage.edges for stage in apart.stages if stage.edges}
    assert pools == {"audio": 64 << 20, "thinker": 64 << 20, "talker": 4 << 20}
    assert sum(stage.total for stage in apart.stages) <= 0.9 * (139 << 30)
    assert "64.0 MiB" in render_plan(list(apart.stages))
    file.write_text('[[edge]]\nsource = "thinker"\ntarget = "talker"\ncapacity_bytes = "200GiB"\n')
    too_much = replace(options, workers="per-stage", overrides=(*overrides, "thinker.memory=100GiB"))
    with pytest.raises(DeploymentError, match=r"stage\.thinker\.memory: .* edges 200\.00 GiB"):
        make_plan(too_much)


@pytest.mark.parametrize(
    ("memory", "words"),
    [
        (
            ("0.5", "0.55"),
            r"device cuda:0: 84\.00 GiB wanted .*vision 40\.00 GiB.*thinker 44\.00 GiB.* 80\.00",
        ),
        (("40GiB", "60GiB"), r"100\.00 GiB wanted .*vision 40\.00 GiB.*thinker 60\.00 GiB"),
        (("2GiB", "1.0"), r"82\.00 GiB wanted"),
        (("1.5", "0.5"), r"stage\.vision\.memory: a fraction .* is 1\.5"),
        (("0.2", "-0.5"), r"stage\.thinker\.memory: a fraction .* is -0\.5"),
        (("0.2", "0"), r"stage\.thinker\.memory: must be positive"),
    ],
)
def test_memory_promised_twice_is_refused(tmp_path: Path, memory: tuple[str, str], words: str) -> None:
    """MEM-01: what a stage may use counts, not what it needs at least."""
    folder = write_shape_folder("qwen2_5_vl_3b", tmp_path / "shape")
    overrides = tuple(
        f"{stage}.{field}={value}"
        for stage, share in zip(("vision", "thinker"), memory, strict=True)
        for field, value in (("devices", "cuda:0"), ("memory", share))
    )
    with pytest.raises(DeploymentError, match=words):
        make_plan(ServeOptions(model=folder, overrides=overrides, assumed_gpu_memory="80GiB"))


def test_a_promise_to_one_stage_is_kept_from_the_others(tmp_path: Path) -> None:
    """A cache without a bound of its own is given what the others may not use."""
    folder = write_shape_folder("qwen2_5_vl_3b", tmp_path / "shape")
    overrides = ("vision.devices=cuda:0", "thinker.devices=cuda:0", "vision.memory=0.5")
    plan = make_plan(ServeOptions(model=folder, overrides=overrides, assumed_gpu_memory="80GiB"))
    assert plan.stage("thinker").total <= 40 << 30
    assert plan.stage("thinker").total > 30 << 30


def test_a_gpu_too_small_for_the_weights_is_refused(large_omni: Path, one_gpu: Callable[[int], None]) -> None:
    one_gpu(64 << 30)
    with pytest.raises(DeploymentError, match=r"device cuda:0: .* wanted \(vision .*64\.00 GiB free"):
        make_plan(ServeOptions(model=large_omni, overrides=ON_GPU))


def test_a_cache_in_e4m3_holds_twice_the_tokens_of_the_same_memory(tmp_path: Path) -> None:
    folder = write_shape_folder("qwen2_5_vl_3b", tmp_path / "shape")

    def cache(*overrides: str) -> int:
        options = ServeOptions(
            model=folder, dtype="bfloat16", overrides=("thinker.max_context=8192", *overrides)
        )
        return make_plan(options, check_memory=False, check_weights=False).stage("thinker").cache

    plain, halved = cache("thinker.max_sequences=1"), cache("thinker.max_sequences=1", "thinker.kv_dtype=fp8")
    assert halved / plain == (128 + 1) / 256


def test_graphs_are_planned_on_a_gpu(large_omni: Path, one_gpu: Callable[[int], None]) -> None:
    """As the tensors' lives at these shapes add up to: a batch of frames decoded, 2,048 tokens of a
    thinker."""
    one_gpu(139 << 30)
    settings = ("thinker.max_sequences=128", "vocoder.dtype=bfloat16")
    options = ServeOptions(model=large_omni, overrides=(*ON_GPU, *settings))
    plan = make_plan(options, check_weights=False)
    vocoder, thinker = plan.stage("vocoder"), plan.stage("thinker")
    assert vocoder.graphs == pytest.approx(584 << 20, rel=0.1)
    assert thinker.graphs == pytest.approx((533 + 317 + 95) << 20, rel=0.1)
    assert sum(stage.total for stage in plan.stages) <= 139 << 30
    assert plan.stage("vision").graphs == pytest.approx((506 + 64) << 20, rel=0.01)
    assert plan.stage("audio").graphs == (256 + 64) << 20
    without = make_plan(
        ServeOptions(model=large_omni, overrides=(*ON_GPU, *settings, "thinker.cuda_graphs=false")),
        check_weights=False,
    )
    assert without.stage("thinker").graphs == 0


def test_a_tower_s_graphs_are_planned_for_what_its_batches_need(
    large_omni: Path, one_gpu: Callable[[int], None]
) -> None:
    one_gpu(139 << 30)

    def vision(*settings: str) -> StagePlan:
        options = ServeOptions(model=large_omni, overrides=(*ON_GPU, *settings))
        return make_plan(options, check_weights=False).stage("vision")

    default, none = vision(), vision("vision.cuda_graphs=false")
    assert none.graphs == tower_graph_bytes(none) == 0
    most = ENCODER_GRAPH_BYTES + ENCODER_LIBRARY_BYTES
    assert tower_graph_bytes(vision("vision.max_batch_patches=65536")) == most
    whole, half = (
        tower_graph_bytes(plan) - ENCODER_LIBRARY_BYTES
        for plan in (default, vision("vision.max_batch_patches=6144"))
    )
    assert half == pytest.approx(whole / 2, abs=2)
    rest = default.total - default.graphs
    assert vision(f"vision.memory={rest + (100 << 20)}").graphs == 100 << 20
    assert vision(f"vision.memory={rest}").graphs == 0
    assert vision("vision.devices=cpu").graphs == 0
