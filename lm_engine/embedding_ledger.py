"""Who may hold which item's embeddings: claims against a residency budget, asked for in queue order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from contracts.messages import EmbeddingsNeeded
from lm_engine.policies import WaitingQueue
from lm_engine.sequence import Request, Sequence, State

if TYPE_CHECKING:
    from torch import Tensor


class EmbeddingLedger:
    """A claim is room for one item's rows from asking until its KV is computed (`Request.claims`).

    Claims are made in order: running sequences first, then `asking` in its own order; whoever cannot claim
    stops those behind it. Room is made by dropping what cannot be used now: items after one that is not
    claimed, and for a running claimant those of waiting requests. So whatever is kept will be computed and
    released, the first in order gets its next item in the end, and embeddings of requests that cannot run
    never hold up one that can. Dropped items are asked for again.
    """

    def __init__(self, limit: int, asking: WaitingQueue) -> None:
        self.num_claimed_tokens = 0
        self.num_arrived_tokens = 0  # of those
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
    ) -> tuple[list[EmbeddingsNeeded], list[Sequence]]:
        """What to ask for, and the waiting sequences that now have all their claims. `frontier_of`: the first
        position a waiting sequence would have to compute."""
        asks: list[EmbeddingsNeeded] = []
        settled: list[Sequence] = []
        for seq in running:
            if seq.num_computed < seq.request.media.end and not self._claim_for(seq, seq.num_computed, asks):
                return asks, settled
        while (head := self._asking.peek()) is not None and head is not self._refused:
            head.need_from = frontier_of(head)
            if not self._claim_for(head, head.need_from, asks):
                self._refused = head
                break
            self._asking.take(head)
            settled.append(head)
        return asks, settled

    def arrived(self, request: Request, item: int, rows: Tensor) -> bool:
        """False when nobody waits for the item any more (dropped, covered meanwhile, or there already)."""
        if item not in request.claims or request.claims[item] is not None:
            return False
        request.claims[item] = rows
        self.num_arrived_tokens += request.media.num_rows[item]
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
        victims = self._droppable(seq)
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

    def _droppable(self, claimant: Sequence) -> list[tuple[Request, int]]:
        """Claims that nobody ahead of the claimant can use now, the least important first."""
        victims = []
        for request in sorted(self._holders, key=lambda r: (r.rank, r.arrival), reverse=True):
            keep = {i for seq in request.sequences for i in self._usable(seq, claimant)}
            spare = request.claims.keys() - keep
            for item in sorted(spare, key=lambda i: request.media.item_end[i], reverse=True):
                victims.append((request, item))
        return victims

    def _usable(self, seq: Sequence, claimant: Sequence) -> Iterator[int]:
        """The claimed items that the sequence, if it is not behind the claimant, takes before it is stuck."""
        request = seq.request
        ahead = seq is claimant or (claimant.state is State.WAITING and seq not in self._asking)
        if seq.state is State.RUNNING:
            start = seq.num_landed
        elif seq.state is State.WAITING and seq.need_from is not None and ahead:
            start = seq.need_from
        else:
            return
        for item in request.media.items_from(start):
            if item not in request.claims:
                return
            yield item

    def _drop(self, request: Request, item: int) -> None:
        self._let_go(request, item)
        for seq in request.sequences:
            if seq.state is State.WAITING:
                self.enqueue(seq)

    def _let_go(self, request: Request, item: int) -> None:
        num_rows = request.media.num_rows[item]
        if request.claims.pop(item) is not None:
            self.num_arrived_tokens -= num_rows
        self.num_claimed_tokens -= num_rows
        if not request.claims:
            del self._holders[request]
        self._refused = None

    def check_integrity(self) -> str | None:
        held = sum(request.media.num_rows[item] for request in self._holders for item in request.claims)
        if held != self.num_claimed_tokens:
            return f"embeddings of {held} tokens are claimed, counted {self.num_claimed_tokens}"
        claims = [(r.media.num_rows[i], rows) for r in self._holders for i, rows in r.claims.items()]
        if self.num_arrived_tokens != sum(num_rows for num_rows, rows in claims if rows is not None):
            return f"{self.num_arrived_tokens} embedding rows are counted as arrived, wrongly"
        if any(request.num_unfinished == 0 for request in self._holders):
            return "a finished request holds embeddings"
        return None
