"""Which tokens Whisper may say next: suppressed ones never, timestamps in pairs that never go back, and
only a
language where one is asked for.

Shapes: S rows, V vocabulary, L longest history.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lm_engine.logits_rule import History
from model_families.whisper.config import WhisperGeneration


class WhisperRule:
    """A row's mode follows from the end of its prompt: "<|notimestamps|>" asks for text alone; a bare start
    token asks a multilingual model for the language; anything else asks for text between timestamps."""

    def __init__(self, generation: WhisperGeneration, vocab_size: int, device: torch.device) -> None:
        self._generation = generation
        self._ids_V = torch.arange(vocab_size, device=device)
        self._suppressed_V = self._mask(generation.suppress_tokens or ())
        self._suppressed_first_V = self._mask(generation.begin_suppress_tokens or ())
        self._languages_V = self._mask(tuple(generation.lang_to_id.values()))

    def _mask(self, ids: tuple[int, ...]) -> Tensor:
        mask_V = torch.zeros_like(self._ids_V, dtype=torch.bool)
        mask_V[torch.tensor(ids, dtype=torch.long, device=mask_V.device)] = True
        return mask_V

    def apply(self, logits_SV: Tensor, history: History) -> Tensor:
        generation = self._generation
        mode_S = _at(history, history.num_prompt_S - 1)
        first_S1 = (history.lengths_S == history.num_prompt_S)[:, None]
        forbidden_SV = self._suppressed_V | (first_S1 & self._suppressed_first_V)
        timed_S1 = (mode_S != generation.no_timestamps_token_id)[:, None]
        if generation.is_multilingual:
            asks_S1 = (mode_S == generation.decoder_start_token_id)[:, None]
            forbidden_SV = torch.where(asks_S1, ~self._languages_V, forbidden_SV)
            timed_S1 = timed_S1 & ~asks_S1
        forbidden_SV = forbidden_SV | (timed_S1 & self._untimely(history, first_S1))
        logits_SV = logits_SV.masked_fill_(forbidden_SV, -torch.inf)
        return self._prefer_timestamps(logits_SV, timed_S1)

    def _untimely(self, history: History, first_S1: Tensor) -> Tensor:
        """[S, V]: what would break the order of timestamps."""
        generation, ids_V = self._generation, self._ids_V
        begin = generation.first_timestamp
        num_output_S = history.lengths_S - history.num_prompt_S
        last_S, before_S = (_at(history, history.lengths_S - back) for back in (1, 2))
        closes_S1 = ((num_output_S >= 1) & (last_S >= begin))[:, None]
        paired_S1 = ((num_output_S < 2) | (before_S >= begin))[:, None]
        is_time_V, is_text_V = ids_V >= begin, ids_V < generation.eos_token_id
        forbidden_SV = ids_V == generation.no_timestamps_token_id
        forbidden_SV = forbidden_SV | (closes_S1 & torch.where(paired_S1, is_time_V, is_text_V))
        # The start of a segment may equal the end of the one before, nothing else may stand still.
        latest_S1 = self._latest_timestamp(history)[:, None]
        earliest_S1 = torch.where(closes_S1 & ~paired_S1, latest_S1, latest_S1 + 1)
        forbidden_SV = forbidden_SV | (is_time_V & (latest_S1 >= begin) & (ids_V < earliest_S1))
        too_early_V = ids_V < begin
        if generation.max_initial_timestamp_index is not None:
            too_early_V = too_early_V | (ids_V > begin + generation.max_initial_timestamp_index)
        return forbidden_SV | (first_S1 & too_early_V)

    def _latest_timestamp(self, history: History) -> Tensor:
        """Of each row's output; -1 without one. They never decrease, so the latest is the largest."""
        index_L = torch.arange(history.tokens_SL.shape[1], device=history.tokens_SL.device)
        is_output_SL = (index_L >= history.num_prompt_S[:, None]) & (index_L < history.lengths_S[:, None])
        is_time_SL = is_output_SL & (history.tokens_SL >= self._generation.first_timestamp)
        return torch.where(is_time_SL, history.tokens_SL, -1).amax(dim=1)

    def _prefer_timestamps(self, logits_SV: Tensor, timed_S1: Tensor) -> Tensor:
        """All timestamps together being likelier than any one text token means: a timestamp."""
        begin = self._generation.first_timestamp
        likelier_S1 = logits_SV[:, begin:].logsumexp(1, keepdim=True) > logits_SV[:, :begin].amax(
            1, keepdim=True
        )
        return logits_SV.masked_fill_(timed_S1 & likelier_S1 & (self._ids_V < begin), -torch.inf)


def _at(history: History, index_S: Tensor) -> Tensor:
    return history.tokens_SL.gather(1, index_S.clamp(0, history.tokens_SL.shape[1] - 1)[:, None])[:, 0]
