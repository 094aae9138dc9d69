"""Coordinator: lifecycle, routing and abort fan-out of every request in the graph. Knows no model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence

import msgspec

from contracts.errors import EngineError, NoSpeech, OmnistageError, ServiceUnavailable
from contracts.messages import (
    Abort,
    Aborted,
    Audio,
    CacheWasReset,
    EmbeddingsNeeded,
    Failed,
    FeaturesConsumed,
    FeaturesNeeded,
    FromStage,
    Generate,
    Generated,
    Grant,
    Heard,
    IntegrityReport,
    StageFailed,
    StageReady,
    StageStats,
    StageStep,
    StopSample,
    ToStage,
)
from contracts.pipeline import Pipeline
from stages.deployment import RoutingConfig
from stages.inflight import Attempt, InFlight, MediaHandle
from stages.media_lending import MediaLending
from stages.replica_choice import ReplicaChoice
from stages.routes import Routes
from stages.speech_flow import SpeechFlow, SpeechOrder
from stages.stage_board import SendToStage, StageBoard
from stages.start_progress import StartProgress

__all__ = ["Coordinator", "MediaHandle"]


class Coordinator:
    """All methods run on the front process's loop. `dispatch` takes what the stages send."""

    def __init__(
        self,
        pipeline: Pipeline,
        send: SendToStage,
        max_replays: int = 6,
        replicas: Mapping[str, tuple[str, ...]] | None = None,
        routing: RoutingConfig | None = None,
        progress: StartProgress | None = None,
        encode_ahead: bool = False,
    ) -> None:
        """`replicas`: of the entry stage and of encoders, the names under which each runs. `encode_ahead`:
        begin with items that are new before they are asked for, which encoders keep until they are."""
        self._encode_ahead = encode_ahead
        self._max_replays = max_replays
        self._routes = Routes(pipeline, replicas)
        self._send = send
        self._requests: dict[str, InFlight] = {}
        self._attempts: dict[str, Attempt] = {}
        self._listening: set[asyncio.Task[str]] = set()
        self.board = StageBoard(self._routes.running, send, progress)
        self._choice = ReplicaChoice(self._routes, self.board, routing or RoutingConfig())
        self._media = MediaLending(self._choice, self._tell, self._fail)
        self.router = self._choice.router

    # --- requests ---------------------------------------------------------------------------------------

    async def run(
        self, message: Generate, media: tuple[MediaHandle, ...], order: SpeechOrder | None = None
    ) -> AsyncGenerator[Generated | Audio, None]:
        """Starts a request in the graph and yields its tokens until every sample has finished, and with
        `order` its audio until that has ended too.

        Takes over `media`: released when the request is over. Closing the iterator aborts the request.
        """
        assert message.request_id not in self._requests, f"request id {message.request_id} is in use"
        assert message.speech == (order is not None), f"{message.request_id}: speech without an order"
        request = InFlight(
            message=message,
            media=media,
            speech=None if order is None else SpeechFlow(order),
            open_samples=set(range(message.sampling.n)),
        )
        self._requests[request.id] = request
        try:
            self._require_path(request)
            self._start(request)
            while not request.complete or request.events:
                event = await request.events.next()
                if isinstance(event, OmnistageError):
                    raise event
                yield event
                if isinstance(event, Audio) and request.speech is not None:
                    self._grant(request, request.speech.taken(request.id, event))
        finally:
            self._end(request)

    def stop_sample(self, request_id: str, sample: int) -> None:
        request = self._requests.get(request_id)
        if request is None or request.ending or sample not in request.open_samples:
            return
        request.open_samples.discard(sample)
        if request.current is not None:
            self._send(request.current.path[0], StopSample(request.current.id, sample))
        self._text_may_have_ended(request)
        if request.complete:
            request.events.put(Generated(request_id=request_id, deltas=()))

    async def listen(self, sound: MediaHandle) -> str:
        """What a sound says, by an encoder that writes down what it hears; takes over `sound`. Raises the
        encoder's error, and ServiceUnavailable without one."""
        task = asyncio.get_running_loop().create_task(self._listen(sound))
        self._listening.add(task)
        task.add_done_callback(self._listened)
        return await asyncio.shield(task)  # who leaves must not give back what the encoder may be reading

    async def _listen(self, sound: MediaHandle) -> str:
        try:
            for _ in range(self._max_replays + 1):
                item = await sound.materialize()
                stage = self._routes.encoder_of(item)
                heard = await self.board.listen(await self._one_ready(stage), item)
                if heard is None:
                    continue
                if heard.error is not None:
                    raise heard.error.to_exception()
                return heard.text
            message = f"stage {stage} died {self._max_replays + 1} times while it had this sound"
            raise EngineError(message, stage=stage, code="stage_lost")
        finally:
            sound.release()

    def _listened(self, task: asyncio.Task[str]) -> None:
        self._listening.discard(task)
        self.board.touch()
        if not task.cancelled():
            task.exception()  # told to who waits, if anybody does

    async def _one_ready(self, stage: str) -> str:
        while True:
            states = {name: self.board.state(name) for name in self._routes.replicas(stage)}
            if ready := [name for name, state in states.items() if state == "ready"]:
                return min(ready, key=self.board.num_asked)
            if "restarting" not in states.values():
                message = f"stage {stage} is {next(iter(states.values()))}"
                raise ServiceUnavailable(message, stage=stage, retry_after_s=5.0)
            await self.board.changed()

    def num_requests(self) -> int:
        return len(self._requests)

    def _path(self, request: InFlight) -> tuple[str, ...]:
        """The stages that a request needs, but for encoders."""
        return (self._routes.entry,) if request.speech is None else self._routes.speech_path

    def _require_path(self, request: InFlight) -> None:
        """Every stage on the way is there or about to be: a restarting one makes the request wait."""
        for stage in (*self._path(request), *self._routes.encoders_of(request.message.prompt)):
            states = [self.board.state(name) for name in self._routes.replicas(stage)]
            if not {"ready", "restarting"} & set(states):
                state = states[0]
                raise ServiceUnavailable(
                    f"stage {stage} is {state}", stage=stage, request_id=request.id, retry_after_s=5.0
                )

    def _start(self, request: InFlight) -> None:
        """Gives the request to its stages, as new or with what its client has already; or leaves it for the
        return of one of them."""
        _, *others = self._path(request)
        if not all(self.board.is_ready(stage) for stage in others):
            return
        choice = self._choice.of_entry(request)
        if choice is None:
            return
        path = (choice.replica, *others)
        attempt = request.next_attempt(choice, path)
        self._attempts[attempt.id] = attempt
        message = request.generate(attempt.id)
        if request.speech is not None:
            _, talker, vocoder = path
            self._tell(attempt, vocoder, request.speech.vocode(attempt.id))
            self._tell(attempt, talker, request.speech.speak(attempt.id, message.prompt))
            self._grant(request, request.speech.grant_again(attempt.id))
        if self._encode_ahead and request.num_attempts == 1:
            self._media.encode_new(attempt)  # first: the encoder has the most to do
        self._tell(attempt, choice.replica, message)
        if message.forced is None:
            for sample in set(range(message.sampling.n)) - request.open_samples:
                self._send(choice.replica, StopSample(attempt.id, sample))

    def _tell(self, attempt: Attempt, stage: str, message: ToStage) -> None:
        attempt.stages.add(stage)
        self._send(stage, message)

    def _grant(self, request: InFlight, grant: Grant | None) -> None:
        if grant is not None and request.current is not None:
            talker = self._routes.speech_path[1]
            self._send(talker, msgspec.structs.replace(grant, request_id=request.current.id))

    def _end(self, request: InFlight) -> None:
        """The one way out of a request: every attempt is withdrawn, and with the last answer all is freed."""
        request.ending = True
        for task in request.tasks:
            task.cancel()
        if request.current is not None:
            self._withdraw(request.current)
        self._drop_if_over(request)

    def _withdraw(self, attempt: Attempt) -> None:
        """Tells every stage that may hold something of it. An encoder may still read shared features: their
        slot is reused only when it has acknowledged.

        Down the path of a spoken answer one is told after the other: when a stage forgets the attempt, no
        chunk of it can still come from above. The entry stage forgets a finished text by itself.
        """
        attempt.withdrawn = True
        self._choice.attempt_over(attempt)
        path = attempt.path
        finished = attempt.request.speech is None and not attempt.request.open_samples
        for stage in attempt.stages - set(path):
            self._tell_to_forget(attempt, stage)
        attempt.still_to_tell = [] if finished else [stage for stage in path if stage in attempt.stages]
        self._tell_next(attempt)

    def _tell_next(self, attempt: Attempt) -> None:
        while attempt.still_to_tell:
            if self._tell_to_forget(attempt, attempt.still_to_tell.pop(0)):
                return
        self._drop_if_over(attempt.request)

    def _tell_to_forget(self, attempt: Attempt, stage: str) -> bool:
        """False for a stage that is gone, and with it what it held."""
        if stage not in attempt.stages or not self.board.is_ready(stage):
            return False
        attempt.unacknowledged.add(stage)
        self._send(stage, Abort(attempt.id))
        return True

    def _aborted(self, attempt: Attempt, stage: str) -> None:
        attempt.unacknowledged.discard(stage)
        if stage not in attempt.path:
            self._media.let_go(attempt, stage)
        elif attempt.still_to_tell:
            self._tell_next(attempt)
        self._drop_if_over(attempt.request)

    def _drop_if_over(self, request: InFlight) -> None:
        for attempt in [a for a in request.attempts if a.over]:
            request.attempts.remove(attempt)
            del self._attempts[attempt.id]
        if request.ending and not request.attempts and request.id in self._requests:
            for handle in request.media:
                handle.release()
            del self._requests[request.id]
            self.board.touch()

    async def drained(self) -> None:
        """Returns when no request is held any more."""
        while self._requests or self._listening:
            await self.board.changed()

    # --- from the stages --------------------------------------------------------------------------------

    def dispatch(self, messages: Sequence[FromStage]) -> None:
        for message in messages:
            match message:
                case StageReady(stage, detail):
                    self._stage_ready(stage, detail)
                case StageFailed(stage, info):
                    self._stage_failed(stage, info.to_exception())
                case StageStep(stage, doing):
                    self.board.begun(stage, doing)
                case StageStats():
                    self.board.told(message)
                case CacheWasReset() | IntegrityReport() | Heard():
                    self.board.answered(message)
                case _:
                    self._dispatch_to_attempt(message)

    def _dispatch_to_attempt(
        self,
        message: EmbeddingsNeeded | FeaturesNeeded | FeaturesConsumed | Generated | Audio | Failed | Aborted,
    ) -> None:
        attempt = self._attempts.get(message.request_id)
        if attempt is None:
            return  # it ended while the message was under way
        match message:
            case Aborted(_, stage):
                self._aborted(attempt, stage)
            case FeaturesConsumed(_, item_index):
                self._media.consumed(attempt, item_index)
            case _ if attempt.withdrawn:
                return
            case EmbeddingsNeeded(_, item_indices):
                attempt.asked_items.update(item_indices)
                for index in item_indices:
                    self._media.encode(attempt, index)
            case FeaturesNeeded(_, item_index):
                self._media.encode_again(attempt, item_index)
            case Generated():
                self._generated(attempt, message)
            case Audio():
                self._audio(attempt.request, message)
            case Failed(_, info):
                self._fail(attempt.request, info.to_exception())

    def _fail(self, request: InFlight, error: OmnistageError) -> None:
        error.request_id = request.id
        request.events.put(error)

    def _generated(self, attempt: Attempt, message: Generated) -> None:
        request = attempt.request
        if attempt.asked_items or not attempt.tokens_flow:
            attempt.tokens_flow = True
            attempt.asked_items.clear()
            self._choice.encoders_done(attempt)
            self._media.release_unread(request)
        deltas = request.take(message.deltas)
        cached = None if request.cached_tokens_told else message.num_cached_tokens
        request.cached_tokens_told |= cached is not None
        if deltas or request.complete or cached is not None:
            given = Generated(request_id=request.id, deltas=deltas, num_cached_tokens=cached)
            request.events.put(given)
        self._text_may_have_ended(request)

    def _text_may_have_ended(self, request: InFlight) -> None:
        if request.speech is not None and not request.open_samples:
            self._grant(request, request.speech.text_ended(request.id, len(request.spoken_tokens)))
            self._reject_muteness(request)

    def _audio(self, request: InFlight, message: Audio) -> None:
        assert request.speech is not None, f"{request.id}: audio for a request without speech"
        request.speech.received(message)
        if not self._reject_muteness(request):
            request.events.put(message)

    def _reject_muteness(self, request: InFlight) -> bool:
        """Once both have ended: a text of which not one sample came is an error, unless there is nothing in
        it to say."""
        if request.speech is None or not request.complete:
            return False
        if not request.speech.left_unsaid(request.spoken_tokens):
            return False
        message = "the talker ended before its first frame, so there is no audio: another seed may help"
        talker = self._routes.speech_path[1]
        self._fail(request, NoSpeech(message, stage=talker))
        return True

    # --- stages that come and go ------------------------------------------------------------------------

    def _stage_ready(self, stage: str, detail: str) -> None:
        self.board.put(stage, "ready", detail)
        for request in list(self._requests.values()):
            if request.ending:
                continue
            attempt = request.current
            if attempt is None:
                if self._on_path(request, stage):
                    self._start(request)
                continue
            for index in sorted(attempt.asked_items - attempt.encoders.keys()):
                item = request.message.prompt.items[index]
                if stage in self._routes.replicas(self._routes.encoder_of(item)):
                    self._media.encode(attempt, index)

    def _on_path(self, request: InFlight, name: str) -> bool:
        return any(name in self._routes.replicas(stage) for stage in self._path(request))

    def stage_lost(self, stage: str, *, restarts: bool) -> None:
        """The process of `stage` is gone and with it everything that it held. Requests go on when it is back:
        an encoder's by asking it again; what had entered any other stage starts again in all of them, from
        the tokens and the samples already sent."""
        if not restarts:
            self._stage_failed(stage, EngineError(f"stage {stage} died too often", stage=stage))
            return
        self.board.put(stage, "restarting")
        self._choice.lost(stage)
        for attempt in list(self._attempts.values()):
            if stage not in attempt.stages:
                continue
            current = not attempt.withdrawn
            self._forgotten(attempt, stage)
            if current:
                self._replay(attempt, stage)

    def _forgotten(self, attempt: Attempt, stage: str) -> None:
        """What is gone has let go of everything and answers nothing more."""
        attempt.stages.discard(stage)
        if stage not in attempt.path:
            self._media.let_go(attempt, stage)
        if stage in attempt.unacknowledged:
            self._aborted(attempt, stage)

    def _replay(self, attempt: Attempt, stage: str) -> None:
        request = attempt.request
        if request.replays >= self._max_replays:
            message = f"stage {stage} died {request.replays + 1} times while it had this request"
            self._fail(request, EngineError(message, stage=stage, code="stage_lost"))
            return
        request.replays += 1
        if stage in attempt.path:
            self._withdraw(attempt)
            self._start(request)
            return
        for index in self._choice.take_back(attempt, stage):
            if index in attempt.asked_items:
                self._media.encode(attempt, index)

    def _stage_failed(self, stage: str, error: OmnistageError) -> None:
        self.board.put(stage, "failed", error.message)
        self._choice.lost(stage)
        for attempt in list(self._attempts.values()):
            if stage in attempt.stages:
                current = not attempt.withdrawn
                self._forgotten(attempt, stage)
                if current and self._choice.has_others(stage):
                    self._replay(attempt, stage)
                elif current:
                    self._fail(attempt.request, EngineError(error.message, stage=stage))
        for request in self._requests.values():
            waits = request.current is None and not request.ending and self._on_path(request, stage)
            if waits and not self._choice.has_others(stage):
                self._fail(request, EngineError(error.message, stage=stage))
