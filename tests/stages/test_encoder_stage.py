"""The encoder stage hands embeddings over when they are computed, and hears its mailbox meanwhile."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import torch

from contracts.messages import FeaturesConsumed
from encoder_pool.pool import EncoderPool, EncoderPoolConfig
from stages.encoder_stage import EncoderStage, Wait, launched
from tests.encoder_pool.fakes import FakeEncoder, add, expected


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
