"""A vocoder whose samples spell out its codes, with one withheld sample per stream; and a clock set by
hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vocoder.model import VocoderRow

SAMPLE_RATE = 1000
SAMPLES_PER_FRAME = 80  # 12.5 frames a second
CODES = 64


@dataclass(eq=False)
class FakeState:
    held: Tensor  # the last frame's withheld sample
    frames: int = 0
    num_bytes: int = 4


class FakeVocoder:
    """Frame f of code c gives 80 samples of c / 64; the last sample of a frame is withheld until the next
    frame,
    and dropped at the end. `calls` lists every successful call's (frames, last) rows. Codes in `poison`
    fail."""

    sample_rate = SAMPLE_RATE
    samples_per_frame = SAMPLES_PER_FRAME
    num_code_groups = 2
    codebook_size = CODES
    voices = ("amber", "basalt")

    def __init__(self) -> None:
        self.calls: list[list[tuple[int, bool]]] = []
        self.opened: list[tuple[str, int]] = []
        self.poison: set[int] = set()

    def open(self, voice: str, seed: int) -> FakeState:
        self.opened.append((voice, seed))
        return FakeState(torch.empty(0))

    def capture_graphs(self) -> int:
        return 0

    def decode(self, rows: Sequence[VocoderRow[FakeState]]) -> list[Tensor]:
        if any(self.poison & set(row.codes_KQ[:, 0].tolist()) for row in rows):
            raise RuntimeError("bad codes")
        self.calls.append([(row.codes_KQ.shape[0], row.last) for row in rows])
        return [self._advance(row.state, row.codes_KQ[:, 0]) for row in rows]

    def _advance(self, state: FakeState, codes_K: Tensor) -> Tensor:
        made = (codes_K.float() / CODES).repeat_interleave(SAMPLES_PER_FRAME)
        stream = torch.cat([state.held, made])
        if codes_K.shape[0]:
            state.held, stream = stream[-1:], stream[:-1]
        state.frames += codes_K.shape[0]
        return stream if codes_K.shape[0] else torch.empty(0)


def frames(*codes: int) -> Tensor:
    return torch.tensor([[code, 0] for code in codes], dtype=torch.int64).reshape(-1, 2)


def one_shot(*codes: int) -> Tensor:
    return (torch.tensor(codes).float() / CODES).repeat_interleave(SAMPLES_PER_FRAME)[:-1]


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s
