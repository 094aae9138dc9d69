"""Batches of rows as the talker sees them, gathered on the device from flat arrays of text and codes.

Shapes: B sequences, L rows, T frames, Q groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from training.speaking.prompts import OPENING
from training.speaking.sizes import Sizes
from training.speaking.talker import TalkerNet

EMPTY_TARGET = -100
OPENING_CODES = ("nothink", "think_bos", "think_eos", "voice", "pad", "bos")


@dataclass(frozen=True, eq=False)
class Batch:
    text_BL: Tensor  # places in the text table
    opening_BL: Tensor  # control codes beside the last rows of the prompt, -1 elsewhere
    heard_BLQ: Tensor  # the frame before, -1 where there is none
    target_BLQ: Tensor  # the frame to draw; the first group of the last one is the end


@dataclass(frozen=True, eq=False)
class Rows:
    sizes: Sizes
    text_R: Tensor  # places in the text table, of all examples
    codes_TQ: Tensor  # of all examples
    pad: int  # place of the pad row

    @cached_property
    def _opening(self) -> Tensor:
        control = self.sizes.control
        return torch.tensor([control[name] for name in OPENING_CODES], device=self.text_R.device)

    def batch(self, starts: npt.NDArray[np.int64], length: int) -> Batch:
        """A row of `starts` is an example: first row of text, rows, of them prompt, first frame, frames. None
        is longer than `length`."""
        device = self.text_R.device
        assert (starts[:, 2] + starts[:, 4]).max() <= length
        row, rows, prompt, code, frames = _sent(torch.from_numpy(starts), device).T[..., None]
        place_L = torch.arange(length, device=device)
        text_BL = self.text_R[(row + place_L).clamp(max=len(self.text_R) - 1)]
        text_BL = torch.where(place_L < rows, text_BL, self.pad).long()
        into = place_L - (prompt - OPENING)
        opening_BL = torch.where(
            (into >= 0) & (into < OPENING), self._opening[into.clamp(0, OPENING - 1)], -1
        )
        frame_BL = place_L - prompt  # the one that is heard
        heard_BLQ = self._frames(code, frame_BL, (frame_BL >= 0) & (frame_BL < frames))
        drawn_BL = frame_BL + 1
        target_BLQ = self._frames(code, drawn_BL, (drawn_BL >= 0) & (drawn_BL < frames))
        target_BLQ = torch.where(target_BLQ < 0, EMPTY_TARGET, target_BLQ)
        ends = drawn_BL == frames
        target_BLQ[..., 0] = torch.where(ends, self.sizes.control["eos"], target_BLQ[..., 0])
        return Batch(text_BL, opening_BL, heard_BLQ, target_BLQ)

    def _frames(self, first: Tensor, at_BL: Tensor, there_BL: Tensor) -> Tensor:
        index_BL = torch.where(there_BL, first + at_BL, 0)
        return torch.where(there_BL[..., None], self.codes_TQ[index_BL].long(), -1)


def _sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Without waiting for what the device is at."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def input_rows(net: TalkerNet, table_VX: Tensor, batch: Batch) -> Tensor:
    """[B, L, H]: what the server's talker hears at each row."""
    projection = net.text_projection
    text_VH = projection(table_VX.to(projection.linear_fc1.weight.dtype))  # of the few pieces there are
    text_BLH = functional.embedding(batch.text_BL, text_VH)
    opening_BLH = net.embed_first(batch.opening_BL.clamp(min=0)) * (batch.opening_BL >= 0)[..., None]
    heard_BLH = net.embed_frames(batch.heard_BLQ.clamp(min=0)) * (batch.heard_BLQ[..., :1] >= 0)
    return text_BLH + (opening_BLH + heard_BLH).to(text_BLH.dtype)
