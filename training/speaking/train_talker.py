"""Stage `talker`: from rows of text and the frames so far to the next frame.

Shapes: B sequences, L rows, T frames, Q groups, N rows of a batch, K frames that also train the predictor.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from training.speaking.clock import Clip, Clock, learning_rate, new_optimizer, set_rate
from training.speaking.corpus import Corpus
from training.speaking.gathering import FIRST, LONGEST, SEED, Beside, Gathered, Gathering
from training.speaking.prompts import TTS_PAD, Layout
from training.speaking.rows import EMPTY_TARGET, Batch, Rows, input_rows
from training.speaking.sizes import Sizes
from training.speaking.stepping import Figures, Stepper
from training.speaking.table import TextTable
from training.speaking.talker import TalkerNet
from training.speaking.text_start import begin, sound_vectors
from training.speaking.weights import Average, load_parts, save_parts

NAME = "talker"
RATE = 1.5e-3
REFRESH_S = 45.0
# Of what is fed back, so that a wrong code is not the end. The pointer also slips by a little.
NOISY_CODES, LOST_FRAMES, SLIPPED, SLIP = 0.05, 0.02, 0.15, 3
RESIDUAL_SHARE = 0.4  # of a batch's rows: frames that also train the code predictor
OTHERS_WEIGHT = 2.0  # of the mean of the other groups, beside the first
LENGTHS = (
    48,
    64,
    80,
    96,
    128,
    160,
    224,
    320,
    LONGEST,
)  # rows of a batch's sequences: few shapes, each recorded


def open_talker(folder: Path, sizes: Sizes, device: torch.device) -> TalkerNet:
    torch.manual_seed(SEED)
    net = TalkerNet(sizes)
    if tensors := load_parts(folder, NAME):
        net.load_state_dict(tensors)
    return net.to(device)


class Examples:
    """What was gathered last, on the device."""

    def __init__(self, sizes: Sizes, table: TextTable, device: torch.device) -> None:
        self._sizes, self._table, self._device = sizes, table, device
        self._random = Random(SEED)
        self.starts: npt.NDArray[np.int64] = np.zeros((0, 5), np.int64)  # as `Rows.batch` takes them
        self._rows: Rows | None = None

    def __len__(self) -> int:
        return len(self.starts)

    def take(self, gathered: Gathered) -> None:
        self.starts = gathered.starts
        text_R = torch.from_numpy(self._table.find(gathered.tokens_R))
        codes_TQ, pad = torch.from_numpy(gathered.codes_TQ), self._table.place(TTS_PAD)
        self._rows = Rows(self._sizes, text_R.to(self._device), codes_TQ.to(self._device), pad)

    def batches(self, rows_a_batch: int) -> Iterator[Batch]:
        """Of like lengths, each of one of LENGTHS and as many sequences as that allows, in random order."""
        assert self._rows is not None, "built"
        length = self.starts[:, 2] + self.starts[:, 4]
        groups: list[tuple[int, npt.NDArray[np.int64]]] = []
        random = np.random.default_rng(self._random.randrange(2**31))
        for shorter, longest in zip((0, *LENGTHS), LENGTHS, strict=False):
            found = random.permutation(np.flatnonzero((length > shorter) & (length <= longest)))
            size = max(rows_a_batch // longest, 1)
            for start in range(0, len(found), size):
                group = found[start : start + size]
                more = random.choice(found, size - len(group))  # some twice rather than another shape
                groups.append((longest, np.concatenate([group, more])))
        self._random.shuffle(groups)
        for longest, group in groups:
            yield self._rows.batch(self.starts[group], longest)


def disturb(batch: Batch, sizes: Sizes) -> Batch:
    heard, pointer = batch.heard_BLQ, sizes.pointer
    slip = torch.randint_like(heard[..., pointer], -SLIP, SLIP + 1)
    slips = torch.rand(slip.shape, device=heard.device) < SLIPPED
    slipped = (heard[..., pointer] + slip * slips).clamp(0, sizes.codebook_size - 1)
    slipped = torch.where(heard[..., pointer] < 0, -1, slipped)
    heard = torch.cat([heard[..., :pointer], slipped[..., None]], dim=-1)
    drawn = torch.randint_like(heard, sizes.codebook_size)
    wrong = torch.rand(heard.shape, device=heard.device) < NOISY_CODES
    heard = torch.where(wrong & (heard >= 0), drawn, heard)
    lost = torch.rand(heard.shape[:2], device=heard.device) < LOST_FRAMES
    heard = torch.where(lost[..., None], -1, heard)
    return Batch(batch.text_BL, batch.opening_BL, heard, batch.target_BLQ)


def losses(net: TalkerNet, table: TextTable, batch: Batch) -> tuple[Tensor, Tensor]:
    """Mean cross entropy of the first codes (the end among them), and [Q - 1] of the others. Nothing here
    waits for the device, and shapes depend on the batch's alone."""
    hidden_NH = net.model(input_rows(net, table.rows_VX, batch)).flatten(0, 1)
    target_NQ = batch.target_BLQ.flatten(0, 1)
    first = functional.cross_entropy(
        net.first_logits(hidden_NH).float(), target_NQ[:, 0], ignore_index=EMPTY_TARGET
    )
    has_frame_N = (target_NQ[:, 1] >= 0).float()
    order_N = has_frame_N + torch.rand_like(has_frame_N)
    some_K = order_N.topk(max(int(RESIDUAL_SHARE * len(target_NQ)), 1), sorted=False).indices
    return first, net.residual_losses(hidden_NH.index_select(0, some_K), target_NQ[some_K])


