"""A conversation preempted in the midst of its answer: a companion that came first takes the room it has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

from lm_engine import sequence
from lm_engine.budgets import StepDraft
from lm_engine.scheduler import Scheduler
from tests.served import Answer, Served, Turn, meeting

BLOCK_SIZE = 4


@dataclass(frozen=True)
class Tight:
    """KV for two prompts and one answer. `longest`: tokens of the longest prompt to be preempted."""

    longest: int
    new_tokens: int

    @property
    def num_tokens(self) -> int:
        return (2 * self.longest + self.new_tokens) // BLOCK_SIZE * BLOCK_SIZE + 2 * BLOCK_SIZE

    def settings(self, kv_bytes_per_token: int) -> tuple[str, ...]:
        num_blocks = 1 + self.num_tokens // BLOCK_SIZE
        return (
            f"thinker.kv_memory={num_blocks * BLOCK_SIZE * kv_bytes_per_token}",
            f"thinker.block_size={BLOCK_SIZE}",
            f"thinker.max_context={self.num_tokens}",
            "thinker.prefix_cache=false",
        )

    def answer(self, served: Served, turns: Sequence[Turn], length: int, logprobs: int) -> Answer:
        """Of `turns`, whose prompt has so many tokens: preempted with a part of its answer written."""
        asking = {"max_tokens": self.new_tokens, "ignore_eos": True}
        overhead = len(served.ask([("user", ["z"])], max_tokens=1).prompt_token_ids) - 1
        beside = self.num_tokens - self.new_tokens - length  # both prompts fit, to the last token
        companion: Sequence[Turn] = [("user", ["z" * (beside - overhead)])]
        undisturbed = served.ask(companion, **asking)
        assert len(undisturbed.prompt_token_ids) == beside, "a letter is a token"
        served.ask(turns, max_tokens=1)  # so that its media are known and it comes right behind
        with meeting(2), victims() as preempted:
            first, second = served.ask_all([companion, turns], logprobs=logprobs, **asking)
        assert first.tokens == undisturbed.tokens
        assert any(prompt == length and written > 0 for prompt, written in preempted), preempted
        return second


@contextmanager
def victims() -> Iterator[list[tuple[int, int]]]:
    """Tokens of the prompt and of the answer so far of everyone who is preempted in this process."""
    found: list[tuple[int, int]] = []
    preempt = Scheduler._preempt

    def watch(scheduler: Scheduler, seq: sequence.Sequence, draft: StepDraft) -> None:
        found.append((seq.request.num_prompt, seq.num_output))
        preempt(scheduler, seq, draft)

    with mock.patch.object(Scheduler, "_preempt", watch):
        yield found
