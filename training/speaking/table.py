"""The language model's text embeddings as training carries them: the rows it needs, in eight bits as
published."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file
from torch import Tensor

from training.speaking.prompts import COPIED

GROUP = 32


class TextTable:
    """`rows_VX` bfloat16 on the device."""

    def __init__(self, ids: Tensor, rows_VX: Tensor, device: torch.device) -> None:
        self.rows_VX = rows_VX.to(device, torch.bfloat16)
        self._at = np.full(int(max(int(ids.max()), *COPIED)) + 1, -1, np.int32)
        self._at[ids.numpy()] = np.arange(len(ids))
        for token, source in COPIED.items():
            self._at[token] = self._at[source]

    def find(self, ids: npt.NDArray[np.integer]) -> npt.NDArray[np.int32]:
        """Places of the tokens' rows."""
        at: npt.NDArray[np.int32] = self._at[ids]
        assert (at >= 0).all(), f"the table has no rows of {ids[at < 0]}"
        return at

    def place(self, token: int) -> int:
        return int(self.find(np.array([token], np.int32))[0])


def load_table(path: Path, device: torch.device) -> TextTable:
    tensors = load_file(path)
    scales = tensors["scales"].float().repeat_interleave(GROUP, dim=1)
    return TextTable(tensors["ids"], tensors["rows"].float() * scales, device)
