"""The deployment file: defaults, overrides, and refusals that name the stage and the field."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from contracts.pipeline import Edge, Pipeline, StageSpec
from model_families.graphs import omni_pipeline
from stages.deployment import DeploymentError, EncoderConfig, LMConfig, VocoderConfig, parse_bytes
from stages.deployment_bounds import ENCODER, LM, PLACED, VOCODER
from stages.deployment_file import load_deployment

PIPELINE = Pipeline(
    name="vl",
    stages=(
        StageSpec("preprocess", "preprocess"),
        StageSpec("vision", "encoder", ("image", "video")),
        StageSpec("thinker", "lm"),
    ),
    edges=(Edge("preprocess", "vision", "features"), Edge("vision", "thinker", "embeddings")),
    entry="thinker",
    terminals=("thinker",),
)


def test_defaults_give_every_stage_a_configuration() -> None:
    deployment = load_deployment(PIPELINE)
    assert set(deployment.encoders) == {"vision"}
    assert set(deployment.lms) == {"thinker"}
    assert deployment.edge("vision", "thinker").capacity == 256


def test_file_and_overrides(tmp_path: Path) -> None:
    file = tmp_path / "d.toml"
    file.write_text(
        '[stage.thinker]\nkv_memory = "64MiB"\nmax_sequences = 8\n[limits]\nmax_items_per_request = 3\n'
        '[[edge]]\nsource = "vision"\ntarget = "thinker"\ncapacity = 2\n'
    )
    overrides = ("thinker.max_sequences=4", "vision.devices=cuda:1", "server.max_requests=7")
    deployment = load_deployment(PIPELINE, file, overrides)
    assert deployment.lms["thinker"].kv_memory == "64MiB"
    assert deployment.lms["thinker"].max_sequences == 4
    assert deployment.encoders["vision"].device_list == ("cuda:1",)
    assert deployment.limits.max_items_per_request == 3
    assert deployment.server.max_requests == 7
    assert deployment.edge("vision", "thinker").capacity == 2


def test_talker_and_vocoder_have_sections_too() -> None:
    pipeline = omni_pipeline("omni", speaks=True)
    pipeline.validate()
    overrides = ("talker.max_sequences=4", "vocoder.max_streams=3", "server.audio_window_s=2.5")
    deployment = load_deployment(pipeline, None, overrides)
    assert list(deployment.placed) == ["vision", "audio", "thinker", "talker", "vocoder"]
    assert deployment.lms["talker"].max_sequences == 4
    assert deployment.vocoders["vocoder"].max_streams == 3
    assert deployment.server.audio_window_s == 2.5
    with pytest.raises(DeploymentError, match=r"stage\.vocoder\.max_batch_frames: at least 16, is 3"):
        load_deployment(pipeline, None, ("vocoder.max_batch_frames=3",))
    silent = omni_pipeline("omni", speaks=False)
    silent.validate()
    assert list(load_deployment(silent).placed) == ["vision", "audio", "thinker"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("thinker.colour=red", "stage.thinker.colour: unknown field"),
        ("talker.devices=cpu", "no stage or section 'talker'"),
        ("thinker", "want NAME.field=value"),
        ("thinker.devices=tpu:0", "stage.thinker.devices: 'tpu:0' is no device"),
        ("thinker.block_size=0", "stage.thinker.block_size: must be positive"),
        ("thinker.block_size=big", "stage.thinker"),
        ("thinker.policy=lottery", "stage.thinker"),
        ("thinker.max_step_tokens=8", "stage.thinker.max_step_tokens"),
        ("thinker.mixed_step_tokens=8", "stage.thinker.mixed_step_tokens"),
        ("thinker.encoder_step_tokens=-1", "stage.thinker.encoder_step_tokens: must not be negative"),
        ("vision.max_batch_items=-1", "stage.vision.max_batch_items"),
        ("vision.max_tokens_ahead=-1", "stage.vision.max_tokens_ahead"),
        ("vision.max_batch_patches=0", "stage.vision.max_batch_patches"),
        ("thinker.max_context=0", "stage.thinker.max_context: must be positive"),
        ("server.max_requests=0", "server.max_requests: must be positive"),
        ("server.max_replays=-1", "server.max_replays: must not be negative"),
        ("limits.max_item_bytes=-1", "limits.max_item_bytes: must be positive"),
        ("limits.job_timeout_s=0", "limits.job_timeout_s: must be positive"),
        ("cluster.port=70000", "cluster.port: want 0 to 65535, is 70000"),
        ("preprocess.workers=-1", "preprocess.workers: must not be negative"),
        ("server.request_timeout_s=nan", "server.request_timeout_s: must be a finite number"),
        ("server.heartbeat_s=inf", "server.heartbeat_s: must be a finite number"),
        ("thinker.memory=nan", "stage.thinker.memory: must be a finite number"),
        ("thinker.devices=cuda:²", "stage.thinker.devices: 'cuda:²' is no device"),
        (f"thinker.max_context={'9' * 4000}", "stage.thinker.max_context: no machine has so much"),
        ("thinker.memory=1e300", "stage.thinker.memory: no machine has so much"),
        ("limits.worker_memory_bytes=9999999999999999999", "limits.worker_memory_bytes: no machine has so"),
        (f"thinker.max_context={'9' * 5000}", "stage.thinker"),
        (f"thinker.max_context={'[' * 5000}", "stage.thinker"),
    ],
)
def test_refusals_name_stage_and_field(override: str, message: str) -> None:
    with pytest.raises(DeploymentError) as caught:
        load_deployment(PIPELINE, None, (override,))
    assert message in str(caught.value)


COUNTED = {
    "preprocess": ("workers", "max_queued_jobs", "index_items"),
    "server": ("max_requests", "threads"),
    "vision": ("replicas", "max_batch_tokens", "max_batch_patches", "max_batch_items", "max_tokens_ahead"),
    "thinker": (
        *("replicas", "tensor_parallel", "block_size", "max_sequences", "max_step_tokens"),
        *("mixed_step_tokens", "encoder_step_tokens"),
        *("max_step_visual_tokens", "long_prefill_cap", "max_resident_embedding_tokens"),
        "max_waiting_requests",
    ),
    "talker": ("max_sequences", "max_waiting_requests"),
    "vocoder": ("replicas", "max_streams", "max_batch_rows", "max_batch_frames"),
}


@pytest.mark.parametrize(
    ("section", "field"), [(section, field) for section, fields in COUNTED.items() for field in fields]
)
def test_counts_beyond_any_machine_are_refused_with_the_reason(section: str, field: str) -> None:
    pipeline = omni_pipeline("omni", speaks=True)
    where = section if section in ("preprocess", "server") else f"stage.{section}"
    with pytest.raises(DeploymentError, match=rf"^{where}\.{field}: at most \d+, is 1000000000000: \w+"):
        load_deployment(pipeline, None, (f"{section}.{field}=1000000000000",))


def test_every_count_of_a_stage_has_a_bound() -> None:
    """But for those that only the model's own context bounds from above."""
    harmless = {"max_context"}
    for config, bounds in ((EncoderConfig(), ENCODER), (LMConfig(), LM), (VocoderConfig(), VOCODER)):
        fields = msgspec.structs.fields(config)
        counts = {field.name for field in fields if field.type in (int, int | None)}
        assert counts - harmless == set(bounds) | set(PLACED), type(config).__name__


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '[[edge]]\nsource = "vision"\ntarget = "thinker"\ncapacity = 1000000\n',
            "edge vision->thinker.capacity: at most 65536, is 1000000",
        ),
        (
            '[[worker]]\nname = "a"\nstages = ["vision", "thinker"]\nthreads = 1000000\n',
            "worker 'a'.threads: at most 4096, is 1000000",
        ),
        ("[stage.talker]\n", "stage.talker: the pipeline has no such stage"),
        ("[stages.thinker]\n", "unknown section 'stages'"),
        ('[[worker]]\nname = "a"\nstages = ["nobody"]\n', "no stage 'nobody'"),
        ('[[edge]]\nsource = "thinker"\ntarget = "vision"\n', "no such edge"),
        ("[limits\n", "deployment"),
        ("stage = 5\n", "stage: must be a table, is 5"),
        ("stage = []\n", "stage: must be a table"),
        ("preprocess = 5\n", "preprocess: must be a table"),
        ("[stage]\nthinker = 5\n", "stage.thinker: must be a table"),
        ("worker = 5\n", "worker: must be an array of tables"),
        ("edge = [5]\n", "edge: must be an array of tables"),
        (f"a = {'9' * 5000}\n", "deployment"),
        (f"a = {'[' * 5000}\n", "deployment"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "d.toml"
    file.write_text(text)
    for overrides in ((), ("thinker.max_context=512", "preprocess.workers=1")):
        with pytest.raises(DeploymentError) as caught:
            load_deployment(PIPELINE, file, overrides)
        assert message in str(caught.value)


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "d.toml"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DeploymentError, match="not UTF-8"):
        load_deployment(PIPELINE, file)


@pytest.mark.parametrize(
    ("text", "expected"), [("1KiB", 1024), ("1.5 MiB", 3 << 19), (7, 7), ("2GB", 2 * 10**9), ("512", 512)]
)
def test_sizes(text: int | str, expected: int) -> None:
    assert parse_bytes(text, "x") == expected


@pytest.mark.parametrize("text", ["lots", "1 XiB", "-5MiB", "", "infGiB", "nanMiB", "1e400", 10**30])
def test_a_wrong_size_names_its_place(text: str) -> None:
    with pytest.raises(DeploymentError, match=r"^stage\.thinker\.kv_memory: "):
        parse_bytes(text, "stage.thinker.kv_memory")
