"""Draws the next token of every row: penalties, filters, counter-based noise, log-probabilities.

Order, as in vLLM: logit bias and forbidden end tokens, penalties, (greedy picks here), temperature, min-p,
top-k, top-p, draw. Log-probabilities are those of the model's own logits, before all of that.

Shapes: R rows, V vocabulary, L history, K candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from contracts.params import SamplingParams
from lm_engine.random import gumbel_noise

MIN_LOGPROB = -9999.0
MIN_TEMPERATURE = 1e-5  # below it logits overflow; the draw is greedy long before
NUM_GUESSED_CANDIDATES = 512  # on the CPU: the nucleus usually lies within so many tokens


@dataclass(frozen=True)
class RowParams:
    """Sampling parameters and counter of every row, on the device."""

    temperature_R: Tensor
    top_p_R: Tensor
    min_p_R: Tensor
    top_k_R: Tensor  # int64, 0 = off
    seed_R: Tensor  # int64
    position_R: Tensor  # int64: sequence index of the token to draw


@dataclass(frozen=True)
class Needs:
    """What the host knows about the rows, so that nothing is computed that no row asked for."""

    random: bool = False
    max_top_k: int = 0
    top_p: bool = False
    nucleus_of_all: bool = False  # a row has top_p and no top_k
    min_p: bool = False


class LogitChange(NamedTuple):
    """`value` is added to the token's logit in this of the step's rows; -inf forbids."""

    row: int
    token: int
    value: float


@dataclass(frozen=True)
class AskedRows:
    """The rows of a step that sample, as the host knows them."""

    slots: Sequence[int]
    next_index: Sequence[int]  # sequence index of the token to draw
    params: Sequence[SamplingParams]
    changes: Sequence[LogitChange]


@dataclass(frozen=True)
class Penalties:
    """Rows with penalties and the tokens they have seen. P of the R rows."""

    rows_P: Tensor  # int64
    tokens_PL: Tensor  # int64, garbage from `lengths_P` on
    lengths_P: Tensor
    num_prompt_P: Tensor
    presence_P: Tensor
    frequency_P: Tensor
    repetition_P: Tensor


@dataclass(frozen=True)
class Adjustments:
    """Single logits to change: `values` are added at (row, token); -inf forbids."""

    rows: Tensor  # int64
    tokens: Tensor  # int64
    values: Tensor  # float32


@dataclass(frozen=True)
class LogprobsWanted:
    rows: Tensor  # int64: Q of the R rows
    num_top: int


@dataclass(frozen=True)
class Logprobs:
    """Finite, clamped at MIN_LOGPROB. Rank 1 = most likely; equals share the better rank. Q rows."""

    chosen_Q: Tensor
    rank_Q: Tensor
    top_values_QK: Tensor
    top_ids_QK: Tensor

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.chosen_Q, self.rank_Q, self.top_values_QK, self.top_ids_QK


@dataclass(frozen=True)
class Sampled:
    token_R: Tensor  # int64, or int32 of graphs and kernels
    valid_R: (
        Tensor  # bool, or int32 of graphs and kernels: False where the model's logits held NaN or infinity
    )
    logprobs: Logprobs | None


def needs_of(params: Sequence[SamplingParams]) -> Needs:
    drawn = [p for p in params if not p.greedy]
    return Needs(
        random=bool(drawn),
        max_top_k=max((p.top_k for p in drawn), default=0),
        top_p=any(p.top_p < 1.0 for p in drawn),
        nucleus_of_all=any(p.top_p < 1.0 and not p.top_k for p in drawn),
        min_p=any(p.min_p > 0.0 for p in drawn),
    )


def sample(
    logits_RV: Tensor,
    params: RowParams,
    needs: Needs,
    adjustments: Adjustments | None = None,
    penalties: Penalties | None = None,
    wanted: LogprobsWanted | None = None,
) -> Sampled:
    """Spends `logits_RV` (float32)."""
    raw_QV = None if wanted is None else logits_RV[wanted.rows]
    if adjustments is not None:
        logits_RV.index_put_((adjustments.rows, adjustments.tokens), adjustments.values, accumulate=True)
    if penalties is not None:
        logits_RV[penalties.rows_P] = penalise(logits_RV[penalties.rows_P], penalties)
    best_R, token_R = _largest(logits_RV)
    valid_R = best_R.isfinite()
    if needs.random:
        drawn_R = _draw(logits_RV, best_R, params, needs)
        token_R = torch.where(params.temperature_R == 0, token_R, drawn_R)
    # A row of NaN must not index outside the vocabulary later.
    token_R = torch.where(valid_R, token_R, 0)
    if wanted is None or raw_QV is None:
        return Sampled(token_R, valid_R, None)
    return Sampled(token_R, valid_R, log_probabilities(raw_QV, token_R[wanted.rows], wanted.num_top))


def _largest(logits_RV: Tensor) -> tuple[Tensor, Tensor]:
    """Value and place of each row's maximum, the first of equals; NaN counts as larger than all."""
    if logits_RV.device.type != "cpu":
        best_R, token_R = logits_RV.max(dim=-1)
        return best_R, token_R
    token_R = torch.from_numpy(logits_RV.numpy().argmax(axis=-1))  # twenty times as fast as torch's
    return logits_RV.gather(1, token_R[:, None])[:, 0], token_R


