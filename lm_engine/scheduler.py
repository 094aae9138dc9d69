"""Chooses what each step computes: rows, blocks, admissions, preemptions; no prefill or decode phase."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from enum import Enum
from itertools import chain
from typing import Protocol

from contracts.messages import EmbeddingsNeeded
from lm_engine.block_pool import BlockPool
from lm_engine.budgets import StepDraft, chunk_end
from lm_engine.config import EngineConfig
from lm_engine.embedding_ledger import EmbeddingLedger
from lm_engine.plan import Admission, SequenceStep, StepPlan
from lm_engine.policies import make_queue
from lm_engine.prefix_cache import ROOT, PrefixCache
from lm_engine.sequence import NO_SLOT, Request, Sequence, State
from lm_engine.shared_prefills import SharedPrefills
from lm_engine.starts import Start, StartFinder
from lm_engine.waiting_room import WaitingRoom

MAX_SET_ASIDE = 16  # waiting sequences that a step may pass over for lack of its own budget
SHORT_SHARE = 4  # one part in so many of a step's prompt tokens is for short prompts behind a long one
MAX_HELD_BACK = 64  # ... and that it may take out of the queue because another one computes what they need


@dataclass
class Counters:
    prefix_queries: int = 0  # tokens looked up
    prefix_hits: int = 0
    preemptions: int = 0
    admissions: int = 0  # of requests, the first of each
    queue_seconds: float = 0.0  # before them


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """`sampling`: the sequences that draw a token, in plan order. `media`: sequence and how far its KV
    stands after the step. `fresh`: admitted in this step onto blocks computed by earlier ones. `mixed`:
    prompts are computed in it beside sequences that decode."""

    plan: StepPlan
    sequences: tuple[Sequence, ...]
    sampling: list[Sequence]
    media: list[tuple[Sequence, int]]
    fresh: tuple[Sequence, ...]
    num_tokens: int
    mixed: bool


class Outcome(Enum):
    ADMITTED = "admitted"
    PARKED = "parked"  # left the queue until its embeddings arrive
    NOT_IN_THIS_STEP = "not in this step"
    BEHIND = "behind a prefill that computes the same"
    NO_MEMORY = "no memory"


class Neighbour(Protocol):
    @property
    def encoding(self) -> bool:
        """Whether it computes now, or is about to, on the device that this one has its steps on."""
        ...

    def publish(self, num_rows_ahead: int, *, mixed: bool) -> None:
        """Told by the engine as steps begin and end: see `LMEngine.num_rows_ahead`; and whether a mixed step
        is under way."""
        ...


class Scheduler:
    """Owns every sequence's state between `add` and `remove`, and all memory it schedules into.

    `plan` commits what it returns: tokens count as computed from then on, because later plans run after it.
    Blocks of a preempted, finished or aborted sequence may be given away at once for the same reason.
    """

    def __init__(self, config: EngineConfig, hash_function: Callable[[Hashable], int] = hash) -> None:
        self.config = config
        self.counters = Counters()
        self.requests: dict[str, Request] = {}
        self.pool = BlockPool(config.num_blocks)
        self.cache = PrefixCache(self.pool, hash_function)
        self._starts = StartFinder(config, self.cache)
        self._shared = SharedPrefills(
            config.block_size, config.min_shared_tokens if config.prefix_cache else None
        )
        self.queue = make_queue(config.policy, config.max_deferrals, self._frontier)
        asking = make_queue(config.policy, config.max_deferrals, self._frontier)
        self.ledger = EmbeddingLedger(config.max_resident_embedding_tokens, asking)
        self.room = WaitingRoom(self.queue, self.ledger, config.min_early_tokens)
        self._decoding: dict[Sequence, None] = {}  # one token behind; in order of their last admission
        self._prefilling: dict[Sequence, None] = {}
        self._free_slots = list(range(config.max_sequences - 1, -1, -1))
        self._released_slots: list[int] = []  # freed since the last plan
        self._no_memory: tuple[Sequence, int] | None = None  # the refused head and the free blocks it saw
        self._next_step_id = 0
        self.neighbour: Neighbour | None = None
        self.is_short_of_tokens = False  # the last plan had no room for more of the prompts

    # --- life of a request ----------------------------------------------------------------------------------
    def add(self, request: Request) -> None:
        """Also takes sequences that were finished when they came (replay)."""
        assert request.id not in self.requests, f"{request.id} is added twice"
        self.requests[request.id] = request
        self.room.count(request, 1)
        self.room.enqueue(request.sequences[0])

    def remove(self, request: Request) -> None:
        """Forgets the request in whatever state it is. Its tokens in flight are discarded on arrival."""
        for seq in request.sequences:
            if seq.state is not State.FINISHED:
                self.finish(seq)
        assert request.id not in self.requests, f"{request.id} outlived its sequences"

    def finish(self, seq: Sequence) -> None:
        """Frees all that the sequence holds; the last one of a request takes the request along."""
        request = seq.request
        if seq.state is State.RUNNING:
            self._stop_running(seq)
        self._leave_room(seq)
        was_held, seq.state = seq.state is State.HELD, State.FINISHED
        request.num_unfinished -= 1
        if request.num_unfinished == 0:
            self.ledger.release_all(request)
            if request.num_running == 0:
                self.room.count(request, -1)
            del self.requests[request.id]
            return
        if not was_held:
            self.room.enqueue_next(request)
        self.ledger.release_covered(request)

    def _leave_room(self, seq: Sequence) -> None:
        self.room.leave(seq)
        self._shared.forget(seq)
        if self._no_memory is not None and self._no_memory[0] is seq:
            self._no_memory = None

    def _stop_running(self, seq: Sequence) -> None:
        self._decoding.pop(seq, None)
        self._prefilling.pop(seq, None)
        self._shared.stopped(seq)
        self.pool.release(seq.block_ids)
        seq.block_ids = []
        seq.identities = []
        self._released_slots.append(seq.slot)
        self._free_slots.append(seq.slot)
        seq.slot = NO_SLOT
        seq.num_computed = seq.num_landed = 0
        seq.request.num_running -= 1
        if seq.request.num_running == 0:
            self.room.count(seq.request, 1)

    # --- planning -------------------------------------------------------------------------------------------
    def plan(self) -> tuple[ScheduledStep | None, list[EmbeddingsNeeded]]:
        """The next step, or None when nothing can be computed now; and the embeddings to ask for."""
        asks: list[EmbeddingsNeeded] = []
        while True:
            draft = StepDraft(self.config.max_step_tokens, self.config.max_step_visual_tokens)
            self._plan_decodes(draft)
            num_decodes = len(draft.rows)
            if num_decodes:  # they wait for the whole step
                withheld = self.config.max_step_tokens - self._mixed_step_tokens()
                draft.withhold(min(withheld, draft.tokens_left))
            draft.keep_for_short(self._tokens_for_short(draft))
            self._plan_prefills(draft)
            used_up = draft.tokens_left == 0
            draft.offer_kept()
            if not draft.preempted:
                self._admit_waiting(draft)
            self.is_short_of_tokens = used_up or draft.tokens_left == 0 or draft.visual_left <= 0
            mixed = 0 < num_decodes < len(draft.rows)
            step = self._commit(draft, mixed) if draft.rows else None
            more, returned = self.room.claim(self._prefilling, self._frontier)
            asks += more
            # Without a row planning again helps only if it freed memory or gave the queue something back.
            if step is not None or not (draft.preempted or returned):
                return step, asks

    def _mixed_step_tokens(self) -> int:
        beside = self.config.encoder_step_tokens
        if beside is None or self.neighbour is None or not self.neighbour.encoding:
            return self.config.step_tokens_beside_decodes
        return min(beside, self.config.step_tokens_beside_decodes)

    def _plan_decodes(self, draft: StepDraft) -> None:
        block_size, rows = self.config.block_size, draft.rows
        for seq in tuple(self._decoding):
            start = seq.num_computed
            if start + 1 >= seq.max_length or seq.slot == NO_SLOT:
                continue  # its last token is in flight, or it was preempted a moment ago
            new_blocks: tuple[int, ...] = ()
            if start >= len(seq.block_ids) * block_size:
                taken = self._take_blocks(seq, start + 1, draft)
                if taken is None:
                    continue
                new_blocks = taken
            rows[seq] = SequenceStep(seq.slot, start, 1, new_blocks, True)
            draft.tokens_left -= 1
            seq.num_computed = start + 1
            seq.num_in_flight += 1

    def _tokens_for_short(self, draft: StepDraft) -> int:
        """Of the step, which prompts under way leave to waiting ones that fit into them whole: a question
        need not wait until a book before it has been read. Not among priorities, which would be turned
        around."""
        config, kept = self.config, draft.tokens_left // SHORT_SHARE
        if not self._prefilling or not self._free_slots or self._no_memory is not None:
            return 0
        if config.policy == "priority" or config.atomic_spans:
            return 0
        return kept if any(seq.total <= kept for seq in self.queue.first(MAX_SET_ASIDE)) else 0

    def _plan_prefills(self, draft: StepDraft) -> None:
        for seq in tuple(self._prefilling):
            if draft.tokens_left == 0:
                return
            if seq.slot == NO_SLOT:
                continue
            start = seq.num_computed
            end = chunk_end(seq, start, draft, self.config)
            if end == start:
                continue
            taken = self._take_blocks(seq, end, draft)
            if taken is not None:
                self._put_row(seq, start, end, taken, draft)

    def _put_row(
        self, seq: Sequence, start: int, end: int, new_blocks: tuple[int, ...], draft: StepDraft
    ) -> None:
        samples = end == seq.total
        draft.put(seq, SequenceStep(seq.slot, start, end - start, new_blocks, samples))
        seq.num_computed = end
        seq.num_in_flight += samples

    def _take_blocks(self, seq: Sequence, end: int, draft: StepDraft) -> tuple[int, ...] | None:
        """Blocks up to position `end`, preempting others if need be; None when it preempted itself."""
        need = self.config.blocks_for(end) - len(seq.block_ids)
        while self.pool.num_free < need:
            victim = max(chain(self._decoding, self._prefilling), key=lambda s: s.order)
            self._preempt(victim, draft)
            if victim is seq:
                return None
        taken = self.pool.allocate(max(need, 0))
        seq.block_ids += taken
        return tuple(taken)

    def _preempt(self, seq: Sequence, draft: StepDraft) -> None:
        row = draft.take_back(seq)
        if row is not None and row.samples:
            seq.num_in_flight -= 1
        self._stop_running(seq)
        seq.state = State.WAITING
        seq.need_from = None
        self.room.enqueue(seq)
        draft.preempted = True
        self.counters.preemptions += 1

    def _commit(self, draft: StepDraft, mixed: bool) -> ScheduledStep:
        plan = StepPlan(
            step_id=self._next_step_id,
            released_slots=tuple(self._released_slots),
            admissions=tuple(draft.admissions),
            block_copies=tuple(draft.copies),
            sequences=tuple(draft.rows.values()),
            span_pieces=tuple(piece for pieces in draft.pieces.values() for piece in pieces),
        )
        self._next_step_id += 1
        self._released_slots.clear()
        media = [(seq, seq.num_computed) for seq in draft.pieces]
        sampling = [seq for seq, row in draft.rows.items() if row.samples]
        for seq in tuple(self._prefilling):
            if seq not in draft.rows:
                continue
            self.register_full_blocks(seq)
            self._shared.advanced(seq)
            if draft.rows[seq].samples:
                del self._prefilling[seq]
                self._shared.stopped(seq)
                self._decoding[seq] = None
                self.room.release_held(seq.request)
        num_tokens = self.config.max_step_tokens - draft.withheld - draft.tokens_left
        return ScheduledStep(plan, tuple(draft.rows), sampling, media, tuple(draft.fresh), num_tokens, mixed)

    def register_full_blocks(self, seq: Sequence) -> None:
        """Names the blocks whose tokens are known and whose KV is written by now or by the plan being made.

        Called after a plan is complete, so a block is hit from the next step on, which runs after its writer.
        """
        if not self.config.prefix_cache:
            seq.next_full = seq.max_length + 1
            return
        first = len(seq.identities)
        last = min(seq.num_computed, len(seq.token_ids)) // self.config.block_size
        parent = seq.identities[-1] if first else ROOT
        for index, content in enumerate(seq.contents(first, last, self.config.block_size), first):
            parent = self.cache.register(seq.block_ids[index], parent, content)
            seq.identities.append(parent)
        seq.next_full = (len(seq.identities) + 1) * self.config.block_size

    # --- admission ------------------------------------------------------------------------------------------
    def _admit_waiting(self, draft: StepDraft) -> None:
        set_aside: set[Sequence] = set()
        num_held_back = 0
        for freed in self._shared.take_freed():
            self.room.let_in(freed)
        while draft.tokens_left > 0 and self._free_slots:
            if num_held_back > MAX_HELD_BACK or len(set_aside) > MAX_SET_ASIDE:
                return
            seq = self.queue.peek(set_aside)
            if seq is None:
                return
            match self._try_admit(seq, draft):
                case Outcome.ADMITTED | Outcome.PARKED:
                    pass
                case Outcome.NOT_IN_THIS_STEP:
                    set_aside.add(seq)
                case Outcome.BEHIND:
                    self.room.hold_back(seq)
                    num_held_back += 1
                case Outcome.NO_MEMORY:
                    return  # nobody smaller passes it, or it might wait for ever

    def _try_admit(self, seq: Sequence, draft: StepDraft) -> Outcome:
        if seq.num_in_flight:
            return Outcome.NOT_IN_THIS_STEP  # preempted; the token that it drew is not known yet
        if self._no_memory is not None:
            refused, seen = self._no_memory
            if refused is seq and self.pool.num_free <= seen and (self._decoding or self._prefilling):
                return Outcome.NO_MEMORY
        if self._shared.still_behind(seq):
            return Outcome.BEHIND
        start = self._starts.find(seq, draft.rows, draft.fresh)
        if start.copy_from is None and self._shared.is_behind(seq, start.identities):
            return Outcome.BEHIND
        request = seq.request
        missing = self.room.missing_item(request, start.position)
        if missing is not None:
            self.room.park(seq, missing)
            return Outcome.PARKED
        end = chunk_end(seq, start.position, draft, self.config)
        if end == start.position or (draft.has_only_kept() and end < seq.total):
            return Outcome.NOT_IN_THIS_STEP
        if not self._has_memory(seq, start):
            self._no_memory = (seq, self.pool.num_free)
            return Outcome.NO_MEMORY
        self._admit(seq, start, end, draft)
        return Outcome.ADMITTED

    def _has_memory(self, seq: Sequence, start: Start) -> bool:
        """Room for all its present tokens beside what the running prefills will still need."""
        committed = sum(self.config.blocks_for(s.total) - len(s.block_ids) for s in self._prefilling)
        reserve = self.config.num_blocks // 100 if self._decoding or self._prefilling else 0
        need = self.config.blocks_for(seq.total) - len(start.blocks)
        return self.pool.num_free - self.pool.num_unowned(start.blocks) - committed - reserve >= need

    def _admit(self, seq: Sequence, start: Start, end: int, draft: StepDraft) -> None:
        request, sampling = seq.request, seq.request.message.sampling
        self.pool.share(start.blocks)
        fresh = self.pool.allocate(self.config.blocks_for(end) - len(start.blocks))
        seq.block_ids = start.blocks + fresh
        seq.identities = start.identities
        if start.copy_from is not None:
            draft.copies.append((start.copy_from, fresh[0]))
        self._leave_queue_for_slot(seq)
        seq.num_landed = start.position
        self._shared.advanced(seq)
        draft.admissions.append(
            Admission(
                slot=seq.slot,
                token_ids=list(seq.token_ids),
                num_prompt_tokens=request.num_prompt,
                positions_AL=request.positions_AL,
                position_delta=request.position_delta,
                sampling=sampling,
                seed=seq.seed,
                block_ids=tuple(seq.block_ids),
                stop_token_ids=tuple(sorted(request.stop_ids)),
                gated_from=request.media.first_seen,
            )
        )
        if start.position > 0:
            draft.fresh[seq] = None
        self._put_row(seq, start.position, end, (), draft)
        self._count_hit(seq, start.position)
        self.ledger.release_covered(request)

    def _count_admission(self, request: Request) -> None:
        if request.queued_since_s is not None:
            self.counters.admissions += 1
            self.counters.queue_seconds += time.monotonic() - request.queued_since_s
            request.queued_since_s = None

    def _leave_queue_for_slot(self, seq: Sequence) -> None:
        self.queue.take(seq)
        self._leave_room(seq)
        seq.state = State.RUNNING
        seq.slot = self._free_slots.pop()
        self._prefilling[seq] = None
        if seq.request.num_running == 0:
            self.room.count(seq.request, -1)
            self._count_admission(seq.request)
        seq.request.num_running += 1

    def _count_hit(self, seq: Sequence, position: int) -> None:
        request = seq.request
        self.room.charge(request.tenant, len(seq.token_ids) - position, 0)
        if request.num_cached_tokens is None:
            request.num_cached_tokens = min(position, request.num_prompt)
            self.counters.prefix_queries += request.num_prompt
            self.counters.prefix_hits += request.num_cached_tokens

    def _frontier(self, seq: Sequence) -> int:
        return self._starts.find(seq, {}, {}).position

    # --- conservation ---------------------------------------------------------------------------------------
    @property
    def num_running_sequences(self) -> int:
        return len(self._decoding) + len(self._prefilling)

    @property
    def waits_for_embeddings(self) -> bool:
        return self.ledger.num_pending > 0

    def check_integrity(self) -> str | None:
        """The first broken conservation law, or None."""
        running = [*self._decoding, *self._prefilling]
        owners = Counter(block for seq in running for block in seq.block_ids)
        problem = self.pool.check_integrity(owners) or self.cache.check_integrity()
        problem = problem or self.ledger.check_integrity()
        if problem is not None:
            return problem
        slots = sorted([*self._free_slots, *(seq.slot for seq in running)])
        if slots != list(range(self.config.max_sequences)):
            return f"slots are lost or doubled: {slots}"
        return self._check_states(running)

    def _check_states(self, running: list[Sequence]) -> str | None:
        sequences = [seq for request in self.requests.values() for seq in request.sequences]
        if {s for s in sequences if s.state is State.RUNNING} != set(running):
            return "running sequences and their states differ"
        waiting = [seq for seq in sequences if seq.state is State.WAITING]
        problem = self._shared.check_integrity(self._prefilling, waiting)
        return problem or self.room.check_integrity(self.requests.values())

    def check_idle(self) -> str | None:
        """What must hold when there is no request: nothing is owned, claimed or queued."""
        assert not self.requests, "not idle"
        left = {
            "blocks": self.pool.num_owned,
            "embedding tokens": self.ledger.num_claimed_tokens,
            "queued sequences": len(self.queue) + self.ledger.num_asking,
            "waiting requests": self.room.num_requests,
        }
        held = [f"{count} {name}" for name, count in left.items() if count]
        return f"idle and still held: {', '.join(held)}" if held else None
