"""The encoder stage's logic: an EncoderPool behind a stage shell; features in from shared memory,
embeddings out."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable

import msgspec
import numpy as np
import torch
from torch import Tensor

from contracts.chunks import Chunk
from contracts.media import FeatureRef
from contracts.messages import Encode, FromStage, ToStage
from encoder_pool.outcomes import Embedded
from encoder_pool.pool import EncoderPool
from stages.lm_stage import EMBEDDINGS
from stages.shell import StepResultBatch

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


class EncoderStage:
    """`build` loads the tower and returns the pool with its capacity line; `read` maps shared features, no
    copy.

    Embeddings are handed over when they are there. Were they still being computed, a step of the language
    model that takes them would wait for the tower on the GPU, and every sequence of that step with it.
    """

    def __init__(
        self,
        name: str,
        build: Callable[[], tuple[EncoderPool, str]],
        read: FeatureReader,
        launched: Callable[[torch.device], Wait | None] = launched,
    ) -> None:
        self._name = name
        self._build = build
        self._read = read
        self._launched = launched
        self._pool: EncoderPool | None = None

    @property
    def pool(self) -> EncoderPool:
        assert self._pool is not None, f"stage {self._name} is not started"
        return self._pool

    def start(self) -> str:
        self._pool, detail = self._build()
        return detail

    def handle(self, message: ToStage) -> list[FromStage]:
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
        return self.pool.has_work()

    def due_in_s(self) -> float | None:
        return None

    async def step(self) -> StepResultBatch:
        batch = StepResultBatch()
        outcomes = self.pool.step()
        if any(isinstance(outcome, Embedded) for outcome in outcomes):
            wait = self._launched(self.pool.device)
            if wait is not None:
                await asyncio.to_thread(wait)
        for outcome in outcomes:
            if isinstance(outcome, Embedded):
                tensors = {EMBEDDINGS: outcome.embeddings}
                chunk = Chunk(outcome.request_id, str(outcome.item_index), 0, True, tensors)
                batch.chunks.append((outcome.target, chunk))
            else:
                batch.messages.append(outcome)
        return batch

    def sent(self, chunk: Chunk) -> None:
        self.pool.release(chunk.request_id, int(chunk.stream))

    def abort(self, request_id: str) -> None:
        self.pool.abort(request_id)

    def reset_cache(self) -> None:
        self.pool.reset_cache()

    def check_integrity(self) -> str | None:
        return self.pool.check_integrity()

    def is_idle(self) -> bool:
        return not self.pool.busy

    def stats(self) -> dict[str, float]:
        return self.pool.stats()

    def close(self) -> None:
        pass
