"""SilenceGuard: notices speech that has become silence for longer than any pause."""

from __future__ import annotations

import numpy as np
from torch import Tensor

LOUDEST_SILENCE = 1e-4  # -80 dB below full scale: under the quietest breath, above numerical noise
LONGEST_PAUSE_S = 8.0


class SilenceGuard:
    def __init__(self, sample_rate: int) -> None:
        self._limit = int(LONGEST_PAUSE_S * sample_rate)
        self._num_silent = 0  # samples, up to the newest

    def hears_no_end(self, samples: Tensor) -> bool:
        """Takes the stream's next samples. True when it has been silent for too long."""
        loud = np.abs(samples.numpy()[::-1]) > LOUDEST_SILENCE  # the newest first
        num_silent = int(loud.argmax()) if len(loud) else 0  # stops at the first
        if len(loud) and loud[num_silent]:
            self._num_silent = num_silent
        else:
            self._num_silent += len(loud)
        return self._num_silent >= self._limit
