"""Mel frames of several sounds cut into chunks of one length, and what is left of them after convolutions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Ints = npt.NDArray[np.int64]


def chunk_lengths(num_frames: Sequence[int], chunk: int) -> Ints:
    """Frames of every chunk of every sound, in order: the last one of a sound may be shorter."""
    lengths: list[int] = []
    for frames in num_frames:
        assert frames > 0, "an empty sound"
        lengths += [chunk] * (frames // chunk)
        if frames % chunk:
            lengths.append(frames % chunk)
    return np.array(lengths, dtype=np.int64)


@dataclass(frozen=True)
class Stack:
    """Chunks that are convolved together, all as long as `length`: what is shorter ends in zeros."""

    sounds: tuple[int, ...]  # their numbers in the batch
    frames_C: Ints  # of every chunk of these sounds, in order
    length: int

    @property
    def num_frames(self) -> int:
        return len(self.frames_C) * self.length


def stack_of(sounds: Sequence[int], lengths: Sequence[int], chunk: int, *, fill: bool = False) -> Stack:
    """Of the sounds with these numbers; `lengths` of all of the batch. As long as the longest chunk is, or
    with `fill` as long as a whole one."""
    frames_C = chunk_lengths([lengths[sound] for sound in sounds], chunk)
    return Stack(tuple(sounds), frames_C, chunk if fill else int(frames_C.max()))


def split_stacks(mel_FM: Tensor, stacks: Sequence[Stack]) -> list[Tensor]:
    """[chunks, mels, length] of each stack, which lie one after another: a view."""
    parts = torch.split(mel_FM, [stack.num_frames for stack in stacks])
    return [
        part.view(len(stack.frames_C), -1, stack.length) for part, stack in zip(parts, stacks, strict=True)
    ]


def write_stack(mel_CML: Tensor, sounds: Sequence[Tensor], chunk: int) -> None:
    """[mels, frames] each, on the stack's device, in order."""
    mel_CML.zero_()
    first = 0
    for mel_MF in sounds:
        whole, rest = divmod(mel_MF.shape[1], chunk)
        if whole:
            chunks_MCL = mel_MF[:, : whole * chunk].reshape(len(mel_MF), whole, chunk)
            mel_CML[first : first + whole] = chunks_MCL.movedim(1, 0)
        if rest:
            mel_CML[first + whole, :, :rest] = mel_MF[:, whole * chunk :]
        first += whole + (rest > 0)
    assert first == len(mel_CML)


def halved(length: Ints) -> Ints:
    """Length after a convolution of kernel 3, stride 2 and padding 1."""
    return (length - 1) // 2 + 1


def first_rows(lengths: Ints, stride: int, device: torch.device) -> Tensor:
    """Row numbers of the first `lengths[i]` rows of every block i of `stride` rows."""
    inside = np.arange(stride) < lengths[:, None]
    return torch.from_numpy(np.flatnonzero(inside)).to(device)
