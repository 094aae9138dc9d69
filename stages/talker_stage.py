"""The talker stage's logic: a talker engine behind a stage shell; hidden states in, codec frames out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from torch import Tensor

from contracts.chunks import Chunk
from contracts.errors import OmnistageError
from contracts.messages import Failed, FromStage, Grant, Speak, ToStage
from lm_engine.engine import StepEvents
from stages.early_chunks import EarlyChunks
from stages.shell import StepResultBatch

PROMPT_STREAM = "prompt"
TEXT_STREAM = "text"


class TalkerEngine(Protocol):
    """What the stage needs of the engine that speaks. Unknown ids are ignored by all but `add`."""

    def add(self, message: Speak) -> None:
        """Raises OmnistageError; then nothing of it remains."""
        ...

    def prompt_ready(self, request_id: str, tensors: Mapping[str, Tensor], last: bool) -> None: ...

    def text_ready(self, request_id: str, tensors: Mapping[str, Tensor], last: bool) -> None: ...

    def grant(self, request_id: str, num_frames: int, final: bool, most_frames: int | None) -> None: ...

    def abort(self, request_id: str) -> None: ...

    def has_work(self) -> bool: ...

    async def step(self) -> StepEvents: ...

    def reset_cache(self) -> None: ...

    def check_integrity(self) -> str | None: ...

    def is_idle(self) -> bool: ...

    def stats(self) -> dict[str, float]: ...

    def close(self) -> None: ...


class TalkerStage:
    """`build` loads the weights. `target` takes the frames. A request is known from its Speak until its
    Abort, which always comes."""

    def __init__(self, name: str, target: str, build: Callable[[], tuple[TalkerEngine, str]]) -> None:
        self._name = name
        self._target = target
        self._build = build
        self._engine: TalkerEngine | None = None
        self._early = EarlyChunks()

    @property
    def engine(self) -> TalkerEngine:
        assert self._engine is not None, f"stage {self._name} is not started"
        return self._engine

    def start(self) -> str:
        self._engine, detail = self._build()
        return detail

    def handle(self, message: ToStage) -> list[FromStage]:
        match message:
            case Speak(request_id=request_id):
                early = self._early.open(request_id)
                try:
                    self.engine.add(message)
                except OmnistageError as error:
                    error.request_id, error.stage = request_id, self._name
                    return [Failed(request_id, error.info())]
                for chunk in early:
                    self._take(chunk)
            case Grant(request_id, num_frames, final, most_frames):
                self.engine.grant(request_id, num_frames, final, most_frames)
            case _:
                raise AssertionError(f"stage {self._name} got {type(message).__name__}")
        return []

    def accept(self, chunk: Chunk) -> list[FromStage]:
        for ready in self._early.accept(chunk):
            self._take(ready)
        return []

    def _take(self, chunk: Chunk) -> None:
        if chunk.stream == PROMPT_STREAM:
            self.engine.prompt_ready(chunk.request_id, chunk.tensors, chunk.last)
        else:
            assert chunk.stream == TEXT_STREAM, f"stage {self._name} got a chunk of {chunk.stream!r}"
            self.engine.text_ready(chunk.request_id, chunk.tensors, chunk.last)

    def has_work(self) -> bool:
        return self.engine.has_work()

    def due_in_s(self) -> float | None:
        return None

    async def step(self) -> StepResultBatch:
        events = await self.engine.step()
        chunks = [(self._target, chunk) for chunk in events.chunks]
        return StepResultBatch(messages=list(events.messages), chunks=chunks)

    def sent(self, chunk: Chunk) -> None:
        pass

    def abort(self, request_id: str) -> None:
        self.engine.abort(request_id)
        self._early.forget(request_id)

    def reset_cache(self) -> None:
        self.engine.reset_cache()

    def check_integrity(self) -> str | None:
        return self.engine.check_integrity()

    def is_idle(self) -> bool:
        return self.engine.is_idle() and self._early.is_empty

    def stats(self) -> dict[str, float]:
        return {**self.engine.stats(), "num_early_chunks": self._early.num_held}

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
