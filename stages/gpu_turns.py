"""Whose turn it is where an encoder and the language model that it feeds share a device in one process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

MAX_HOLD_S = 0.25  # an encoder begins after that in any case


class GpuTurns:
    """The encoder begins no batch while embeddings of earlier ones are still to be computed into prompts, nor
    within a step that computes prompts beside decodes.

    Both would compute at the same time otherwise, and the encoder gets most of the device then: its kernels
    are long, and each of the language model's waits for one of them. First tokens come late although their
    pictures are there, and the next tokens of all that decode in the step. Where nothing else is waited for,
    `encoding` says so before the encoder begins, and the language model plans no more of such steps: those
    under way are the last. All methods from any thread.

        handed_over ──▶ on the way ──received──▶ rows ahead ──published 0──▶ computed
                             └── forgotten (aborted) ──▶ gone

    Nothing can wait for ever: the language model publishes rows and mixed steps only while a step of its own
    computes, whose end it publishes, too; what is on the way arrives or is aborted; and whatever is wrong
    with that, a hold ends after MAX_HOLD_S. Several encoders may share one `GpuTurns`.
    """

    def __init__(self, max_rows_ahead: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_rows_ahead = max_rows_ahead
        self._clock = clock
        self._lock = threading.Lock()
        self._on_the_way: set[tuple[str, int]] = set()  # request and item
        self._num_rows_ahead = 0
        self._mixed = False  # such a step is under way
        self._num_encoding = 0
        self._is_next = False  # the encoder is: it waits for nothing but the end of such a step
        self._held_since_s: float | None = None
        self._wakers: list[Callable[[], None]] = []
        self.held_s = 0.0  # in all
        self.num_cut = 0  # holds that had to be ended by MAX_HOLD_S
        self._is_cut = False

    # --- the encoder's side -------------------------------------------------------------------------------
    def wake_with(self, waker: Callable[[], None]) -> None:
        """`waker` is called, by the language model's thread, when a hold ends."""
        self._wakers.append(waker)

    def holds(self) -> bool:
        """Whether the encoder, which has something to begin with, must not yet."""
        with self._lock:
            now_s = self._clock()
            behind = self._is_behind()
            self._is_next = not behind
            if behind or self._mixed:
                if self._held_since_s is None:
                    self._held_since_s = now_s
                if now_s - self._held_since_s < MAX_HOLD_S:
                    return True
                self._is_cut = True
                self._on_the_way.clear()  # lost, or it would have arrived
            return False

    def hold_left_s(self) -> float | None:
        """When to ask `holds` again if no waker is called; None while nothing is held."""
        with self._lock:
            if self._held_since_s is None:
                return None
            return max(0.0, self._held_since_s + MAX_HOLD_S - self._clock())

    def end_hold(self) -> None:
        """There is nothing to begin with any more."""
        with self._lock:
            self._is_next = False
            self._end_hold()

    def begin(self) -> None:
        with self._lock:
            self.num_cut += self._is_cut
            self._is_next = False
            self._end_hold()
            self._num_encoding += 1

    def end(self) -> None:
        with self._lock:
            self._num_encoding -= 1
            assert self._num_encoding >= 0, "a batch ended that had not begun"

    def handed_over(self, request_id: str, item: int) -> None:
        """Before it is sent."""
        with self._lock:
            self._on_the_way.add((request_id, item))

    def forget(self, request_id: str) -> None:
        """The request was aborted: what is on the way of it may never arrive."""
        with self._lock:
            self._on_the_way = {entry for entry in self._on_the_way if entry[0] != request_id}
        self._wake_if_free()

    # --- the language model's side ------------------------------------------------------------------------
    @property
    def encoding(self) -> bool:
        """Whether the device computes a batch of the encoder's, or is about to."""
        return self._num_encoding > 0 or self._is_next

    def received(self, request_id: str, item: int, num_rows_ahead: int) -> None:
        with self._lock:
            self._on_the_way.discard((request_id, item))
            self._num_rows_ahead = num_rows_ahead
        self._wake_if_free()

    def publish(self, num_rows_ahead: int, *, mixed: bool = False) -> None:
        """Embedding rows that are there and that steps compute now or next; and whether a step that computes
        prompts beside decodes is under way."""
        if (num_rows_ahead, mixed) == (self._num_rows_ahead, self._mixed):
            return  # only this side writes them
        with self._lock:
            self._num_rows_ahead, self._mixed = num_rows_ahead, mixed
        self._wake_if_free()

    # --- inside -------------------------------------------------------------------------------------------
    def _is_behind(self) -> bool:
        return bool(self._on_the_way) or self._num_rows_ahead > self._max_rows_ahead

    def _wake_if_free(self) -> None:
        with self._lock:
            free = self._held_since_s is not None and not self._is_behind() and not self._mixed
            if free:
                self._end_hold()
        if free:
            for wake in self._wakers:
                wake()

    def _end_hold(self) -> None:
        if self._held_since_s is not None:
            self.held_s += self._clock() - self._held_since_s
            self._is_cut = False
            self._held_since_s = None
