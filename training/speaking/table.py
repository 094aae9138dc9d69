"""The language model's text embeddings as training carries them: the rows it needs, in eight bits as
published."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file
from torch import Tensor

from training.speaking.prompts import COPIED, NOTHING

GROUP = 32


class TextTable:
    """`rows_VX` bfloat16 on the device; its last row is zeros."""

    def __init__(self, ids: Tensor, rows_VX: Tensor, device: torch.device) -> None:
        zero = torch.zeros(1, rows_VX.shape[1])
        self.rows_VX = torch.cat([rows_VX, zero]).to(device, torch.bfloat16)
        self.nothing = len(rows_VX)
        self._at = np.full(int(max(int(ids.max()), *COPIED)) + 1, -1, np.int32)
        self._at[ids.numpy()] = np.arange(len(ids))
        for token, source in COPIED.items():
            self._at[token] = self._at[source]

    def find(self, ids: npt.NDArray[np.integer]) -> npt.NDArray[np.int32] | None:
        """Places of the tokens' rows; None when one is not in the table."""
        if ids.max(initial=0) >= len(self._at):
            return None
        at = np.where(ids == NOTHING, self.nothing, self._at[np.maximum(ids, 0)])
        return None if (at < 0).any() else at

    def place(self, token: int) -> int:
        found = self.find(np.array([token], np.int32))
        assert found is not None, f"the table has no row of token {token}"
        return int(found[0])


def load_table(path: Path, device: torch.device) -> TextTable:
    tensors = load_file(path)
    scales = tensors["scales"].float().repeat_interleave(GROUP, dim=1)
    return TextTable(tensors["ids"], tensors["rows"].float() * scales, device)
