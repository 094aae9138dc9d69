"""What the front process holds of a request in the graph, and of each try at it in the stages."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from contracts.errors import OmnistageError
from contracts.media import MediaItem
from contracts.messages import Audio, Generate, Generated, SampleDelta
from stages.routing import Choice
from stages.speech_flow import SpeechFlow


class MediaHandle(Protocol):
    """A request's claim on one media item: its identity always, its features when asked for.

    Unpinned features may be taken away when shared memory is short; they can be made again.
    """

    @property
    def is_new(self) -> bool:
        """Whether its features are held because nothing was known of the item: it will have to be encoded."""
        ...

    def pin(self) -> MediaItem:
        """The item, with `features` if they are still held; then they stay until `release`."""
        ...

    async def materialize(self) -> MediaItem:
        """The item with features, made again if need be, and pinned. Raises MediaError."""
        ...

    def release(self) -> None:
        """Gives the features back; idempotent. They may be pinned or materialised again."""
        ...


class RequestEvents:
    """What a request's stages have said and its client has not been told. A reader that fell behind gets the
    tokens of all steps since at once, so that a busy front process writes less often, not later."""

    def __init__(self) -> None:
        self._waiting: deque[Generated | Audio | OmnistageError] = deque()
        self._arrived = asyncio.Event()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def put(self, event: Generated | Audio | OmnistageError) -> None:
        self._waiting.append(event)
        self._arrived.set()

    async def next(self) -> Generated | Audio | OmnistageError:
        """One reader at a time."""
        while not self._waiting:
            self._arrived.clear()
            await self._arrived.wait()
        event = self._waiting.popleft()
        if not isinstance(event, Generated):
            return event
        deltas, cached = event.deltas, event.num_cached_tokens
        while self._waiting and isinstance(more := self._waiting[0], Generated):
            self._waiting.popleft()
            deltas += more.deltas
            cached = more.num_cached_tokens if cached is None else cached
        if deltas is event.deltas:
            return event
        return Generated(request_id=event.request_id, deltas=deltas, num_cached_tokens=cached)


@dataclass(eq=False)
class InFlight:
    """A request, from its start to the last acknowledgement of its last attempt.

    `sent` and `text_ended` are what a replay needs: what the client has was sampled once and stays.
    """

    message: Generate  # as first sent
    media: tuple[MediaHandle, ...]
    speech: SpeechFlow | None
    open_samples: set[int]
    sent: dict[int, list[int]] = field(default_factory=dict)  # sample → tokens handed to the client
    stop_token: int | None = None  # the last of `sent` of a spoken answer that ended by it
    cached_tokens_told: bool = False
    events: RequestEvents = field(default_factory=lambda: RequestEvents())
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    attempts: list[Attempt] = field(default_factory=list)  # the current one is the last; others are ending
    num_attempts: int = 0
    replays: int = 0
    ending: bool = False

    @property
    def id(self) -> str:
        return self.message.request_id

    @property
    def current(self) -> Attempt | None:
        """The attempt whose messages count."""
        attempt = self.attempts[-1] if self.attempts else None
        return attempt if attempt is not None and not attempt.withdrawn else None

    @property
    def complete(self) -> bool:
        return not self.open_samples and (self.speech is None or self.speech.ended)

    def next_attempt(self, entry: Choice, path: tuple[str, ...]) -> Attempt:
        """Each has an id of its own in the stages: nothing that an earlier one left under way is taken for
        its own."""
        assert self.current is None, f"{self.id} has an attempt"
        suffix = f"+{self.num_attempts}" if self.num_attempts else ""
        self.num_attempts += 1
        attempt = Attempt(self, self.id + suffix, entry, path)
        self.attempts.append(attempt)
        return attempt

    def generate(self, attempt_id: str) -> Generate:
        """The request as new, or with what its client has already."""
        message = self.message
        if attempt_id != message.request_id:
            message = msgspec.structs.replace(message, request_id=attempt_id)
        if self.speech is not None and not self.open_samples:
            return msgspec.structs.replace(message, forced=tuple(self.spoken_tokens))
        if message.forced is None and any(self.sent.values()):
            resume = tuple(tuple(self.sent.get(sample, ())) for sample in range(message.sampling.n))
            message = msgspec.structs.replace(message, resume=resume)
        return message

    @property
    def spoken_tokens(self) -> list[int]:
        """The text of a spoken answer, as far as it is known, without its end token."""
        if self.message.forced is not None:
            return list(self.message.forced)
        tokens = self.sent.get(0, [])
        return tokens if self.stop_token is None else tokens[:-1]

    def take(self, deltas: tuple[SampleDelta, ...]) -> tuple[SampleDelta, ...]:
        """Notes what goes to the client; drops what a replay or a stopped sample says once more."""
        taken = tuple(d for d in deltas if d.sample in self.open_samples)
        for delta in taken:
            self.sent.setdefault(delta.sample, []).extend(delta.token_ids)
            if delta.finish_reason is not None:
                self.open_samples.discard(delta.sample)
                self.stop_token = delta.stop_token_id
        return taken


@dataclass(eq=False)
class Attempt:
    """One try at a request in the stages: the first, or one after a stage that had it was lost."""

    request: InFlight
    id: str
    entry: Choice  # the replica of the entry stage that has it
    path: tuple[str, ...]  # the stages that it goes through but for encoders, the entry's replica first
    encoders: dict[int, Choice] = field(default_factory=dict)  # item → the replica asked to encode it
    stages: set[str] = field(default_factory=set)  # stages that know of it
    asked_items: set[int] = field(default_factory=set)  # embeddings the entry stage waits for
    features_in_use: dict[int, int] = field(default_factory=dict)  # item → Encodes that may still read it
    unacknowledged: set[str] = field(default_factory=set)  # stages told to forget it
    still_to_tell: list[str] = field(default_factory=list)  # ditto, told one after the other, in this order
    tokens_flow: bool = False
    withdrawn: bool = False

    @property
    def over(self) -> bool:
        return self.withdrawn and not self.unacknowledged and not self.still_to_tell
