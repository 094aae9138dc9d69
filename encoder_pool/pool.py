"""The encoder pool: cache first, then single flight, then a batch across requests."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeVar

import msgspec
import torch
from torch import Tensor

from contracts.errors import EngineError, OmnistageError, TooManyRequests
from contracts.media import MediaItem
from contracts.messages import Encode, Failed, FeaturesConsumed, FeaturesNeeded
from encoder_pool.batcher import BatchLimits, form_batch
from encoder_pool.cache import CacheConfig, EmbeddingCache, EmbeddingKey, User
from encoder_pool.model import EncoderInput, EncoderModel, Listener
from encoder_pool.outcomes import Embedded, EncodeOutcome


@dataclass(frozen=True)
class EncoderPoolConfig:
    limits: BatchLimits = field(default_factory=BatchLimits)
    cache: CacheConfig = field(default_factory=CacheConfig)
    max_waiting_items: int = 4096
    max_unsent_bytes: int = 256 << 20  # no batch starts while delivered, unreleased embeddings hold more


@dataclass(frozen=True, eq=False)
class _Waiter:
    message: Encode
    features: Tensor | None

    @property
    def user(self) -> User:
        return User(self.message.request_id, self.message.item_index)


class Turn(Protocol):
    def holds(self) -> bool:
        """Whether no batch may begin now; asked when one could."""
        ...

    def begin(self) -> None:
        """A batch begins."""
        ...


Grid = tuple[int, int, int]
ResultT = TypeVar("ResultT")


@dataclass(eq=False)
class _Flight:
    """One content on its way through the encoder, and all who wait for it. Some waiter has the features."""

    key: tuple[EmbeddingKey, Grid]  # a digest is a hint: another size is another content
    waiters: list[_Waiter]
    since_s: float  # monotonic

    @property
    def item(self) -> MediaItem:
        return self.waiters[0].message.item

    @property
    def features(self) -> Tensor | None:
        return next((w.features for w in self.waiters if w.features is not None), None)


class EncoderPool:
    """Driven by a stage shell in one thread: `add` and `abort` as messages come, `step` while `has_work`.

    The shell owes one `release` per Embedded, once it is sent. Features given to `add` are read until their
    FeaturesConsumed, or until `abort` of their request.
    """

    def __init__(self, model: EncoderModel, config: EncoderPoolConfig, stage: str) -> None:
        self._model = model
        self._config = config
        self._stage = stage
        self._cache = EmbeddingCache(config.cache, model.device)
        self._flights: OrderedDict[tuple[EmbeddingKey, Grid], _Flight] = OrderedDict()  # in order of arrival
        self._ready: deque[EncodeOutcome] = deque()
        self._num_waiting = 0
        self._batches = self._items = self._tokens = self._patches = self._joined = self._failures = 0
        self._queued_s = 0.0
        self._encode_next = False
        self._trim_next = False
        self._turn: Turn | None = None

    @property
    def device(self) -> torch.device:
        return self._model.device

    def take_turns(self, turn: Turn) -> None:
        """From now on batches begin when `turn` lets them."""
        self._turn = turn

    @property
    def is_held(self) -> bool:
        """Whether a batch would begin, were it not for the turn."""
        return self._could_encode() and self._turn is not None and self._turn.holds()

    # --- what the shell calls -----------------------------------------------------------------------------
    def add(self, message: Encode, features: Tensor | None) -> None:
        """Takes one item. Every outcome, also of a cache hit or a refusal, comes from `step`."""
        waiter = _Waiter(message, features)
        item = message.item
        key = EmbeddingKey(item.pixel_digest, self._model.encoder_id, message.cache_salt)
        shape = (item.num_tokens, self._model.embedding_width)
        cached = self._cache.acquire(key, shape, self._model.dtype, waiter.user)
        flight = self._flights.get((key, item.grid_thw))
        if cached is not None:
            self._deliver(waiter, cached)
        elif flight is None and features is None:
            self._ready.append(FeaturesNeeded(message.request_id, message.item_index))
        elif self._num_waiting >= self._config.max_waiting_items:
            self._refuse(waiter)
        else:
            self._num_waiting += 1
            if flight is not None:
                self._joined += 1
                flight.waiters.append(waiter)
            else:
                self._flights[key, item.grid_thw] = _Flight((key, item.grid_thw), [waiter], time.monotonic())

    def abort(self, request_id: str) -> None:
        """Forgets the request: its features are not read any more, its embeddings are released.

        Whoever waited for the same content goes on with his own features, or is asked for them.
        """
        self._ready = deque(o for o in self._ready if o.request_id != request_id)
        self._cache.release_request(request_id)
        for flight in list(self._flights.values()):
            kept = [w for w in flight.waiters if w.message.request_id != request_id]
            if len(kept) == len(flight.waiters):
                continue
            self._num_waiting -= len(flight.waiters) - len(kept)
            flight.waiters = kept
            if flight.features is None:
                self._dissolve(flight)

    def release(self, request_id: str, item_index: int) -> None:
        """An Embedded was sent: its entry may be evicted, by a step that follows."""
        self._cache.release(User(request_id, item_index))

    def has_work(self) -> bool:
        """Whether `step` would do anything. False while unsent embeddings fill their bound: ask again after
        `release`, or while batches are held."""
        return bool(self._ready) or self._can_encode() or bool(self._cache.excess_bytes)

    def step(self) -> list[EncodeOutcome]:
        """Hands out what is ready, or runs one forward, or evicts what the cache has no room for.

        Ready outcomes do not wait for a forward, but no two steps in a row pass without one if items wait.
        What is new does not wait until what is old has been evicted, but the next forward does: the cache is
        over its size by one batch at most, and what was promoted beside it.
        """
        if self._trim_next or not self._ready:
            self._cache.trim()
        if (self._encode_next or not self._ready) and self._can_encode():
            self._encode_next = False
            if self._turn is not None:
                self._turn.begin()
            self._encode(form_batch(self._flights.values(), self._config.limits))
        else:
            self._encode_next = True
        outcomes = list(self._ready)
        self._ready.clear()
        self._trim_next = self._cache.excess_bytes > 0
        return outcomes

    def listen(self, sounds: list[tuple[MediaItem, Tensor]]) -> list[str | OmnistageError]:
        """What each of them says, in one forward, which is halved as long as it fails; beside all that waits.
        Nothing is kept of them."""
        model = self._model
        assert isinstance(model, Listener), f"stage {self._stage} writes nothing down"
        inputs = [EncoderInput(i.modality, mel, i.grid_thw, i.num_tokens) for i, mel in sounds]
        result = _or_error(partial(model.heard, inputs))
        if isinstance(result, list):
            return [*result]
        if len(sounds) == 1:
            return [result]
        half = len(sounds) // 2
        return self.listen(sounds[:half]) + self.listen(sounds[half:])

    def reset_cache(self) -> None:
        self._cache.reset()
        self._model.drop_graphs()

    def close(self) -> None:
        """Nothing is computed any more."""
        self._model.drop_graphs()

    def check_integrity(self) -> str | None:
        """The first broken conservation law, or None."""
        waiting = sum(len(f.waiters) for f in self._flights.values())
        if waiting != self._num_waiting:
            return f"{waiting} items wait but {self._num_waiting} are counted"
        if any(flight.features is None for flight in self._flights.values()):
            return "a queued item has no features"
        return self._cache.check_integrity()

    @property
    def busy(self) -> bool:
        """Whether any request still has something here: an item, an outcome or unreleased embeddings."""
        return bool(self._ready or self._flights or self._cache.held_bytes)

    def stats(self) -> dict[str, float]:
        return self._cache.stats() | {
            "encoder_batches_total": self._batches,
            "encoder_replayed_batches_total": self._model.num_replays,
            "encoder_items_total": self._items,
            "encoder_tokens_total": self._tokens,
            "encoder_patches_total": self._patches,
            "encoder_joined_total": self._joined,
            "encoder_failures_total": self._failures,
            "encoder_waiting_items": self._num_waiting,
            "encoder_queue_seconds_total": self._queued_s,
        }

    # --- inside -------------------------------------------------------------------------------------------
    def _can_encode(self) -> bool:
        return self._could_encode() and not (self._turn is not None and self._turn.holds())

    def _could_encode(self) -> bool:
        return bool(self._flights) and self._cache.held_bytes <= self._config.max_unsent_bytes

    def _encode(self, batch: list[_Flight]) -> None:
        """Runs the batch; halves it as long as it fails, so that only a bad item is lost."""
        pending = [batch]
        while pending:
            part = pending.pop()
            result = _or_error(partial(self._forward, part))
            if isinstance(result, list):
                for flight, embeddings in zip(part, result, strict=True):
                    self._finish(flight, embeddings)
            elif len(part) == 1:
                self._fail(part[0], result)
            else:
                half = len(part) // 2
                pending += [part[half:], part[:half]]

    def _forward(self, batch: list[_Flight]) -> list[Tensor]:
        inputs = [_encoder_input(flight) for flight in batch]
        now_s = time.monotonic()
        results = self._model.encode(inputs)
        width = self._model.embedding_width
        wanted = [(i.num_tokens, width) for i in inputs]
        given = [tuple(r.shape) for r in results]
        if given != wanted:
            raise ValueError(f"the encoder gave embeddings of shapes {given} instead of {wanted}")
        self._batches += 1
        self._items += len(inputs)
        self._queued_s += now_s * len(batch) - sum(flight.since_s for flight in batch)
        self._tokens += sum(i.num_tokens for i in inputs)
        self._patches += sum(t * h * w for t, h, w in (i.grid_thw for i in inputs))
        return results

    def _finish(self, flight: _Flight, embeddings: Tensor) -> None:
        self._land(flight)
        stored = self._cache.insert(flight.key[0], embeddings, [w.user for w in flight.waiters])
        for waiter in flight.waiters:
            self._deliver(waiter, stored)

    def _fail(self, flight: _Flight, error: OmnistageError) -> None:
        self._failures += 1
        self._land(flight)
        for waiter in flight.waiters:
            self._consumed(waiter)
            self._reject(waiter, error)

    def _refuse(self, waiter: _Waiter) -> None:
        self._consumed(waiter)
        message = f"{self._num_waiting} images already wait for the encoder; try again later"
        self._reject(waiter, TooManyRequests(message, retry_after_s=1.0))

    def _reject(self, waiter: _Waiter, error: OmnistageError) -> None:
        request_id = waiter.message.request_id
        info = msgspec.structs.replace(error.info(), request_id=request_id, stage=self._stage)
        self._ready.append(Failed(request_id, info))

    def _deliver(self, waiter: _Waiter, embeddings: Tensor) -> None:
        self._consumed(waiter)
        m = waiter.message
        self._ready.append(Embedded(m.request_id, m.item_index, m.target, embeddings))

    def _consumed(self, waiter: _Waiter) -> None:
        if waiter.features is not None:
            self._ready.append(FeaturesConsumed(waiter.message.request_id, waiter.message.item_index))

    def _land(self, flight: _Flight) -> None:
        assert self._flights.pop(flight.key) is flight
        self._num_waiting -= len(flight.waiters)

    def _dissolve(self, flight: _Flight) -> None:
        """Nobody left has the features: ask each waiter; the resent Encodes meet in one flight again."""
        self._land(flight)
        for waiter in flight.waiters:
            self._ready.append(FeaturesNeeded(waiter.message.request_id, waiter.message.item_index))


def _encoder_input(flight: _Flight) -> EncoderInput:
    item, features = flight.item, flight.features
    assert features is not None, "a flight without features must have been dissolved"
    return EncoderInput(item.modality, features, item.grid_thw, item.num_tokens)


def _or_error(run: Callable[[], ResultT]) -> ResultT | OmnistageError:
    # The error is returned without its traceback, whose frames would keep the failed forward's memory.
    try:
        return run()
    except torch.AcceleratorError:
        raise  # the device context is gone: the stage must restart
    except OmnistageError as error:
        return type(error)(error.message, param=error.param, code=error.code)
    except (RuntimeError, ValueError) as error:
        return EngineError(f"an item could not be encoded: {error}")