def train_talker(
    folder: Path,
    corpus: Corpus,
    sizes: Sizes,
    table: TextTable,
    layout: Layout,
    clock: Clock,
    rows_a_batch: int,
    *,
    recorded: bool,
) -> None:
    """`recorded`: by CUDA graphs, where there is a GPU."""
    device = table.rows_VX.device
    net = open_talker(folder, sizes, device)
    if not load_parts(folder, NAME):
        pieces = table.rows_VX[
            torch.from_numpy(table.find(np.array(layout.pieces.ids))).long().to(device)
        ].float()
        begin(net.text_projection, pieces, sound_vectors(layout.pieces, sizes.talker.hidden_size).to(device))
    examples = Examples(sizes, table, device)
    optimizer = new_optimizer(list(net.parameters()), betas=(0.9, 0.95), weight_decay=0.05)
    clip, average = Clip(list(net.parameters())), Average(net, 0.998)

    def step(*inputs: Tensor) -> Figures:
        with torch.autocast(device.type, torch.bfloat16, device.type == "cuda", cache_enabled=False):
            first, others = losses(net, table, disturb(Batch(*inputs), sizes))
        norm = clip.step(optimizer, first + OTHERS_WEIGHT * others.mean())
        parts = {"phonemes": others[:4].mean(), "pointer": others[-1]}
        figures = {"next": first, **parts, "norm": norm}
        return {name: figure.detach() for name, figure in figures.items()}

    stepper = Stepper(step, device, recorded=recorded)

    def take(gathered: Gathered) -> None:
        examples.take(gathered)
        clock.say({"stage": "talker", "examples": len(examples), "hours": round(gathered.hours, 2)})

    with Beside(Gathering(layout, corpus)) as gathering:
        gathering.ask(FIRST)
        take(gathering.take())
        gathering.ask()
        asked, asked_s, going = True, clock.elapsed_s, True
        while going:
            for batch in examples.batches(rows_a_batch):
                set_rate(optimizer, learning_rate(clock.fraction, RATE))
                figures = stepper(batch.text_BL, batch.opening_BL, batch.heard_BLQ, batch.target_BLQ)
                average.follow()
                going = clock.tick(figures)
                if clock.time_to_save():
                    save_parts(folder, NAME, average.state())
                if not asked and clock.elapsed_s - asked_s >= REFRESH_S and clock.fraction < 0.9:
                    gathering.ask()
                    asked, asked_s = True, clock.elapsed_s
                if not going or (asked and gathering.ready()):
                    break
            if going and asked and gathering.ready():
                take(gathering.take())
                asked = False
    average.apply()
    save_parts(folder, NAME, dict(net.state_dict()))
