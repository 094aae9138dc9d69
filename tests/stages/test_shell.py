"""The order in which a shell hands out what a step gave."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import torch

from connectors.inproc import inproc_pair
from contracts.chunks import Chunk
from contracts.messages import FeaturesConsumed, FromStage, Shutdown, ToStage
from stages.shell import StageShell, StepResultBatch


class OneStep:
    """Has one step to do: a message and three chunks for a neighbour."""

    def __init__(self) -> None:
        self.is_done = False
        self.num_sent = 0

    def start(self) -> str:
        return ""

    def handle(self, message: ToStage) -> list[FromStage]:
        raise AssertionError

    def accept(self, chunk: Chunk) -> list[FromStage]:
        raise AssertionError

    def has_work(self) -> bool:
        return not self.is_done

    def due_in_s(self) -> float | None:
        return None

    async def step(self) -> StepResultBatch:
        self.is_done = True
        tensors = {"x": torch.zeros(1)}
        chunks = [("next", Chunk("r", str(stream), 0, True, tensors)) for stream in range(3)]
        return StepResultBatch([FeaturesConsumed("r", 0)], chunks)

    def sent(self, chunk: Chunk) -> None:
        self.num_sent += 1

    def abort(self, request_id: str) -> None: ...

    def reset_cache(self) -> None: ...

    def check_integrity(self) -> str | None:
        return None

    def is_idle(self) -> bool:
        return True

    def stats(self) -> dict[str, float]:
        return {}

    def close(self) -> None: ...


def test_a_neighbour_in_the_process_has_its_chunks_before_messages_go_out() -> None:
    async def scenario() -> None:
        sender, receiver = inproc_pair("edge", 2)
        logic, had_before = OneStep(), []

        def emit(messages: Sequence[FromStage]) -> None:
            if any(isinstance(message, FeaturesConsumed) for message in messages):
                had_before.extend(receiver.receive_now())

        shell = StageShell("stage", logic, emit, {"next": sender})
        running = asyncio.create_task(shell.run())
        async with asyncio.timeout(20):
            while not had_before:
                await asyncio.sleep(0)
            assert [chunk.stream for chunk in had_before] == ["0", "1"]
            assert logic.num_sent == 2
            receiver.release(*had_before)
            assert (await receiver.receive()).stream == "2"  # there was no credit for it
            shell.mailbox.put(Shutdown())
            await running
        assert logic.num_sent == 3

    asyncio.run(scenario())
