"""The vocoder stage's logic: a VocoderPool behind a stage shell; codec frames in, PCM out to the front."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from contracts.chunks import Chunk
from contracts.messages import Audio, Failed, FinishReason, FromStage, ToStage, Vocode
from stages.early_chunks import EarlyChunks
from stages.shell import StepResultBatch
from stages.silence import SilenceGuard
from vocoder.pool import Pcm

CODES = "codes"
FINISH = "finish"


class Pool(Protocol):
    """A `vocoder.pool.VocoderPool` of any model."""

    def add(self, request_id: str, voice: str, *, seed: int = 0, skip_samples: int = 0) -> None: ...

    def frames(self, request_id: str, codes_KQ: Tensor, last: bool) -> bool: ...

    def abort(self, request_id: str) -> None: ...

    def has_work(self) -> bool: ...

    def due_in_s(self) -> float | None: ...

    def step(self) -> Sequence[Pcm | Failed]: ...

    def check_integrity(self) -> str | None: ...

    @property
    def is_idle(self) -> bool: ...

    def stats(self) -> dict[str, float]: ...


@dataclass(frozen=True)
class BuiltPool:
    pool: Pool
    sample_rate: int
    detail: str  # the capacity line


@dataclass(eq=False)
class _Speech:
    guard: SilenceGuard
    finish: FinishReason = "stop"  # as the talker said it


class VocoderStage:
    """`build` loads the weights. A request is known from its Vocode until its Abort, which always comes."""

    def __init__(self, name: str, build: Callable[[], BuiltPool]) -> None:
        self._name = name
        self._build = build
        self._built: BuiltPool | None = None
        self._early = EarlyChunks()
        self._speeches: dict[str, _Speech] = {}  # those that have not ended
        self._num_silenced = 0

    @property
    def pool(self) -> Pool:
        assert self._built is not None, f"stage {self._name} is not started"
        return self._built.pool

    def start(self) -> str:
        self._built = self._build()
        return self._built.detail

    def handle(self, message: ToStage) -> list[FromStage]:
        assert isinstance(message, Vocode), f"stage {self._name} got {type(message).__name__}"
        assert self._built is not None
        request_id = message.request_id
        self._speeches[request_id] = _Speech(SilenceGuard(self._built.sample_rate))
        self.pool.add(request_id, message.voice, seed=message.seed, skip_samples=message.skip_samples)
        for chunk in self._early.open(request_id):
            self._take(chunk)
        return []

    def accept(self, chunk: Chunk) -> list[FromStage]:
        for ready in self._early.accept(chunk):
            self._take(ready)
        return []

    def _take(self, chunk: Chunk) -> None:
        speech = self._speeches.get(chunk.request_id)
        if speech is None:
            return  # it failed, or was cut: the talker hears of it by the coordinator
        if chunk.last:
            speech.finish = "length" if chunk.meta[FINISH] == "length" else "stop"
        codes_KQ = chunk.tensors[CODES]
        self.pool.frames(chunk.request_id, codes_KQ if codes_KQ.is_cpu else codes_KQ.cpu(), chunk.last)

    def has_work(self) -> bool:
        return self.pool.has_work()

    def due_in_s(self) -> float | None:
        return self.pool.due_in_s()

    async def step(self) -> StepResultBatch:
        batch = StepResultBatch()
        for outcome in self.pool.step():
            if isinstance(outcome, Failed):
                self._speeches.pop(outcome.request_id, None)
                batch.messages.append(outcome)
            elif outcome.request_id in self._speeches:  # else cut by the outcome before it
                batch.messages.append(self._audio(outcome))
        return batch

    def _audio(self, pcm: Pcm) -> Audio:
        speech = self._speeches[pcm.request_id]
        finish = speech.finish if pcm.last else None
        if not pcm.last and speech.guard.hears_no_end(pcm.samples):
            finish = "length"
            self._num_silenced += 1
            self.pool.abort(pcm.request_id)
        if finish is not None:
            del self._speeches[pcm.request_id]
        return Audio(request_id=pcm.request_id, pcm=pcm.to_bytes(), finish_reason=finish)

    def sent(self, chunk: Chunk) -> None:
        raise AssertionError(f"stage {self._name} sends no chunks")

    def abort(self, request_id: str) -> None:
        self.pool.abort(request_id)
        self._speeches.pop(request_id, None)
        self._early.forget(request_id)

    def reset_cache(self) -> None:
        pass

    def check_integrity(self) -> str | None:
        return self.pool.check_integrity()

    def is_idle(self) -> bool:
        return self.pool.is_idle and self._early.is_empty and not self._speeches

    def stats(self) -> dict[str, float]:
        return {
            **self.pool.stats(),
            "num_early_chunks": self._early.num_held,
            "num_silenced_total": self._num_silenced,
        }

    def close(self) -> None:
        pass
