"""Spoken answers and the loss of a stage, against scripted stages: new ids, what is told again, what is
not."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from contracts.errors import EngineError, ServiceUnavailable
from contracts.messages import (
    Abort,
    Aborted,
    Audio,
    Generate,
    Generated,
    Grant,
    SampleDelta,
    Speak,
    StageFailed,
    StageReady,
    ToStage,
    Vocode,
)
from stages.coordinator import Coordinator
from tests.stages.speech_fakes import PIPELINE, Spoken, order, question
from tests.vocoder.fakes import SAMPLES_PER_FRAME

STAGES = ("thinker", "talker", "vocoder")


def run(coroutine) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 120))


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def text(*token_ids: int, request_id: str = "r", finish: str | None = None) -> Generated:
    stop = token_ids[-1] if finish == "stop" and token_ids else None
    delta = SampleDelta(sample=0, token_ids=token_ids, finish_reason=finish, stop_token_id=stop)
    return Generated(request_id=request_id, deltas=(delta,))


def audio(num_samples: int, *, request_id: str = "r", finish: str | None = None) -> Audio:
    return Audio(request_id=request_id, pcm=bytes(4 * num_samples), finish_reason=finish)


@dataclass
class Graph:
    sent: list[tuple[str, ToStage]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.coordinator = Coordinator(PIPELINE, lambda stage, message: self.sent.append((stage, message)))
        self.coordinator.dispatch([StageReady(stage, "") for stage in STAGES])

    def take(self) -> list[tuple[str, ToStage]]:
        taken, self.sent = self.sent, []
        return taken

    def start(self, **options) -> asyncio.Task[Spoken]:
        async def collect() -> Spoken:
            spoken = Spoken()
            async for part in self.coordinator.run(question("r", 1, 2), (), order(**options)):
                spoken.take(part)
            return spoken

        return asyncio.get_running_loop().create_task(collect())

    def acknowledge(self, request_id: str) -> list[str]:
        """Answers every Abort of the id, one after the other; the stages in the order they were told."""
        told = []
        while aborts := [(s, m) for s, m in self.take() if m == Abort(request_id)]:
            ((stage, _),) = aborts
            told.append(stage)
            self.coordinator.dispatch([Aborted(request_id, stage)])
        return told


@pytest.mark.parametrize("lost", STAGES)
def test_the_loss_of_any_of_its_stages_starts_the_answer_again_in_all(lost: str) -> None:
    async def main() -> None:
        graph = Graph()
        task = graph.start()
        await settle()
        graph.take()
        graph.coordinator.dispatch([text(5), text(6), audio(100)])
        await settle()
        graph.coordinator.stage_lost(lost, restarts=True)
        assert graph.acknowledge("r") == [s for s in STAGES if s != lost]
        graph.coordinator.dispatch([text(7), audio(50)])  # of the attempt that was given up
        graph.coordinator.dispatch([StageReady(lost, "")])
        opened = dict(graph.take())
        assert opened["vocoder"] == Vocode(request_id="r+1", voice="ada", seed=5, skip_samples=100)
        assert isinstance(opened["talker"], Speak)
        assert opened["talker"].request_id == "r+1"
        generate = opened["thinker"]
        assert isinstance(generate, Generate)
        assert (generate.request_id, generate.resume, generate.forced) == ("r+1", ((5, 6),), None)
        graph.coordinator.dispatch([text(8, request_id="r+1"), text(0, request_id="r+1", finish="stop")])
        graph.coordinator.dispatch([audio(60, request_id="r+1", finish="stop")])
        await settle()
        assert graph.acknowledge("r+1") == list(STAGES)
        spoken = await task
        assert spoken.tokens == [5, 6, 8, 0]
        assert spoken.samples.numel() == 160
        assert graph.coordinator.num_requests() == 0

    run(main())


def test_a_text_that_has_ended_is_forced_when_its_speech_starts_again() -> None:
    async def main() -> None:
        graph = Graph()
        task = graph.start(bound=10)
        await settle()
        graph.coordinator.dispatch([text(5), text(6), text(0, finish="stop"), audio(3)])
        await settle()
        graph.take()
        graph.coordinator.stage_lost("vocoder", restarts=True)
        graph.acknowledge("r")
        graph.coordinator.dispatch([StageReady("vocoder", "")])
        (_, vocode), (_, speak), (_, grant), (_, generate) = graph.take()
        assert isinstance(generate, Generate)
        assert generate.forced == (5, 6)
        assert isinstance(vocode, Vocode)
        assert vocode.skip_samples == 3
        assert isinstance(speak, Speak)
        assert speak.max_frames == 16, "no more is reserved than its text may take"
        assert grant == Grant("r+1", 16, final=True, most_frames=16)
        graph.coordinator.dispatch([text(request_id="r+1", finish="stop")])
        graph.coordinator.dispatch([audio(1, request_id="r+1", finish="length")])
        await settle()
        graph.acknowledge("r+1")
        spoken = await task
        assert (spoken.tokens, spoken.text_finish, spoken.audio_finish) == ([5, 6, 0], "stop", "length")

    run(main())


def test_a_stage_that_dies_again_and_again_fails_the_request() -> None:
    async def main() -> None:
        graph = Graph()
        task = graph.start()
        await settle()
        for death in range(7):
            assert graph.coordinator.num_requests() == 1
            graph.coordinator.stage_lost("talker", restarts=True)
            graph.acknowledge("r" if death == 0 else f"r+{death}")
            graph.coordinator.dispatch([StageReady("talker", "")])
        with pytest.raises(EngineError, match="stage talker died 7 times"):
            await task
        assert graph.acknowledge("r+6") == ["thinker", "vocoder"]
        assert graph.coordinator.num_requests() == 0

    run(main())


def test_what_waits_for_a_stage_that_stays_down_fails() -> None:
    async def main() -> None:
        graph = Graph()
        graph.coordinator.stage_lost("vocoder", restarts=True)
        task = graph.start()
        await settle()
        assert graph.take() == []
        graph.coordinator.dispatch([StageFailed("vocoder", EngineError("no memory").info())])
        with pytest.raises(EngineError, match="no memory"):
            await task
        with pytest.raises(ServiceUnavailable):
            await graph.start()
        assert graph.coordinator.num_requests() == 0

    run(main())


def test_grants_follow_what_the_client_has_taken() -> None:
    async def main() -> None:
        graph = Graph()
        answer = graph.coordinator.run(question("r", 1, 2), (), order(window=16))
        graph.coordinator.dispatch([])
        waiting = asyncio.ensure_future(anext(answer))
        await settle()
        speak = next(m for _, m in graph.take() if isinstance(m, Speak))
        assert speak.granted_frames == 16
        graph.coordinator.dispatch([audio(SAMPLES_PER_FRAME) for _ in range(5)])
        await waiting
        for taken in range(1, 5):  # the last one is given, not yet taken
            await anext(answer)
            grants = [m for _, m in graph.take()]
            assert grants == ([Grant("r", 16 + taken)] if taken % 2 == 0 else [])  # an eighth of the window
        closing = asyncio.ensure_future(answer.aclose())
        await settle()
        graph.acknowledge("r")
        await closing

    run(main())


def test_an_answer_without_a_word_has_no_sound_and_is_no_error() -> None:
    async def main() -> None:
        graph = Graph()
        task = graph.start()
        await settle()
        graph.coordinator.dispatch([audio(0, finish="stop"), text(0, finish="stop")])
        spoken = await task
        assert (spoken.pcm, spoken.audio_finish) == (b"", "stop")

    run(main())


def test_muteness_is_noticed_even_before_the_text() -> None:
    async def main() -> None:
        graph = Graph()
        task = graph.start()
        await settle()
        graph.coordinator.dispatch([audio(0, finish="stop"), text(4, 0, finish="stop")])
        with pytest.raises(EngineError, match="no audio"):
            await task

    run(main())
