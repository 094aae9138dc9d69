"""Positions of a checkpoint whose pictures are read like text: one a token, whatever the token shows."""

from __future__ import annotations

import numpy as np

from contracts.media import Prompt
from model_families.omni.positions import Floats


class OnePerToken:
    """A picture's tokens follow each other in reading order. Rows and columns as axes of their own turn the
    slow pairs of a head alone: a language model that was not trained on them takes a row's tokens for
    unordered."""

    def __call__(self, prompt: Prompt) -> tuple[Floats, float]:
        """[3, T] float32, equal axes, and delta 0: token i has position i everywhere."""
        count = len(prompt.token_ids)
        return np.broadcast_to(np.arange(count, dtype=np.float32), (3, count)).copy(), 0.0
