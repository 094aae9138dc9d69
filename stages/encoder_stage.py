"""The encoder stage's logic: an EncoderPool behind a stage shell; features in from shared memory,
embeddings out."""

from __future__ import annotations

import asyncio
import ctypes
from collections import deque
from collections.abc import Callable, Mapping

import msgspec
import numpy as np
import torch
from torch import Tensor

from contracts.chunks import Chunk
from contracts.errors import OmnistageError
from contracts.media import FeatureRef
from contracts.messages import Encode, FromStage, Heard, Listen, ToStage
from encoder_pool.outcomes import Embedded
from encoder_pool.pool import EncoderPool
from stages.gpu_turns import GpuTurns
from stages.lm_stage import EMBEDDINGS
from stages.shell import StepResultBatch

HEARD_TOGETHER = 8  # sounds that are written down in one step, beside a batch
FeatureReader = Callable[[FeatureRef], np.ndarray]
Wait = Callable[[], None]


def tensor_over(array: np.ndarray) -> Tensor:
    """A tensor over the same memory, which may be mapped read-only: torch knows no read-only tensors and
    warns of
    such arrays, so it is given the address. Valid as long as the mapping and the lease."""
    memory = (ctypes.c_ubyte * array.nbytes).from_address(array.ctypes.data)
    flat = torch.frombuffer(memory, dtype=torch.uint8)
    return flat.view(getattr(torch, array.dtype.name)).view(array.shape)


def _tensor_of(content: bytes, ref: FeatureRef) -> Tensor:
    flat = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    return flat.view(getattr(torch, ref.dtype)).view(ref.shape)


def no_arena(ref: FeatureRef) -> np.ndarray:
    """The reader of a worker that shares no memory with the front process."""
    raise AssertionError(f"features at {ref.offset} of {ref.arena} did not come with their message")


def launched(device: torch.device) -> Wait | None:
    """Waits for what this thread has launched until now; None: it is done."""
    if device.type != "cuda":
        return None
    done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    done.record(torch.cuda.current_stream(device))
    wait: Wait = done.synchronize
    return wait


class _Turn:
    """The encoder's with all language models that it shares its device with."""

    def __init__(self, turns: Mapping[str, GpuTurns]) -> None:
        self._turns = turns
        self._begun = False

    def holds(self) -> bool:
        return any(turn.holds() for turn in self._turns.values())

    def begin(self) -> None:
        self._begun = True
        for turn in self._turns.values():
            turn.begin()

    def end(self) -> None:
        """Of a batch, if one has begun."""
        if self._begun:
            self._begun = False
            for turn in self._turns.values():
                turn.end()

    def end_hold(self) -> None:
        for turn in self._turns.values():
            turn.end_hold()

    def hold_left_s(self) -> float | None:
        left = [turn.hold_left_s() for turn in self._turns.values()]
        return max((s for s in left if s is not None), default=None)


class EncoderStage:
    """`build` loads the tower and returns the pool with its capacity line; `read` maps shared features, no
    copy. `turns`: of the language models, by name, whose device this is as well and whose process.

    Embeddings are handed over when they are there. Were they still being computed, a step of the language
    model that takes them would wait for the tower on the GPU, and every sequence of that step with it.
    """

    def __init__(
        self,
        name: str,
        build: Callable[[], tuple[EncoderPool, str]],
        read: FeatureReader,
        launched: Callable[[torch.device], Wait | None] = launched,
        turns: Mapping[str, GpuTurns] | None = None,
    ) -> None:
        self._name = name
        self._build = build
        self._read = read
        self._launched = launched
        self._turns = dict(turns or {})
        self._turn = _Turn(self._turns)
        self._aborted: set[str] = set()  # during the step under way
        self._listens: deque[tuple[Listen, Tensor]] = deque()  # no more than there are open requests
        self._pool: EncoderPool | None = None

    @property
    def pool(self) -> EncoderPool:
        assert self._pool is not None, f"stage {self._name} is not started"
        return self._pool

    def start(self) -> str:
        self._pool, detail = self._build()
        if self._turns:
            self._pool.take_turns(self._turn)
        return detail

    def handle(self, message: ToStage) -> list[FromStage]:
        if isinstance(message, Listen):
            features = self._features(message.item.features, message.features)
            assert features is not None, "a sound without features"
            self._listens.append((msgspec.structs.replace(message, features=b""), features))
            return []
        assert isinstance(message, Encode), f"stage {self._name} got {type(message).__name__}"
        features = self._features(message.item.features, message.features)
        self.pool.add(msgspec.structs.replace(message, features=b""), features)
        return []

    def _features(self, ref: FeatureRef | None, sent: bytes) -> Tensor | None:
        if ref is None:
            return None
        features = _tensor_of(sent, ref) if sent else tensor_over(self._read(ref))
        return features if ref.columns is None else features[..., slice(*ref.columns)]

    def accept(self, chunk: Chunk) -> list[FromStage]:
        raise AssertionError(f"stage {self._name} takes no chunks")

    def has_work(self) -> bool:
        return bool(self._listens) or self.pool.has_work()

    def due_in_s(self) -> float | None:
        return self._turn.hold_left_s() if self.pool.is_held else None

    async def step(self) -> StepResultBatch:
        batch = StepResultBatch()
        if self._listens:
            batch.messages += self._listen()
        self._aborted.clear()
        try:
            outcomes = self.pool.step()
            if any(isinstance(outcome, Embedded) for outcome in outcomes):
                wait = self._launched(self.pool.device)
                if wait is not None:
                    await asyncio.to_thread(wait)
        finally:
            self._turn.end()
        for outcome in outcomes:
            if isinstance(outcome, Embedded):
                self._hand_over(outcome)
                tensors = {EMBEDDINGS: outcome.embeddings}
                chunk = Chunk(outcome.request_id, str(outcome.item_index), 0, True, tensors)
                batch.chunks.append((outcome.target, chunk))
            else:
                batch.messages.append(outcome)
        return batch

    def _listen(self) -> list[Heard]:
        together = [self._listens.popleft() for _ in range(min(len(self._listens), HEARD_TOGETHER))]
        results = self.pool.listen([(message.item, features) for message, features in together])
        answers = []
        for (message, _), result in zip(together, results, strict=True):
            if isinstance(result, OmnistageError):
                result.stage = self._name
                answers.append(Heard(message.token, self._name, error=result.info()))
            else:
                answers.append(Heard(message.token, self._name, result))
        return answers

    def _hand_over(self, outcome: Embedded) -> None:
        turn = self._turns.get(outcome.target)
        if turn is not None and outcome.request_id not in self._aborted:  # its chunk will be dropped
            turn.handed_over(outcome.request_id, outcome.item_index)

    def sent(self, chunk: Chunk) -> None:
        self.pool.release(chunk.request_id, int(chunk.stream))

    def abort(self, request_id: str) -> None:
        self._aborted.add(request_id)
        self.pool.abort(request_id)
        for turn in self._turns.values():
            turn.forget(request_id)
        if not self.pool.is_held:
            self._turn.end_hold()

    def reset_cache(self) -> None:
        self.pool.reset_cache()

    def check_integrity(self) -> str | None:
        return self.pool.check_integrity()

    def is_idle(self) -> bool:
        return not self.pool.busy and not self._listens

    def stats(self) -> dict[str, float]:
        turns = self._turns.values()
        return self.pool.stats() | {
            "encoder_held_seconds_total": sum(turn.held_s for turn in turns),
            "encoder_holds_cut_total": sum(turn.num_cut for turn in turns),
        }

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
