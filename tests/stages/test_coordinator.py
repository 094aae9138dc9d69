"""The coordinator against scripted stages: routing, features' lifetime, abort fan-out, stage failure."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from contracts.digests import ContentDigest
from contracts.errors import EngineError, MediaDecodeError, OmnistageError, ServiceUnavailable
from contracts.media import FeatureRef, MediaItem, Prompt
from contracts.messages import (
    Abort,
    Aborted,
    CheckIntegrity,
    EmbeddingsNeeded,
    Encode,
    Failed,
    FeaturesConsumed,
    FeaturesNeeded,
    Generate,
    Generated,
    Heard,
    IntegrityReport,
    Listen,
    SampleDelta,
    StageFailed,
    StageReady,
    StopSample,
    ToStage,
)
from contracts.params import SamplingParams
from stages.coordinator import Coordinator
from tests.stages.test_deployment import PIPELINE

REF = FeatureRef(arena="a", offset=0, nbytes=12, dtype="uint8", shape=(2, 2, 3))


@dataclass
class FakeMedia:
    """A media handle that counts; `known_only` starts without features, as after a media-index hit."""

    known_only: bool = False
    is_new: bool = False
    error: OmnistageError | None = None
    held: bool = True
    materialized: int = 0

    def __post_init__(self) -> None:
        self.held = not self.known_only

    def pin(self) -> MediaItem:
        digest = ContentDigest(b"0" * 16)
        return MediaItem(
            modality="image",
            bytes_digest=digest,
            pixel_digest=digest,
            num_tokens=1,
            grid_thw=(1, 2, 2),
            source_size=(2, 2),
            features=REF if self.held else None,
        )

    async def materialize(self) -> MediaItem:
        self.materialized += 1
        if self.error is not None:
            raise self.error
        self.held = True
        return self.pin()

    def release(self) -> None:
        self.held = False


@dataclass
class Graph:
    """A coordinator whose stages are this test."""

    sent: list[tuple[str, ToStage]] = field(default_factory=list)
    encode_ahead: bool = True

    def __post_init__(self) -> None:
        self.coordinator = Coordinator(
            PIPELINE,
            lambda stage, message: self.sent.append((stage, message)),
            encode_ahead=self.encode_ahead,
        )
        self.coordinator.dispatch([StageReady("vision", "v"), StageReady("thinker", "t")])

    def take(self) -> list[tuple[str, ToStage]]:
        taken, self.sent = self.sent, []
        return taken

    def start(self, *media: FakeMedia, n: int = 1, request_id: str = "r") -> asyncio.Task[list[Generated]]:
        prompt = Prompt([1], items=tuple(handle.pin() for handle in media))
        message = Generate(request_id=request_id, prompt=prompt, sampling=SamplingParams(n=n))

        async def collect() -> list[Generated]:
            events = [event async for event in self.coordinator.run(message, media)]
            return [event for event in events if isinstance(event, Generated)]

        return asyncio.get_running_loop().create_task(collect())


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def tokens(*, sample: int = 0, finish: bool = False, request_id: str = "r") -> Generated:
    delta = SampleDelta(sample=sample, token_ids=(5,), finish_reason="stop" if finish else None)
    return Generated(request_id=request_id, deltas=(delta,))


def run(coroutine) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 120))


def test_a_text_request_touches_only_the_entry_stage() -> None:
    async def main() -> None:
        graph = Graph()
        task = graph.start()
        await settle()
        graph.coordinator.dispatch([tokens(), tokens(finish=True)])
        assert [delta for part in await task for delta in part.deltas] == [
            *tokens().deltas,
            *tokens(finish=True).deltas,
        ]
        assert [(s, type(m)) for s, m in graph.sent] == [("thinker", Generate)]
        assert graph.coordinator.num_requests() == 0

    run(main())


def test_only_named_items_are_encoded_and_features_return_when_consumed() -> None:
    async def main() -> None:
        graph, media = Graph(), [FakeMedia(), FakeMedia()]
        task = graph.start(*media)
        await settle()
        graph.take()
        graph.coordinator.dispatch([EmbeddingsNeeded("r", (1,))])
        ((stage, encode),) = graph.take()
        assert isinstance(encode, Encode)
        assert (stage, encode.item_index, encode.target) == ("vision", 1, "thinker")
        assert media[1].held
        graph.coordinator.dispatch([FeaturesConsumed("r", 1)])
        assert not media[1].held
        assert media[0].held, "a later preemption may still ask for it before the first token"
        graph.coordinator.dispatch([tokens()])
        assert not media[0].held, "tokens flow: nobody needs unread features"
        graph.coordinator.dispatch([tokens(finish=True)])
        await settle()
        assert [(s, type(m)) for s, m in graph.take()] == [("vision", Abort)]
        graph.coordinator.dispatch([Aborted("r", "vision")])
        await task
        assert graph.coordinator.num_requests() == 0

    run(main())


def test_what_is_new_is_encoded_at_once_and_given_back_when_all_orders_are_done() -> None:
    async def scenario() -> None:
        graph, new, known = Graph(), FakeMedia(is_new=True), FakeMedia()
        answer = graph.start(new, known)
        await settle()
        (stage, order), (_, generate) = graph.take()
        assert isinstance(generate, Generate)
        assert (stage, order.item_index, order.item.features) == ("vision", 0, REF)
        graph.coordinator.dispatch([EmbeddingsNeeded("r", (0,))])
        ((stage, order),) = graph.take()
        assert (stage, order.item_index, order.item.features) == ("vision", 0, None)  # they are there
        assert new.held
        graph.coordinator.dispatch([FeaturesConsumed("r", 0)])
        assert not new.held
        graph.coordinator.dispatch([tokens(finish=True), Aborted("r", "vision")])
        await answer
        assert not known.held

    run(scenario())


def test_nothing_is_encoded_ahead_for_encoders_that_do_not_remember() -> None:
    async def scenario() -> None:
        graph = Graph(encode_ahead=False)
        answer = graph.start(FakeMedia(is_new=True))
        await settle()
        assert [stage for stage, _ in graph.take()] == ["thinker"]
        graph.coordinator.dispatch([tokens(finish=True)])
        await answer

    run(scenario())


def test_features_that_are_gone_are_made_again() -> None:
    async def main() -> None:
        graph, media = Graph(), FakeMedia(known_only=True)
        task = graph.start(media)
        await settle()
        graph.take()
        graph.coordinator.dispatch([EmbeddingsNeeded("r", (0,))])
        ((_, first),) = graph.take()
        assert isinstance(first, Encode)
        assert first.item.features is None
        graph.coordinator.dispatch([FeaturesNeeded("r", 0)])
        await settle()
        ((_, second),) = graph.take()
        assert isinstance(second, Encode)
        assert second.item.features == REF
        assert media.materialized == 1
        graph.coordinator.dispatch([FeaturesConsumed("r", 0), tokens(finish=True)])
        await task

    run(main())


def test_features_that_cannot_be_made_again_fail_the_request() -> None:
    async def main() -> None:
        graph = Graph()
        task = graph.start(FakeMedia(known_only=True, error=MediaDecodeError("gone")))
        await settle()
        graph.coordinator.dispatch([EmbeddingsNeeded("r", (0,)), FeaturesNeeded("r", 0)])
        with pytest.raises(MediaDecodeError):
            await task

    run(main())


def test_abort_reaches_every_stage_and_nothing_is_freed_before_the_last_answer() -> None:
    async def main() -> None:
        graph, media = Graph(), FakeMedia()
        task = graph.start(media)
        await settle()
        graph.coordinator.dispatch([EmbeddingsNeeded("r", (0,))])
        graph.take()
        task.cancel()
        await settle()
        assert {(s, type(m)) for s, m in graph.take()} == {("thinker", Abort), ("vision", Abort)}
        graph.coordinator.dispatch([Aborted("r", "thinker"), tokens()])
        assert media.held, "the encoder may still read the shared features"
        assert graph.coordinator.num_requests() == 1
        graph.coordinator.dispatch([Aborted("r", "vision")])
        assert not media.held
        assert graph.coordinator.num_requests() == 0
        await graph.coordinator.drained()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(main())


def test_a_stopped_sample_ends_without_waiting_for_the_stage() -> None:
    async def main() -> None:
        graph = Graph()
        task = graph.start(n=2)
        await settle()
        graph.take()
        graph.coordinator.stop_sample("r", 0)
        graph.coordinator.dispatch([tokens(sample=1)])
        await settle()
        assert not task.done()
        graph.coordinator.stop_sample("r", 1)
        await task
        assert [m for _, m in graph.take()] == [StopSample("r", 0), StopSample("r", 1)]
        assert graph.coordinator.num_requests() == 0

    run(main())


def test_a_requests_failure_is_its_own() -> None:
    async def main() -> None:
        graph = Graph()
        bad, good = graph.start(request_id="bad"), graph.start(request_id="good")
        await settle()
        graph.coordinator.dispatch([Failed("bad", EngineError("boom", request_id="bad").info())])
        with pytest.raises(EngineError, match="boom"):
            await bad
        graph.coordinator.dispatch([Aborted("bad", "thinker"), tokens(request_id="good", finish=True)])
        assert len(await good) == 1

    run(main())


def test_a_failed_encoder_fails_only_requests_with_media() -> None:
    async def main() -> None:
        graph, media = Graph(), FakeMedia()
        with_image, text = graph.start(media, request_id="i"), graph.start(request_id="t")
        await settle()
        graph.coordinator.dispatch([EmbeddingsNeeded("i", (0,))])
        graph.coordinator.dispatch([StageFailed("vision", EngineError("out of memory").info())])
        with pytest.raises(EngineError, match="out of memory"):
            await with_image
        graph.coordinator.dispatch([Aborted("i", "thinker")])
        assert not media.held
        graph.coordinator.dispatch([tokens(request_id="t", finish=True)])
        assert len(await text) == 1
        with pytest.raises(ServiceUnavailable):
            await graph.start(FakeMedia(), request_id="later")
        assert not graph.coordinator.board.all_ready()

    run(main())


def test_integrity_is_asked_of_every_ready_stage() -> None:
    async def main() -> None:
        graph = Graph()
        asking = asyncio.create_task(graph.coordinator.board.check_integrity())
        await settle()
        tokens_by_stage = {s: m.token for s, m in graph.take() if isinstance(m, CheckIntegrity)}
        assert set(tokens_by_stage) == {"vision", "thinker"}
        for stage, token in tokens_by_stage.items():
            assert not asking.done()
            graph.coordinator.dispatch([IntegrityReport(token, stage, None, False)])
        assert {r.stage for r in await asking} == {"vision", "thinker"}

    run(main())


# --- sounds that are written down ---------------------------------------------------------------------------
def take_listen(graph: Graph) -> Listen:
    ((stage, message),) = graph.take()
    assert stage == "vision"
    assert isinstance(message, Listen)
    return message


def test_a_sound_is_written_down_and_its_features_stay_until_then() -> None:
    async def run() -> None:
        graph, sound = Graph(), FakeMedia()
        listening = asyncio.create_task(graph.coordinator.listen(sound))
        await settle()
        message = take_listen(graph)
        assert message.item.features == REF
        assert sound.held
        graph.coordinator.dispatch([Heard(message.token, "vision", "good morning")])
        assert await listening == "good morning"
        assert not sound.held
        await graph.coordinator.drained()

    asyncio.run(run())


def test_who_leaves_does_not_take_the_features_from_the_encoder() -> None:
    async def run() -> None:
        graph, sound = Graph(), FakeMedia()
        listening = asyncio.create_task(graph.coordinator.listen(sound))
        await settle()
        message = take_listen(graph)
        listening.cancel()
        await settle()
        assert listening.cancelled()
        assert sound.held
        graph.coordinator.dispatch([Heard(message.token, "vision", error=EngineError("no").info())])
        await graph.coordinator.drained()
        assert not sound.held

    asyncio.run(run())


def test_an_encoder_that_dies_is_asked_again_when_it_is_back() -> None:
    async def run() -> None:
        graph, sound = Graph(), FakeMedia()
        listening = asyncio.create_task(graph.coordinator.listen(sound))
        await settle()
        first = take_listen(graph)
        graph.coordinator.stage_lost("vision", restarts=True)
        await settle()
        assert not graph.sent
        graph.coordinator.dispatch([StageReady("vision", "v")])
        await settle()
        second = take_listen(graph)
        assert second.token != first.token
        graph.coordinator.dispatch([Heard(first.token, "vision", "late"), Heard(second.token, "vision", "")])
        assert await listening == ""

    asyncio.run(run())


@pytest.mark.parametrize("restarts", [True, False])
def test_a_sound_that_kills_its_encoder_or_finds_none_is_an_error(restarts: bool) -> None:
    async def run() -> None:
        graph, sound = Graph(), FakeMedia()
        listening = asyncio.create_task(graph.coordinator.listen(sound))
        await settle()
        while not listening.done():
            graph.take()
            graph.coordinator.stage_lost("vision", restarts=restarts)
            graph.coordinator.dispatch([StageReady("vision", "v")] if restarts else [])
            await settle()
        with pytest.raises(EngineError if restarts else ServiceUnavailable) as caught:
            await listening
        assert caught.value.stage == "vision"
        assert not sound.held

    asyncio.run(run())


def test_an_encoder_s_error_is_the_request_s() -> None:
    async def run() -> None:
        graph = Graph()
        listening = asyncio.create_task(graph.coordinator.listen(FakeMedia()))
        await settle()
        message = take_listen(graph)
        info = MediaDecodeError("too short", stage="audio").info()
        graph.coordinator.dispatch([Heard(message.token, "vision", error=info)])
        with pytest.raises(MediaDecodeError, match="too short"):
            await listening

    asyncio.run(run())


def test_sounds_are_shared_out_among_replicas() -> None:
    async def run() -> None:
        sent: list[tuple[str, ToStage]] = []
        ears = ("vision.0", "vision.1")
        coordinator = Coordinator(
            PIPELINE, lambda stage, message: sent.append((stage, message)), replicas={"vision": ears}
        )
        coordinator.dispatch([StageReady(name, "") for name in (*ears, "thinker")])
        both = [asyncio.create_task(coordinator.listen(FakeMedia())) for _ in ears]
        await settle()
        assert sorted(stage for stage, _ in sent) == sorted(ears)
        for stage, message in sent:
            assert isinstance(message, Listen)
            coordinator.dispatch([Heard(message.token, stage, stage)])
        assert sorted(await asyncio.gather(*both)) == sorted(ears)

    asyncio.run(run())
