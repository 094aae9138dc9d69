"""Who may hold which item's embeddings: claims against a residency budget, asked for in queue order."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from contracts.messages import EmbeddingsNeeded
from lm_engine.policies import WaitingQueue
from lm_engine.sequence import Request, Sequence, State

if TYPE_CHECKING:
    from torch import Tensor


class EmbeddingLedger:
    """A claim is room for one item's rows from asking until its KV is computed (`Request.claims`).

    Claims are made in order: running sequences first, then `asking` in its own order; whoever cannot claim
    stops those behind it. Room is made by dropping what is later in that order: the claims of waiting
    requests, and a request's own later items. So the first in order always gets its next item, and embeddings
    of requests that cannot run never hold up one that can. Dropped items are asked for again.
    """

    def __init__(self, limit: int, asking: WaitingQueue) -> None:
        self.num_claimed_tokens = 0
        self._limit = limit
        self._asking = asking
        self._holders: dict[Request, None] = {}
        self._refused: Sequence | None = None  # the head of `asking`, while nothing changed since its refusal

    def enqueue(self, seq: Sequence) -> None:
        """A waiting sequence of a prompt with media will want its uncovered items."""
        self._refused = None
        if seq not in self._asking:
            self._asking.push(seq)

    def withdraw(self, seq: Sequence) -> None:
        self._refused = None
        self._asking.discard(seq)

    def charge(self, tenant: str, num_prompt_tokens: int, num_output_tokens: int) -> None:
        self._asking.charge(tenant, num_prompt_tokens, num_output_tokens)

    def is_asking(self, seq: Sequence) -> bool:
        return seq in self._asking

    @property
    def num_asking(self) -> int:
        return len(self._asking)

    @property
    def num_pending(self) -> int:
        """Items asked for that have not arrived."""
        return sum(rows is None for request in self._holders for rows in request.claims.values())

    def claim(
        self, running: Iterable[Sequence], frontier_of: Callable[[Sequence], int]
    ) -> list[EmbeddingsNeeded]:
        """`frontier_of`: the first position a waiting sequence would have to compute."""
        asks: list[EmbeddingsNeeded] = []
        for seq in running:
            if seq.num_computed < seq.request.media.end and not self._claim_for(seq, seq.num_computed, asks):
                return asks
        while (head := self._asking.peek()) is not None and head is not self._refused:
            head.need_from = frontier_of(head)
            if not self._claim_for(head, head.need_from, asks):
                self._refused = head
                break
            self._asking.take(head)
        return asks

    def arrived(self, request: Request, item: int, rows: Tensor) -> bool:
        """False when nobody waits for the item any more (dropped, covered meanwhile, or there already)."""
        if item not in request.claims or request.claims[item] is not None:
            return False
        request.claims[item] = rows
        return True

    def release_covered(self, request: Request) -> None:
        """Lets go of every item whose positions no sample of the request will compute."""
        for item in list(request.claims):
            end = request.media.item_end[item]
            if not any(seq.needs_embeddings_before(end) for seq in request.sequences):
                self._let_go(request, item)

    def release_all(self, request: Request) -> None:
        for item in list(request.claims):
            self._let_go(request, item)

    def _claim_for(self, seq: Sequence, frontier: int, asks: list[EmbeddingsNeeded]) -> bool:
        request = seq.request
        claimed = []
        complete = True
        for item in request.media.items_from(frontier):
            if item in request.claims:
                continue
            if not self._make_room(seq, item):
                complete = False
                break
            request.claims[item] = None
            self._holders[request] = None
            self.num_claimed_tokens += request.media.num_rows[item]
            claimed.append(item)
        if claimed:
            asks.append(EmbeddingsNeeded(request.id, tuple(claimed)))
        return complete

    def _make_room(self, seq: Sequence, item: int) -> bool:
        need = seq.request.media.num_rows[item]
        if self._fits(need, self.num_claimed_tokens):
            return True
        victims = self._droppable(seq, item)
        left = self.num_claimed_tokens - sum(request.media.num_rows[i] for request, i in victims)
        if not self._fits(need, left):
            return False
        for request, index in victims:
            if self._fits(need, self.num_claimed_tokens):
                break
            self._drop(request, index)
        return True

    def _fits(self, need: int, claimed: int) -> bool:
        return claimed == 0 or claimed + need <= self._limit  # an item above the limit goes alone

    def _droppable(self, seq: Sequence, item: int) -> list[tuple[Request, int]]:
        """Claims later in order than this one, the least important first."""
        owner, end = seq.request, seq.request.media.item_end[item]
        is_running = seq.state is State.RUNNING
        victims = []
        for request in sorted(self._holders, key=lambda r: (r.rank, r.arrival), reverse=True):
            if request is not owner and _is_prefilling(request):
                continue
            stuck = any(s in self._asking for s in request.sequences)
            for index in sorted(request.claims, key=lambda i: request.media.item_end[i], reverse=True):
                later = request.media.item_end[index] > end if request is owner else is_running or stuck
                if later:
                    victims.append((request, index))
        return victims

    def _drop(self, request: Request, item: int) -> None:
        self._let_go(request, item)
        for seq in request.sequences:
            if seq.state is State.WAITING:
                self.enqueue(seq)

    def _let_go(self, request: Request, item: int) -> None:
        del request.claims[item]
        self.num_claimed_tokens -= request.media.num_rows[item]
        if not request.claims:
            del self._holders[request]
        self._refused = None

    def check_integrity(self) -> str | None:
        held = sum(request.media.num_rows[item] for request in self._holders for item in request.claims)
        if held != self.num_claimed_tokens:
            return f"embeddings of {held} tokens are claimed, counted {self.num_claimed_tokens}"
        if any(request.num_unfinished == 0 for request in self._holders):
            return "a finished request holds embeddings"
        return None


def _is_prefilling(request: Request) -> bool:
    return any(seq.state is State.RUNNING and seq.num_landed < request.media.end for seq in request.sequences)