def penalise(logits_PV: Tensor, penalties: Penalties) -> Tensor:
    """Repetition counts prompt and output and divides or multiplies; presence and frequency count the
    output and subtract."""
    index_L = torch.arange(penalties.tokens_PL.shape[1], device=logits_PV.device)
    known_PL = index_L < penalties.lengths_P[:, None]
    output_PL = known_PL & (index_L >= penalties.num_prompt_P[:, None])
    zeros_PV = torch.zeros_like(logits_PV)
    seen_PV = zeros_PV.scatter_add(1, penalties.tokens_PL, known_PL.float()) > 0
    count_PV = zeros_PV.scatter_add_(1, penalties.tokens_PL, output_PL.float())
    factor_P1 = penalties.repetition_P[:, None]
    repeated_PV = torch.where(logits_PV > 0, logits_PV / factor_P1, logits_PV * factor_P1)
    logits_PV = torch.where(seen_PV, repeated_PV, logits_PV)
    logits_PV -= penalties.frequency_P[:, None] * count_PV
    logits_PV -= penalties.presence_P[:, None] * (count_PV > 0)
    return logits_PV


def log_probabilities(raw_QV: Tensor, token_Q: Tensor, num_top: int) -> Logprobs:
    logprobs_QV = raw_QV.log_softmax(dim=-1).nan_to_num_(nan=MIN_LOGPROB).clamp_(min=MIN_LOGPROB)
    chosen_Q1 = logprobs_QV.gather(1, token_Q[:, None])
    rank_Q = (logprobs_QV > chosen_Q1).sum(dim=-1) + 1
    top_values_QK, top_ids_QK = logprobs_QV.topk(min(num_top, logprobs_QV.shape[1]), dim=-1)
    return Logprobs(chosen_Q1[:, 0], rank_Q, top_values_QK, top_ids_QK)


def _draw(logits_RV: Tensor, best_R: Tensor, params: RowParams, needs: Needs) -> Tensor:
    """Greedy rows get a meaningless token. Spends `logits_RV`."""
    temperature_R1 = torch.where(params.temperature_R == 0, 1.0, params.temperature_R)[:, None]
    temperature_R1 = temperature_R1.clamp(min=MIN_TEMPERATURE)
    scaled_RV = logits_RV.div_(temperature_R1)
    candidates = None
    if needs.max_top_k or needs.top_p or needs.min_p:
        floor_R1, candidates = filter_floor(scaled_RV, best_R[:, None] / temperature_R1, params, needs)
        if candidates is None:
            scaled_RV.masked_fill_(scaled_RV < floor_R1, -torch.inf)
    if candidates is None:
        ids_1V = torch.arange(scaled_RV.shape[1], device=scaled_RV.device, dtype=torch.int32)[None]
        return scaled_RV.add_(gumbel_noise(params.seed_R, params.position_R, ids_1V)).argmax(dim=-1)
    values_RK, ids_RK = candidates
    values_RK = values_RK.masked_fill(values_RK < floor_R1, -torch.inf)
    noisy_RK = values_RK + gumbel_noise(params.seed_R, params.position_R, ids_RK)
    return ids_RK.gather(1, noisy_RK.argmax(dim=-1, keepdim=True))[:, 0]


