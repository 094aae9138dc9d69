"""A runner without a model: every KV slot holds a number, so any wrong block, copy or row changes the tokens.

The number of a position mixes its token (or embedding row), its RoPE position and the numbers of all
positions before it *as read through the block table*. The next token is a hash of all the sequence can see.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from contracts.media import Prompt
from contracts.messages import TokenLogprobs
from contracts.params import SamplingParams
from lm_engine.config import EngineConfig
from lm_engine.media_layout import MediaLayout
from lm_engine.plan import Admission, SampledToken, SequenceStep, StepPlan, StepResult

if TYPE_CHECKING:
    from torch import Tensor

START = 0  # fold of no positions
GARBAGE = -1  # what a failed step leaves where it was to write


@dataclass(frozen=True)
class FakeModel:
    vocab_size: int

    def write(self, fold: int, content: int, position: tuple[float, ...]) -> int:
        """What a position stores: its content seen together with all before it."""
        return hash((1, fold, content, *position))

    def read(self, fold: int, stored: int) -> int:
        return hash((2, fold, stored))

    def next_token(self, fold: int, index: int, ask: Admission) -> int:
        """Token `index` of the sequence: depends on (seed, index) and on what is visible, nothing else."""
        seed = 0 if ask.sampling.greedy else ask.seed
        early = index - ask.num_prompt_tokens < ask.sampling.min_tokens
        banned = frozenset(ask.stop_token_ids) if early else frozenset()
        draw = hash((3, fold, seed, index))
        while draw % self.vocab_size in banned:
            draw = hash((4, draw))
        return draw % self.vocab_size


@dataclass
class _Row:
    """One slot of the request table."""

    ask: Admission
    tokens: list[int]
    blocks: list[int]
    lost: bool = False  # a step of it failed: what it holds is garbage, as on a device

    def position(self, index: int) -> tuple[float, ...]:
        if index < self.ask.num_prompt_tokens:
            return tuple(float(p) for p in self.ask.positions_AL[:, index])
        return (index + self.ask.position_delta,) * len(self.ask.positions_AL)


class FakeRunner:
    """Checks every plan against the budgets of `config` and the rules of the seam, then computes it.

    `threaded` runs steps on a thread as a real runner does. `gate` is called before each step's computation,
    on the thread that runs it; it may block, or raise RuntimeError to fail the step.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: FakeModel,
        *,
        threaded: bool = False,
        gate: Callable[[StepPlan], None] | None = None,
    ) -> None:
        self.num_steps = 0
        self.plans: list[StepPlan] = []
        self.num_computed_tokens = 0
        self._config = config
        self._model = model
        self._gate = gate
        self._kv: dict[tuple[int, int], int] = {}  # (block, offset) → number
        self._rows: dict[int, _Row] = {}
        self._executor = ThreadPoolExecutor(1, "fake-runner") if threaded else None

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        if self._executor is not None:
            return self._executor.submit(self._run, plan)
        future: Future[StepResult] = Future()
        try:
            result = self._run(plan)
        except RuntimeError as error:  # what a gate raises to fail the step
            future.set_exception(error)
        else:
            future.set_result(result)
        return future

    def close(self) -> None:
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)

    def _run(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        for slot in plan.released_slots:
            self._rows.pop(slot, None)
        self.num_steps += 1
        self._check_budgets(plan)
        for ask in plan.admissions:
            assert ask.slot not in self._rows, f"slot {ask.slot} is taken"
            self._rows[ask.slot] = _Row(ask, list(ask.token_ids), list(ask.block_ids))
        self._copy_blocks(plan)
        for step in plan.sequences:
            self._rows[step.slot].blocks += step.new_block_ids
        self._check_writes(plan)
        self._pass_gate(plan)
        rows = self._embedding_rows(plan)
        folds = [self._compute(step, rows) for step in plan.sequences]
        sampled = [
            self._sample(step, fold) for step, fold in zip(plan.sequences, folds, strict=True) if step.samples
        ]
        return StepResult(plan.step_id, tuple(sampled))

    def _pass_gate(self, plan: StepPlan) -> None:
        if self._gate is None:
            return
        passed = False
        try:
            self._gate(plan)
            passed = True
        finally:
            if not passed:
                self._lose(plan)

    def _lose(self, plan: StepPlan) -> None:
        size = self._config.block_size
        for step in plan.sequences:
            row = self._rows[step.slot]
            row.lost = True
            for index in range(step.start, step.start + step.num_tokens):
                self._kv[row.blocks[index // size], index % size] = GARBAGE

    def _copy_blocks(self, plan: StepPlan) -> None:
        size = self._config.block_size
        before = {source: [self._kv.get((source, i)) for i in range(size)] for source, _ in plan.block_copies}
        for source, target in plan.block_copies:
            for offset, stored in enumerate(before[source]):
                if stored is not None:
                    self._kv[target, offset] = stored

    def _compute(self, step: SequenceStep, rows: Mapping[tuple[int, int], int]) -> int:
        """Writes the step's positions; returns the fold over all that its last token sees."""
        row, size, fold = self._rows[step.slot], self._config.block_size, START
        if row.lost:
            return fold
        for index in range(step.start):
            fold = self._model.read(fold, self._kv[row.blocks[index // size], index % size])
        for index in range(step.start, step.start + step.num_tokens):
            content = rows.get((step.slot, index), row.tokens[index])
            stored = self._model.write(fold, content, row.position(index))
            self._kv[row.blocks[index // size], index % size] = stored
            fold = self._model.read(fold, stored)
        self.num_computed_tokens += step.num_tokens
        return fold

    def _sample(self, step: SequenceStep, fold: int) -> SampledToken:
        row, index = self._rows[step.slot], step.start + step.num_tokens
        assert row.lost or len(row.tokens) == index, (
            f"slot {step.slot} samples token {index} of {len(row.tokens)}"
        )
        token = self._model.next_token(fold, index, row.ask)
        row.tokens.append(token)
        wanted = row.ask.sampling.logprobs
        logprobs = None if wanted is None else TokenLogprobs(-float(index), 1, ((token, -float(index)),))
        return SampledToken(step.slot, token, logprobs)

    def _embedding_rows(self, plan: StepPlan) -> dict[tuple[int, int], int]:
        rows: dict[tuple[int, int], int] = {}
        for piece in plan.span_pieces:
            part = piece.embeddings[piece.source_start : piece.source_start + piece.length]
            assert part.shape[0] == piece.length, "a span piece reaches past its item's rows"
            for index, content in enumerate(row_contents(part), piece.start):
                assert (piece.slot, index) not in rows, "two span pieces for one position"
                rows[piece.slot, index] = content
        return rows

    def _check_budgets(self, plan: StepPlan) -> None:
        config = self._config
        assert plan.sequences, "an empty step"
        assert plan.num_tokens <= config.max_step_tokens, "max_step_tokens is exceeded"
        assert len(plan.sequences) <= config.max_sequences, "max_sequences is exceeded"
        num_visual = sum(piece.length for piece in plan.span_pieces)
        if config.atomic_spans:
            alone = len({(piece.slot, id(piece.embeddings)) for piece in plan.span_pieces}) == 1
            assert num_visual <= config.max_step_visual_tokens or alone, "max_step_visual_tokens is exceeded"
        else:
            assert num_visual <= config.max_step_visual_tokens, "max_step_visual_tokens is exceeded"
            longest = max(step.num_tokens for step in plan.sequences)
            assert longest <= config.long_prefill_cap, "long_prefill_cap is exceeded"

    def _check_writes(self, plan: StepPlan) -> None:
        size = self._config.block_size
        tables = {slot: row.blocks for slot, row in self._rows.items()}
        uses: dict[int, int] = {}
        for blocks in tables.values():
            for block in blocks:
                uses[block] = uses.get(block, 0) + 1
        for step in plan.sequences:
            blocks, end = tables[step.slot], step.start + step.num_tokens
            assert step.num_tokens >= 1, "a row without tokens"
            assert len(blocks) == -(-end // size), (
                f"slot {step.slot} has {len(blocks)} blocks for {end} tokens"
            )
            assert all(0 < block < self._config.num_blocks for block in blocks), "no such block"
            for block in blocks[step.start // size :]:
                assert uses[block] == 1, f"slot {step.slot} writes block {block}, which others read"


def row_contents(embeddings: Tensor) -> list[int]:
    return [hash(tuple(row)) for row in embeddings.tolist()]


def reference_tokens(
    model: FakeModel,
    prompt: Prompt,
    embeddings: Mapping[int, Tensor],
    positions: tuple[np.ndarray, int],
    sampling: SamplingParams,
    *,
    seed: int,
    stop_ids: tuple[int, ...],
    max_length: int,
) -> list[int]:
    """The output tokens of one sample, computed without blocks, steps or caches."""
    ask = Admission(
        slot=0,
        token_ids=prompt.token_ids,
        num_prompt_tokens=len(prompt.token_ids),
        positions_AL=positions[0],
        position_delta=positions[1],
        sampling=sampling,
        seed=seed,
        block_ids=(),
        stop_token_ids=stop_ids,
    )
    contents = list(prompt.token_ids)
    for run in MediaLayout(prompt).runs:
        rows = row_contents(embeddings[run.item_index])
        contents[run.start : run.end] = rows[run.row : run.row + run.length]
    row, fold, output = _Row(ask, contents, []), START, list[int]()
    for index, content in enumerate(contents):
        fold = model.read(fold, model.write(fold, content, row.position(index)))
    for index in range(len(contents), max_length):
        token = model.next_token(fold, index, ask)
        output.append(token)
        if token in stop_ids and len(output) > sampling.min_tokens:
            break
        fold = model.read(fold, model.write(fold, token, row.position(index)))
    return output
