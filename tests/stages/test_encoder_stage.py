"""The encoder stage hands embeddings over when they are computed, and hears its mailbox meanwhile."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from contracts.errors import EngineError
from contracts.media import FeatureRef
from contracts.messages import FeaturesConsumed, Heard, Listen
from encoder_pool.model import EncoderInput, GraphBounds
from encoder_pool.pool import EncoderPool, EncoderPoolConfig
from model_families.vision.encoder import VisionEncoder
from stages.build import build_encoder_pool
from stages.encoder_stage import EncoderStage, Wait, launched, no_arena
from stages.memory_plan import ENCODER_LAYOUT_BYTES
from stages.options import ServeOptions
from stages.planning import make_plan
from tests.encoder_pool.fakes import FakeEncoder, add, encode_message, expected


class Device:
    """Computes until it is let go."""

    def __init__(self) -> None:
        self.waited = threading.Event()
        self.done = threading.Event()
        self.num_asked = 0

    def launched(self, device: torch.device) -> Wait:
        self.num_asked += 1
        return self._wait

    def _wait(self) -> None:
        self.waited.set()
        assert self.done.wait(10)


def stage_of(device: Device) -> EncoderStage:
    def build() -> tuple[EncoderPool, str]:
        return EncoderPool(FakeEncoder(), EncoderPoolConfig(), "vision"), ""

    def read(ref: object) -> np.ndarray:
        raise AssertionError("nothing is read")

    stage = EncoderStage("vision", build, read, device.launched)
    stage.start()
    return stage


def test_embeddings_come_when_they_are_computed() -> None:
    asyncio.run(embed_while_the_loop_is_free())


async def embed_while_the_loop_is_free() -> None:
    device = Device()
    stage = stage_of(device)
    add(stage.pool, "a", 1)
    add(stage.pool, "b", 2)
    stepping = asyncio.create_task(stage.step())
    await asyncio.to_thread(device.waited.wait, 10)
    stage.abort("a")  # the loop is free
    assert not stepping.done()
    device.done.set()
    batch = await stepping
    assert [type(message) for message in batch.messages] == [FeaturesConsumed, FeaturesConsumed]
    tensors = {chunk.request_id: chunk.tensors["embeddings"] for _, chunk in batch.chunks}
    assert torch.equal(tensors["b"], expected(2, 1))
    for _, chunk in batch.chunks:
        stage.sent(chunk)
    assert stage.is_idle()
    assert stage.check_integrity() is None


def test_nothing_is_waited_for_where_nothing_was_embedded() -> None:
    device = Device()
    stage = stage_of(device)
    message = add(stage.pool, "a", 1)
    stage.abort("a")
    stage.pool.add(message, None)  # asks for features
    assert len(asyncio.run(stage.step()).messages) == 1
    assert device.num_asked == 0


def test_what_a_processor_computes_is_done_at_once() -> None:
    assert launched(torch.device("cpu")) is None


class FakeListener(FakeEncoder):
    def __init__(self) -> None:
        super().__init__()
        self.heard_together: list[list[int]] = []

    def heard(self, items: list[EncoderInput]) -> list[str]:
        values = [int(item.features.flatten()[0]) for item in items]
        self.heard_together.append(values)
        if self.poison & set(values):
            raise self.error("too loud")
        return [f"said {value}" for value in values]


def test_sounds_are_written_down_together_beside_what_is_encoded() -> None:
    """An error is an answer too: of the one sound alone."""
    model = FakeListener()
    model.poison = {2}

    arena = {value: np.full((4, 4, 3), value, np.uint8) for value in (1, 2, 3)}

    def read(ref: FeatureRef) -> np.ndarray:
        return arena[ref.offset]

    stage = EncoderStage(
        "audio", lambda: (EncoderPool(model, EncoderPoolConfig(), "audio"), ""), read, lambda device: None
    )
    stage.start()
    assert stage.is_idle()
    for token, value in enumerate([1, 2, 3], 7):
        ref = FeatureRef(arena="a", offset=value, nbytes=48, dtype="uint8", shape=(4, 4, 3))
        item = msgspec.structs.replace(encode_message("a", 0).item, features=ref)
        assert stage.handle(Listen(token, item)) == []
    assert isinstance(stage.handle(msgspec.structs.replace(encode_message("r", 4), item=item)), list)
    assert not stage.is_idle()
    told = []
    while stage.has_work():
        batch = asyncio.run(stage.step())
        told += [message for message in batch.messages if isinstance(message, Heard)]
        for _, chunk in batch.chunks:
            stage.sent(chunk)
    error = EngineError("an item could not be encoded: too loud", stage="audio").info()
    assert told == [Heard(7, "audio", "said 1"), Heard(8, "audio", error=error), Heard(9, "audio", "said 3")]
    assert model.heard_together == [[1, 2, 3], [1], [2, 3], [2], [3]]
    assert model.calls == [[3]]
    assert stage.is_idle()
    assert stage.check_integrity() is None


def test_a_stage_that_closes_drops_its_graphs() -> None:
    stage = stage_of(Device())
    model = stage.pool._model
    assert isinstance(model, FakeEncoder)
    stage.reset_cache()
    stage.close()
    assert model.num_drops == 2
    EncoderStage("vision", lambda: (stage.pool, ""), no_arena).close()  # never started


@pytest.mark.parametrize("starts_again", [False, True])
def test_a_tower_is_told_what_its_graphs_may_take(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, starts_again: bool
) -> None:
    """The largest is captured before requests come, unless they wait already."""
    told: list[tuple[GraphBounds, bool]] = []
    monkeypatch.setattr(
        VisionEncoder, "allow_graphs", lambda self, bounds, *, ahead: told.append((bounds, ahead))
    )
    small = ("vision.devices=cpu", "vision.max_batch_tokens=100", "vision.max_batch_patches=300")
    options = ServeOptions(model=tiny("qwen2_5_vl"), overrides=small, dtype="float32")
    plan = make_plan(options, check_memory=False)
    config, stage = plan.deployment.encoders["vision"], plan.stage("vision")
    build_encoder_pool(plan.family, config, replace(stage, starts_again=starts_again))
    assert told == []  # none are planned on a CPU
    planned = replace(stage, graphs=ENCODER_LAYOUT_BYTES + 77, starts_again=starts_again)
    build_encoder_pool(plan.family, config, planned)
    assert told == [(GraphBounds(77, max_tokens=100, max_patches=300), not starts_again)]
