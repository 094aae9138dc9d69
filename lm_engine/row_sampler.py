"""Draws for the rows of a step: gathers what their slots ask for and hands it to the sampler.

Shapes: S sampling rows, V vocabulary, P of the S rows with penalties, L history.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from contracts.params import SamplingParams
from lm_engine.logits_rule import History, LogitsRule
from lm_engine.request_table import RequestTable, SampledRows
from lm_engine.sampler import Adjustments, LogprobsWanted, Needs, Penalties, RowParams, Sampled, sample


class RowSampler:
    """Borrows the table."""

    def __init__(self, table: RequestTable, rule: LogitsRule | None = None) -> None:
        self.table = table
        self._rule = rule

    def __call__(self, inputs: SampledRows, logits_SV: Tensor) -> Sampled:
        """Spends `logits_SV` (float32)."""
        rows = [self.table.rows[slot] for slot in inputs.host_slots_S]
        params = [row.sampling for row in rows]
        if self._rule is not None:
            logits_SV = self._ruled(self._rule, inputs, logits_SV, params)
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
        entries: list[tuple[int, int]] = []
        values: list[float] = []
        for i, slot in enumerate(slots):
            row = self.table.rows[slot]
            bias = row.sampling.logit_bias
            entries += [(i, token) for token, _ in bias]
            values += [value for _, value in bias]
            if next_index[i] - row.num_prompt_tokens < row.sampling.min_tokens:
                forbidden = {*row.stop_token_ids, *row.sampling.stop_token_ids}
                entries += [(i, token) for token in forbidden]
                values += [-np.inf] * len(forbidden)
        if not entries:
            return None
        pairs = np.array(entries, dtype=np.int64)
        assert pairs[:, 1].min() >= 0
        assert pairs[:, 1].max() < self.table.vocab_size, "a biased token is outside the vocabulary"
        rows, tokens = self.table.to_device(pairs.T.copy()).unbind(0)
        return Adjustments(rows, tokens, self.table.to_device(np.array(values, dtype=np.float32)))

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


def needs_of(params: list[SamplingParams]) -> Needs:
    drawn = [p for p in params if not p.greedy]
    return Needs(
        random=bool(drawn),
        max_top_k=max((p.top_k for p in drawn), default=0),
        top_p=any(p.top_p < 1.0 for p in drawn),
        nucleus_of_all=any(p.top_p < 1.0 and not p.top_k for p in drawn),
        min_p=any(p.min_p > 0.0 for p in drawn),
    )
