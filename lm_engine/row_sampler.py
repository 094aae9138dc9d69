"""Draws for the rows of a step: gathers what their slots ask for and hands it to the sampler.

Shapes: S sampling rows, V vocabulary, P of the S rows with penalties, L history.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from torch import Tensor

from contracts.params import SamplingParams
from lm_engine.logits_rule import History, LogitsRule
from lm_engine.model import AttentionBackend
from lm_engine.request_table import RequestTable, SampledRows
from lm_engine.sampler import (
    Adjustments,
    AskedRows,
    LogitChange,
    LogprobsWanted,
    Penalties,
    RowParams,
    Sampled,
    needs_of,
    sample,
)


class RowDraws(Protocol):
    """The same by kernels of the device's own."""

    def __call__(self, asked: AskedRows, logits_SV: Tensor) -> Sampled:
        """Spends `logits_SV` (float32); the tokens are in the table then."""
        ...

    def rehearse(self) -> None:
        """Compiles what it will launch."""
        ...


def make_draws(table: RequestTable, attention: AttentionBackend) -> RowDraws | None:
    """Those that go with Triton's attention on a GPU; None: the plain sampler draws."""
    if table.device.type != "cuda" or attention.name != "triton":
        return None
    from lm_engine.triton.sampling import TritonDraws

    return TritonDraws(table)


class RowSampler:
    """Borrows the table, and writes to it what it draws. `draws`: in place of the plain sampler."""

    def __init__(
        self, table: RequestTable, rule: LogitsRule | None = None, draws: RowDraws | None = None
    ) -> None:
        self.table = table
        self._rule = rule
        self._draws = draws

    def __call__(self, inputs: SampledRows, logits_SV: Tensor) -> Sampled:
        """Spends `logits_SV` (float32)."""
        params = [self.table.rows[slot].sampling for slot in inputs.host_slots_S]
        if self._rule is not None:
            logits_SV = self._ruled(self._rule, inputs, logits_SV, params)
        if self._draws is not None:
            sampled = self._draws(self._asked(inputs.host_slots_S, inputs.host_next_index_S), logits_SV)
            self.table.note_sampled(inputs.host_slots_S, inputs.host_next_index_S)
            return sampled
        sampled = self._sample_plainly(inputs, logits_SV, params)
        self.table.write_sampled(inputs, sampled.token_R)
        return sampled

    def draw(self, slots: Sequence[int], next_index: Sequence[int], logits_SV: Tensor) -> Sampled:
        """The same of rows that only the host has listed, where there is no rule."""
        assert self._rule is None
        if self._draws is not None:
            sampled = self._draws(self._asked(slots, next_index), logits_SV)
            self.table.note_sampled(slots, next_index)
            return sampled
        slots_S, next_index_S = self.table.to_device(np.array([slots, next_index], dtype=np.int64)).unbind(0)
        rows = SampledRows(
            slots_S=slots_S,
            next_index_S=next_index_S,
            host_slots_S=tuple(slots),
            host_next_index_S=tuple(next_index),
        )
        return self(rows, logits_SV)

    def rehearse(self) -> None:
        """What is compiled on first use is compiled now."""
        if self._draws is not None:
            self._draws.rehearse()

    def _asked(self, slots: Sequence[int], next_index: Sequence[int]) -> AskedRows:
        params = [self.table.rows[slot].sampling for slot in slots]
        return AskedRows(slots, next_index, params, self._changes(slots, next_index))

    def _sample_plainly(
        self, inputs: SampledRows, logits_SV: Tensor, params: list[SamplingParams]
    ) -> Sampled:
        temperature_S, top_p_S, min_p_S, *_ = self.table.floats[inputs.slots_S].unbind(1)
        row_params = RowParams(
            temperature_R=temperature_S,
            top_p_R=top_p_S,
            min_p_R=min_p_S,
            top_k_R=self.table.top_k[inputs.slots_S],
            seed_R=self.table.seed[inputs.slots_S],
            position_R=inputs.next_index_S,
        )
        return sample(
            logits_SV,
            row_params,
            needs_of(params),
            self.adjustments(inputs.host_slots_S, inputs.host_next_index_S),
            self._penalties(inputs, params),
            self._logprobs_wanted(params),
        )

    def _ruled(
        self, rule: LogitsRule, inputs: SampledRows, logits_SV: Tensor, params: list[SamplingParams]
    ) -> Tensor:
        bare = [i for i, p in enumerate(params) if not p.ruled]
        if not bare:
            return rule.apply(logits_SV, self._history(inputs))
        rows = self.table.to_device(np.array(bare, dtype=np.int64))
        kept = logits_SV[rows]
        logits_SV = rule.apply(logits_SV, self._history(inputs))
        return logits_SV.index_copy_(0, rows, kept)

    def _history(self, inputs: SampledRows) -> History:
        longest = max(inputs.host_next_index_S)
        return History(
            tokens_SL=self.table.token_ids[inputs.slots_S, :longest].long(),
            lengths_S=inputs.next_index_S,
            num_prompt_S=self.table.num_prompt[inputs.slots_S],
        )

    def adjustments(self, slots: Sequence[int], next_index: Sequence[int]) -> Adjustments | None:
        """Biased tokens, and ends that are forbidden still."""
        changes = self._changes(slots, next_index)
        if not changes:
            return None
        rows, tokens, values = zip(*changes, strict=True)
        rows_E, tokens_E = self.table.to_device(np.array([rows, tokens], dtype=np.int64)).unbind(0)
        return Adjustments(rows_E, tokens_E, self.table.to_device(np.array(values, dtype=np.float32)))

    def _changes(self, slots: Sequence[int], next_index: Sequence[int]) -> list[LogitChange]:
        changes: list[LogitChange] = []
        for i, slot in enumerate(slots):
            row = self.table.rows[slot]
            changes += [LogitChange(i, token, value) for token, value in row.sampling.logit_bias]
            if next_index[i] - row.num_prompt_tokens < row.sampling.min_tokens:
                forbidden = {*row.stop_token_ids, *row.sampling.stop_token_ids}
                changes += [LogitChange(i, token, -np.inf) for token in forbidden]
        assert all(0 <= change.token < self.table.vocab_size for change in changes), (
            "a biased token is outside the vocabulary"
        )
        return changes

    def _penalties(self, inputs: SampledRows, params: list[SamplingParams]) -> Penalties | None:
        penalised = [i for i, p in enumerate(params) if p.has_penalties]
        if not penalised:
            return None
        longest = max(inputs.host_next_index_S[i] for i in penalised)
        rows_P = self.table.to_device(np.array(penalised, dtype=np.int64))
        slots_P = inputs.slots_S[rows_P]
        *_, presence_P, frequency_P, repetition_P = self.table.floats[slots_P].unbind(1)
        return Penalties(
            rows_P=rows_P,
            tokens_PL=self.table.token_ids[slots_P, :longest].long(),
            lengths_P=inputs.next_index_S[rows_P],
            num_prompt_P=self.table.num_prompt[slots_P],
            presence_P=presence_P,
            frequency_P=frequency_P,
            repetition_P=repetition_P,
        )

    def _logprobs_wanted(self, params: list[SamplingParams]) -> LogprobsWanted | None:
        wanting = [(i, p.logprobs) for i, p in enumerate(params) if p.logprobs is not None]
        if not wanting:
            return None
        rows = self.table.to_device(np.array([i for i, _ in wanting], dtype=np.int64))
        return LogprobsWanted(rows, max(num_top for _, num_top in wanting))
