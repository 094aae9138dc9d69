"""Replicas of encoders and of the language model: the same answers, conversations that stay together, and the
death of one that the others take over."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from contracts.pipeline import Edge, Pipeline, StageSpec
from stages.deployment import DeploymentError
from stages.deployment_file import load_deployment
from stages.replicas import spread
from tests.parity.test_matrix import A, B
from tests.served import Served, picture

PIPELINE = Pipeline(
    name="sees",
    stages=(
        StageSpec("preprocess", "preprocess"),
        StageSpec("vision", "encoder", ("image",)),
        StageSpec("thinker", "lm"),
        StageSpec("talker", "lm"),
        StageSpec("vocoder", "vocoder"),
    ),
    edges=(
        Edge("preprocess", "vision", "features"),
        Edge("vision", "thinker", "embeddings"),
        Edge("thinker", "talker", "hidden_states"),
        Edge("talker", "vocoder", "codec_frames"),
    ),
    entry="thinker",
    terminals=("thinker", "vocoder"),
)
TWO_OF_EACH = ("vision.replicas=2", "thinker.replicas=2", "thinker.kv_memory=4MiB")
CONVERSATIONS = [
    [("user", [A, "what is it?"])],
    [("user", ["hello there, this is a question that fills a few blocks of the cache"])],
    [("user", [B, "and this?"])],
    [("user", [A, B, "which one?"])],
]


def spread_over(*overrides: str):
    return spread(PIPELINE, load_deployment(PIPELINE, None, overrides))


def test_a_replica_is_a_stage_of_its_own():
    graph = spread_over("thinker.replicas=2", 'thinker.devices=["cuda:0", "cuda:1"]', "vision.replicas=2")
    assert graph.replicas == {"vision": ("vision.0", "vision.1"), "thinker": ("thinker.0", "thinker.1")}
    assert graph.deployment.lms["thinker.1"].device_list == ("cuda:1",)
    assert {(e.source, e.target) for e in graph.pipeline.edges if e.payload == "embeddings"} == {
        (f"vision.{i}", f"thinker.{j}") for i in range(2) for j in range(2)
    }


def test_tensor_parallel_replicas_share_out_their_devices():
    devices = ", ".join(f'"cuda:{i}"' for i in range(4))
    graph = spread_over("thinker.replicas=2", "thinker.tensor_parallel=2", f"thinker.devices=[{devices}]")
    assert graph.deployment.lms["thinker.1"].rank_devices == ("cuda:2", "cuda:3")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("talker.replicas=2",), "stage.talker.replicas: only encoders and thinker"),
        (("vision.replicas=0",), "stage.vision.replicas: must be positive"),
        (("thinker.replicas=2", 'thinker.devices=["cuda:0", "cuda:1", "cuda:2"]'), "want one device or 2"),
    ],
)
def test_replicas_that_cannot_be_are_refused_by_name(overrides: tuple[str, ...], words: str):
    with pytest.raises(DeploymentError, match=words):
        spread_over(*overrides)


def test_workers_name_replicas(tmp_path: Path):
    file = tmp_path / "two.toml"
    file.write_text(
        "[stage.thinker]\nreplicas = 2\n"
        '[[worker]]\nname = "a"\nstages = ["vision", "thinker.0", "talker", "vocoder"]\n'
        '[[worker]]\nname = "b"\nstages = ["thinker.1"]\n'
    )
    assert [w.stages[-1] for w in load_deployment(PIPELINE, file).workers] == ["vocoder", "thinker.1"]
    file.write_text(file.read_text().replace("thinker.1", "thinker.2"))
    with pytest.raises(DeploymentError, match=r"no stage 'thinker\.2', only talker, thinker\.0, thinker\.1"):
        load_deployment(PIPELINE, file)


def test_replicas_answer_as_one_does(tiny: Callable[[str], Path]):
    folder = tiny("qwen2_5_vl")
    with Served(folder, "thinker.kv_memory=4MiB") as served:
        expected = [answer.tokens for answer in served.ask_all(CONVERSATIONS)]
    with Served(folder, *TWO_OF_EACH) as served:
        assert [answer.tokens for answer in served.ask_all(CONVERSATIONS)] == expected
        routed = served.stats("routing")
        assert min(routed[f"requests_to_thinker.{i}_total"] for i in range(2)) > 0
        again = served.ask_all(CONVERSATIONS)
        assert [answer.tokens for answer in again] == expected
        # Every conversation came back to the replica that has its prefix.
        assert all(answer.num_cached_tokens for answer in again)
        served.assert_clean()
        assert set(served.service.router.loads().values()) == {0}


def test_a_new_picture_is_encoded_in_one_place_for_all_who_ask(tiny: Callable[[str], Path]):
    """For whichever replica of the language model; other pictures go to the encoder that has less to do."""

    def encoded(served: Served) -> list[float]:
        return [served.stats(f"vision.{i}")["encoder_items_total"] for i in range(2)]

    with Served(tiny("qwen2_5_vl"), *TWO_OF_EACH) as served:
        texts = ("one", "two", "what is it?", "hello there, this is a long question about a picture")
        served.ask_all([[("user", [text, A])] for text in texts])
        routed = served.stats("routing")
        assert min(routed[f"requests_to_thinker.{i}_total"] for i in range(2)) > 0
        assert sorted(encoded(served)) == [0, 1]
        served.ask_all([[("user", [picture(50 + i), "what?"])] for i in range(6)])
        assert sum(encoded(served)) == 7
        assert min(encoded(served)) >= 2
        served.assert_clean()


def test_the_others_take_over_from_a_dead_replica(tiny: Callable[[str], Path]):
    long = {"max_tokens": 80, "ignore_eos": True}
    with Served(tiny("qwen2_5_vl"), *TWO_OF_EACH, workers="per-stage") as served:
        expected = [answer.tokens for answer in served.ask_all(CONVERSATIONS, **long)]

        async def die_while_answering() -> list[list[int]]:
            await served.service.reset_cache()
            tasks = [asyncio.create_task(served.answer(turns, **long)) for turns in CONVERSATIONS]
            for stage in ("thinker.1", "vision.0"):
                (worker,) = (w for w in served.service.workers() if stage in w.stages)
                os.kill(worker.pid, signal.SIGKILL)
            return [answer.tokens for answer in await asyncio.gather(*tasks)]

        assert served.run(die_while_answering()) == expected
        served.run(served.worker_restarted("thinker.1", 1))
        served.run(served.worker_restarted("vision.0", 1))
        assert [answer.tokens for answer in served.ask_all(CONVERSATIONS, **long)] == expected
        served.assert_clean()
        assert set(served.service.router.loads().values()) == {0}
