"""Chooses which spoken answers compute what in a step. Nothing is preempted: all KV is reserved at
admission, for as many frames as the answer may come to; once its text has ended these are fewer."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from lm_engine.block_pool import BlockPool
from lm_engine.config import EngineConfig
from lm_engine.plan import Admission, SequenceStep
from lm_engine.sequence import NO_SLOT, sample_seed
from lm_engine.talker.plan import RowPiece, TalkerPlan
from lm_engine.talker.request import SpokenAnswer


@dataclass(frozen=True)
class TalkerStep:
    plan: TalkerPlan
    answers: tuple[SpokenAnswer, ...]
    sampling: tuple[SpokenAnswer, ...]


@dataclass
class _Draft:
    tokens_left: int
    admissions: list[Admission] = field(default_factory=list)
    rows: list[tuple[SpokenAnswer, SequenceStep]] = field(default_factory=list)
    pieces: list[RowPiece] = field(default_factory=list)
    feedback: list[bool] = field(default_factory=list)

    def put(self, answer: SpokenAnswer, end: int) -> None:
        """Computes the answer's rows up to `end`."""
        start, answer_rows = answer.num_computed, answer.num_rows
        assert start < end <= max(answer_rows, start + 1)
        feedback, samples = start >= answer_rows, end >= answer_rows
        self.pieces += answer.rows.take(start, end)
        self.feedback.append(feedback)
        self.rows.append((answer, SequenceStep(answer.slot, start, end - start, (), samples)))
        self.tokens_left -= end - start
        answer.num_computed = end


class TalkerScheduler:
    """Owns every answer between `add` and `remove`, with its slot and blocks.

    Each step first gives a frame to every running answer that may have one: its next row is there and its
    grant is not used up. The others are passed over and hold nobody up. Then prompts, then admissions:
    in order of arrival among those whose prompt rows are there.
    """

    def __init__(self, config: EngineConfig, end_codes: tuple[int, ...]) -> None:
        self.config = config
        self.answers: dict[str, SpokenAnswer] = {}
        self.pool = BlockPool(config.num_blocks)
        self._end_codes = end_codes
        self._running: dict[SpokenAnswer, None] = {}
        self._waiting: dict[SpokenAnswer, None] = {}
        self._free_slots = list(range(config.max_sequences - 1, -1, -1))
        self._released_slots: list[int] = []
        self._next_step_id = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def add(self, answer: SpokenAnswer) -> None:
        assert answer.id not in self.answers, f"{answer.id} is added twice"
        self.answers[answer.id] = answer
        self._waiting[answer] = None

    def remove(self, answer: SpokenAnswer) -> None:
        """Frees all that it holds. What steps under way draw for it is discarded on arrival."""
        del self.answers[answer.id]
        answer.finished = True
        self._waiting.pop(answer, None)
        if answer in self._running:
            del self._running[answer]
            self.pool.release(answer.block_ids)
            answer.block_ids = []
            self._released_slots.append(answer.slot)
            self._free_slots.append(answer.slot)
            answer.slot = NO_SLOT

    def narrow(self, answer: SpokenAnswer, most_frames: int) -> None:
        """It will have no more frames than that, or than are planned already. Gives back the blocks for
        others; no step reads or writes them: all stay below `num_kv_tokens`."""
        answer.max_frames = min(answer.max_frames, max(most_frames, answer.num_planned, 1))
        if answer in self._running:
            need = self.config.blocks_for(answer.num_kv_tokens)
            self.pool.release(answer.block_ids[need:])
            del answer.block_ids[need:]

    def plan(self) -> TalkerStep | None:
        """The next step, or None when nothing can be computed now."""
        draft = _Draft(self.config.max_step_tokens)
        for answer in self._running:
            if answer.decodes and answer.may_decode:
                draft.put(answer, answer.num_computed + 1)
        for answer in self._running:
            if not answer.decodes:
                self._prefill(answer, draft)
        self._admit(draft)
        if not draft.rows:
            return None
        return self._commit(draft)

    def _prefill(self, answer: SpokenAnswer, draft: _Draft) -> None:
        start = answer.num_computed
        end = min(answer.num_rows, start + min(draft.tokens_left, self.config.long_prefill_cap))
        if end == answer.num_rows and answer.limit < 1:
            return  # its last row draws a frame
        if end > start:
            draft.put(answer, end)

    def _admit(self, draft: _Draft) -> None:
        for answer in tuple(self._waiting):
            if draft.tokens_left == 0 or not self._free_slots:
                return
            if answer.rows.end == 0 or answer.limit < 1:
                continue  # it waits for the thinker, or for its listener
            need = self.config.blocks_for(answer.num_kv_tokens)
            if need > self.pool.num_free:
                return  # nobody smaller passes it, or it might wait for ever
            del self._waiting[answer]
            answer.block_ids = self.pool.allocate(need)
            answer.slot = self._free_slots.pop()
            self._running[answer] = None
            draft.admissions.append(self._admission(answer))
            self._prefill(answer, draft)

    def _admission(self, answer: SpokenAnswer) -> Admission:
        sampling, prompt = answer.message.sampling, answer.prompt
        assert sampling.seed is not None or sampling.greedy, "the coordinator fills in the seed"
        return Admission(
            slot=answer.slot,
            token_ids=prompt.codes,
            num_prompt_tokens=prompt.num_rows,
            positions_AL=prompt.positions_AP,
            position_delta=prompt.position_delta,
            sampling=sampling,
            seed=sample_seed(sampling.seed or 0, 0),
            block_ids=tuple(answer.block_ids),
            stop_token_ids=self._end_codes,
        )

    def _commit(self, draft: _Draft) -> TalkerStep:
        plan = TalkerPlan(
            step_id=self._next_step_id,
            released_slots=tuple(self._released_slots),
            admissions=tuple(draft.admissions),
            sequences=tuple(step for _, step in draft.rows),
            pieces=tuple(draft.pieces),
            feedback=tuple(draft.feedback),
        )
        self._next_step_id += 1
        self._released_slots.clear()
        answers = tuple(answer for answer, _ in draft.rows)
        sampling = tuple(answer for answer, step in draft.rows if step.samples)
        return TalkerStep(plan, answers, sampling)

    # --- conservation ---------------------------------------------------------------------------------------
    def check_integrity(self) -> str | None:
        """The first broken conservation law, or None."""
        owners = Counter(block for answer in self._running for block in answer.block_ids)
        if (problem := self.pool.check_integrity(owners)) is not None:
            return problem
        slots = sorted([*self._free_slots, *(answer.slot for answer in self._running)])
        if slots != list(range(self.config.max_sequences)):
            return f"slots are lost or doubled: {slots}"
        if {*self._running, *self._waiting} != set(self.answers.values()):
            return "answers are lost between waiting and running"
        for answer in self._running:
            if answer.num_planned > answer.limit:
                return f"{answer.id} was planned beyond its grant"
            if len(answer.block_ids) != (need := self.config.blocks_for(answer.num_kv_tokens)):
                return f"{answer.id} holds {len(answer.block_ids)} blocks and may need {need}"
        return None
