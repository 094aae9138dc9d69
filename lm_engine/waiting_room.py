"""Where sequences wait: in the queue, or parked beside it until their embeddings arrive or another has
computed what they share; and how many do."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from contracts.messages import EmbeddingsNeeded
from lm_engine.embedding_ledger import EmbeddingLedger
from lm_engine.policies import WaitingQueue
from lm_engine.sequence import Request, Sequence, State


class WaitingRoom:
    """A request waits while none of its samples runs; `num_requests` and `num_tokens` count such ones."""

    def __init__(self, queue: WaitingQueue, ledger: EmbeddingLedger, min_early_tokens: int = 1) -> None:
        self._min_early_tokens = min_early_tokens
        self.queue = queue
        self.ledger = ledger
        self.num_requests = 0
        self.num_tokens = 0

    def enqueue(self, seq: Sequence) -> None:
        assert seq.state is State.WAITING, f"{seq.request.id} is queued while {seq.state.value}"
        assert not seq.parked, f"{seq.request.id} is parked"
        self.queue.push(seq)
        if seq.request.media.end:
            self.ledger.enqueue(seq)

    def missing_item(self, request: Request, position: int) -> int | None:
        """The item before which nothing worth a step can be computed from `position` on. Little text before
        a picture would be a step more, and its request would begin before another's KV of the picture is
        there to be found."""
        span = next(request.media.spans_in(position, position + self._min_early_tokens), None)
        if span is None or request.claims.get(span.item_index) is not None:
            return None
        return span.item_index

    def park(self, seq: Sequence, missing_item: int) -> None:
        """It does not begin before this item arrives. In time it will ask for it, if it has not."""
        seq.parked = True
        self.queue.discard(seq)
        if missing_item not in seq.request.claims:
            self.ledger.enqueue(seq)

    def hold_back(self, seq: Sequence) -> None:
        """Another computes what it needs; who is behind it in the queue need not wait for that, too."""
        seq.parked = True
        self.queue.discard(seq)

    def let_in(self, seq: Sequence) -> None:
        if seq.parked:  # its embeddings may have let it in already
            seq.parked = False
            self.queue.push(seq)

    def unpark(self, request: Request) -> None:
        for seq in request.sequences:
            if seq.parked:
                seq.parked = False
                self.queue.push(seq)

    def claim(
        self, running: Iterable[Sequence], frontier_of: Callable[[Sequence], int]
    ) -> tuple[list[EmbeddingsNeeded], bool]:
        """Claims embeddings in order. Also tells whether a parked sequence came back to the queue: another
        request may have computed the image it waited for."""
        asks, settled = self.ledger.claim(running, frontier_of)
        returned = False
        for seq in settled:
            assert seq.need_from is not None, "claims start at the frontier"
            if seq.parked and self.missing_item(seq.request, seq.need_from) is None:
                self.unpark(seq.request)
                returned = True
        return asks, returned

    def leave(self, seq: Sequence) -> None:
        seq.parked = False
        self.queue.discard(seq)
        self.ledger.withdraw(seq)

    def enqueue_next(self, request: Request) -> None:
        """While none of the request's samples is on its way, the first held one computes the prompt."""
        if any(seq.state in (State.WAITING, State.RUNNING) for seq in request.sequences):
            return
        for seq in request.held[:1]:
            seq.state = State.WAITING
            self.enqueue(seq)

    def release_held(self, request: Request) -> None:
        """The prompt's KV will be there for the next step: its other samples may fork."""
        for seq in request.held:
            seq.state = State.WAITING
            seq.need_from = request.num_prompt - 1
            self.enqueue(seq)

    def charge(self, tenant: str, num_prompt_tokens: int, num_output_tokens: int) -> None:
        self.queue.charge(tenant, num_prompt_tokens, num_output_tokens)
        self.ledger.charge(tenant, num_prompt_tokens, num_output_tokens)

    def count(self, request: Request, sign: int) -> None:
        self.num_requests += sign
        self.num_tokens += sign * request.num_prompt

    def check_integrity(self, requests: Iterable[Request]) -> str | None:
        requests = list(requests)
        waiting = [s for r in requests for s in r.sequences if s.state is State.WAITING]
        lost = [s.request.id for s in waiting if (s in self.queue) == s.parked]
        if lost or len(self.queue) != sum(not s.parked for s in waiting):
            return f"waiting sequences are lost or queued twice: {lost}, queue of {len(self.queue)}"
        if self.ledger.num_asking != sum(self.ledger.is_asking(s) for s in waiting):
            return "a sequence that does not wait asks for embeddings"
        idle = [r for r in requests if r.num_running == 0]
        if (len(idle), sum(r.num_prompt for r in idle)) != (self.num_requests, self.num_tokens):
            return f"{len(idle)} requests wait, counted {self.num_requests}"
        return None
