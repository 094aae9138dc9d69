"""The LM stage's logic: an LMEngine behind a stage shell."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from contracts.chunks import Chunk
from contracts.errors import OmnistageError
from contracts.messages import Failed, FromStage, Generate, StopSample, ToStage
from lm_engine.engine import LMEngine
from stages.gpu_turns import GpuTurns
from stages.shell import StepResultBatch

EMBEDDINGS = "embeddings"


class _Turns:
    """The language model's with all encoders that it shares its device with."""

    def __init__(self, turns: Sequence[GpuTurns]) -> None:
        self._turns = turns

    @property
    def encoding(self) -> bool:
        return any(turn.encoding for turn in self._turns)

    def received(self, request_id: str, item: int, num_rows_ahead: int) -> None:
        for turn in self._turns:
            turn.received(request_id, item, num_rows_ahead)

    def publish(self, num_rows_ahead: int, *, mixed: bool) -> None:
        for turn in self._turns:
            turn.publish(num_rows_ahead, mixed=mixed)

    def forget(self, request_id: str) -> None:
        for turn in self._turns:
            turn.forget(request_id)


class LMStage:
    """`build` loads the weights, sizes the KV cache and returns the engine with its capacity line. `talker`
    takes the hidden states and the text of requests with speech. `turns`: with the encoders whose device this
    is as well and whose process."""

    def __init__(
        self,
        name: str,
        build: Callable[[], tuple[LMEngine, str]],
        talker: str | None = None,
        turns: Sequence[GpuTurns] = (),
    ) -> None:
        self._turns = _Turns(turns)
        self._name = name
        self._talker = talker
        self._build = build
        self._engine: LMEngine | None = None

    @property
    def engine(self) -> LMEngine:
        assert self._engine is not None, f"stage {self._name} is not started"
        return self._engine

    def start(self) -> str:
        self._engine, detail = self._build()
        self._engine.share_device(self._turns)
        return detail

    def handle(self, message: ToStage) -> list[FromStage]:
        match message:
            case Generate(request_id=request_id):
                try:
                    self.engine.add(message)
                except OmnistageError as error:
                    error.request_id, error.stage = request_id, self._name
                    return [Failed(request_id, error.info())]
            case StopSample(request_id, sample):
                self.engine.stop_sample(request_id, sample)
                self.engine.tell_neighbour()
            case _:
                raise AssertionError(f"stage {self._name} got {type(message).__name__}")
        return []

    def accept(self, chunk: Chunk) -> list[FromStage]:
        item = int(chunk.stream)
        try:
            self.engine.embeddings_ready(chunk.request_id, item, chunk.tensors[EMBEDDINGS])
        except OmnistageError as error:
            error.request_id, error.stage = chunk.request_id, self._name
            return [Failed(chunk.request_id, error.info())]
        finally:
            self._turns.received(chunk.request_id, item, self.engine.num_rows_ahead)
        return []

    def has_work(self) -> bool:
        return self.engine.has_work()

    def due_in_s(self) -> float | None:
        return None

    async def step(self) -> StepResultBatch:
        events = await self.engine.step()
        self.engine.tell_neighbour()
        batch = StepResultBatch(messages=list(events.messages))
        if events.chunks:
            assert self._talker is not None, f"stage {self._name} has nobody to speak for it"
            batch.chunks = [(self._talker, chunk) for chunk in events.chunks]
        return batch

    def sent(self, chunk: Chunk) -> None:
        pass

    def abort(self, request_id: str) -> None:
        self.engine.abort(request_id)
        self._turns.forget(request_id)
        self.engine.tell_neighbour()

    def reset_cache(self) -> None:
        self.engine.reset_cache()

    def check_integrity(self) -> str | None:
        return self.engine.check_integrity()

    def is_idle(self) -> bool:
        return self.engine.is_idle()

    def stats(self) -> dict[str, float]:
        return self.engine.stats()

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
