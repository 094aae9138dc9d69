"""SilenceGuard: notices speech that has become silence for longer than any pause."""

from __future__ import annotations

import torch
from torch import Tensor

LOUDEST_SILENCE = 1e-4  # -80 dB below full scale: under the quietest breath, above numerical noise
LONGEST_PAUSE_S = 8.0


class SilenceGuard:
    def __init__(self, sample_rate: int) -> None:
        self._limit = int(LONGEST_PAUSE_S * sample_rate)
        self._num_silent = 0  # samples, up to the newest

    def hears_no_end(self, samples: Tensor) -> bool:
        """Takes the stream's next samples. True when it has been silent for too long."""
        loud = torch.nonzero(samples.abs() > LOUDEST_SILENCE)
        if loud.numel():
            self._num_silent = samples.numel() - 1 - int(loud[-1])
        else:
            self._num_silent += samples.numel()
        return self._num_silent >= self._limit
