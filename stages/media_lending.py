"""Media of requests lent to encoders: which replica encodes an item, and when its features may go."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from contracts.errors import OmnistageError
from contracts.media import MediaItem
from contracts.messages import Encode
from stages.inflight import Attempt, InFlight
from stages.replica_choice import ReplicaChoice


class MediaLending:
    """Features are pinned as long as an encoder may read them, and given back when none does any more."""

    def __init__(
        self,
        choice: ReplicaChoice,
        tell: Callable[[Attempt, str, Encode], None],
        fail: Callable[[InFlight, OmnistageError], None],
    ) -> None:
        self._choice = choice
        self._tell = tell
        self._fail = fail

    def encode(self, attempt: Attempt, index: int) -> None:
        """Asks a replica of the item's encoder, with the item's features if they are still held and not under
        way to it already."""
        item = attempt.request.media[index].pin()
        if index in attempt.features_in_use:
            item = msgspec.structs.replace(item, features=None)
        self._encode(attempt, index, item)

    def encode_new(self, attempt: Attempt) -> None:
        """Begins with what nobody has seen before the language model asks for it, which takes a step and two
        messages. It is asked for all the same: embeddings that come before that, or before the request, are
        passed over, and the second order finds them in the encoder's cache or on their way."""
        for index, handle in enumerate(attempt.request.media):
            if handle.is_new:
                self.encode(attempt, index)

    def encode_again(self, attempt: Attempt, index: int) -> None:
        """The features were gone: once they are made again, asks anew."""
        tasks = attempt.request.tasks
        task = asyncio.get_running_loop().create_task(self._make_and_encode(attempt, index))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    def let_go(self, attempt: Attempt, encoder: str) -> None:
        """The replica reads no features of the attempt any more."""
        for index, choice in attempt.encoders.items():
            if choice.replica == encoder:
                attempt.features_in_use.pop(index, None)

    def consumed(self, attempt: Attempt, index: int) -> None:
        """An encoder has read the features it was lent."""
        left = attempt.features_in_use.get(index, 0) - 1
        assert left >= 0, f"{attempt.id}: features of item {index} consumed more often than lent"
        if left:
            attempt.features_in_use[index] = left
            return
        del attempt.features_in_use[index]
        request = attempt.request
        if not request.ending and not _in_use(request, index):
            request.media[index].release()

    def release_unread(self, request: InFlight) -> None:
        """Once tokens flow the prompt is computed: features nobody asked for are not needed any more."""
        for index, handle in enumerate(request.media):
            if not _in_use(request, index):
                handle.release()

    async def _make_and_encode(self, attempt: Attempt, index: int) -> None:
        try:
            item = await attempt.request.media[index].materialize()
        except OmnistageError as error:
            self._fail(attempt.request, error)
            return
        if not attempt.withdrawn:
            self._encode(attempt, index, item)

    def _encode(self, attempt: Attempt, index: int, item: MediaItem) -> None:
        choice = self._choice.of_encoder(attempt, index)
        if choice is None:
            return  # asked again when one is back
        if item.features is not None:
            attempt.features_in_use[index] = attempt.features_in_use.get(index, 0) + 1
        message = Encode(
            request_id=attempt.id,
            item_index=index,
            item=item,
            target=attempt.path[0],
            cache_salt=attempt.request.message.cache_salt,
        )
        self._tell(attempt, choice.replica, message)


def _in_use(request: InFlight, index: int) -> bool:
    return any(index in attempt.features_in_use for attempt in request.attempts)