def filter_floor(
    logits_RV: Tensor, best_R1: Tensor, params: RowParams, needs: Needs
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """The smallest logit that survives min-p, top-k and top-p in each row, and, where it is known without
    waiting for the device, candidates (values, ids) that hold all survivors.

    Filters are thresholds on the value, so tokens that tie with the last one kept are kept as well, whatever
    their order.
    """
    floor_R1 = torch.where(params.min_p_R > 0, best_R1[:, 0] + params.min_p_R.log(), -torch.inf)[:, None]
    if not (needs.max_top_k or needs.top_p):
        return floor_R1, None
    size = logits_RV.shape[1]
    on_host = logits_RV.device.type == "cpu"
    num_candidates = min(max(needs.max_top_k, 1), size)
    if needs.nucleus_of_all:
        num_candidates = min(max(num_candidates, NUM_GUESSED_CANDIDATES), size) if on_host else size
    values_RK, ids_RK = logits_RV.topk(num_candidates, dim=-1)
    kth_R1 = values_RK.gather(1, params.top_k_R.clamp(1, num_candidates)[:, None] - 1)
    floor_R1 = torch.where(params.top_k_R[:, None] > 0, torch.maximum(floor_R1, kth_R1), floor_R1)
    if not needs.top_p:
        return floor_R1, _holding_all(values_RK, ids_RK, floor_R1, size)
    filtered_R1, complete_R = _nucleus_floor(values_RK, logits_RV, best_R1, floor_R1, params)
    if on_host and not bool(complete_R.all()):
        values_RK, ids_RK = logits_RV.sort(dim=-1, descending=True)
        filtered_R1, _ = _nucleus_floor(values_RK, logits_RV, best_R1, floor_R1, params)
    return filtered_R1, _holding_all(values_RK, ids_RK, filtered_R1, size)


def _holding_all(
    values_RK: Tensor, ids_RK: Tensor, floor_R1: Tensor, size: int
) -> tuple[Tensor, Tensor] | None:
    """The candidates if all survivors are among them; None also where asking would wait for the device."""
    if values_RK.device.type != "cpu":
        return None
    holds_all = values_RK.shape[1] == size or bool((values_RK[:, -1:] < floor_R1).all())
    return (values_RK, ids_RK) if holds_all else None


def _nucleus_floor(
    values_RK: Tensor, logits_RV: Tensor, best_R1: Tensor, floor_R1: Tensor, params: RowParams
) -> tuple[Tensor, Tensor]:
    """Floors after top-p as well, given the K largest logits in order; and whether K sufficed, per row.

    Masses are summed in float64: no rounding that depends on the batch decides who is in the nucleus.
    """
    mass_RV = (logits_RV - best_R1).exp_().masked_fill_(logits_RV < floor_R1, 0.0)
    needed_R1 = mass_RV.sum(dim=-1, keepdim=True, dtype=torch.float64) * params.top_p_R[:, None].double()
    mass_RK = (values_RK - best_R1).exp_().masked_fill_(values_RK < floor_R1, 0.0)
    reached_RK = mass_RK.cumsum(dim=-1, dtype=torch.float64) >= needed_R1
    reached_R = reached_RK[:, -1]
    last_R1 = values_RK.gather(1, reached_RK.int().argmax(dim=-1, keepdim=True))
    cuts_R1 = (reached_R & (params.top_p_R < 1.0))[:, None]
    complete_R = reached_R | (params.top_p_R >= 1.0) | (params.top_k_R > 0)
    return torch.where(cuts_R1, torch.maximum(floor_R1, last_R1), floor_R1), complete_R
