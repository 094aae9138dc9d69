"""Stage `talker`: from rows of text and the frames so far to the next frame.

Shapes: B sequences, L rows, T frames, Q groups.
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

from training.speaking.clock import Clip, Clock, learning_rate, set_rate
from training.speaking.corpus import Corpus, Utterance
from training.speaking.prompts import TTS_PAD, VERBATIM, Prompts, user_turn
from training.speaking.rows import Batch, Rows, input_rows
from training.speaking.sizes import Sizes
from training.speaking.table import TextTable
from training.speaking.talker import TalkerNet
from training.speaking.weights import Average, load_parts, save_parts

NAME = "talker"
RATE = 1.5e-3
SEED = 20260102
REFRESH_S = 45.0
NOISY_CODES, LOST_FRAMES = 0.06, 0.02  # of what is fed back, so that a wrong code is not the end
RESIDUAL_FRAMES = 6144  # of a step, that also train the code predictor
JOINED = (1, 1, 1, 2, 3)  # utterances of an example


def open_talker(folder: Path, sizes: Sizes, device: torch.device) -> TalkerNet:
    torch.manual_seed(SEED)
    net = TalkerNet(sizes)
    if tensors := load_parts(folder, NAME):
        net.load_state_dict(tensors)
    return net.to(device)


class Examples:
    """Utterances and their codes, joined into examples anew each time."""

    def __init__(self, sizes: Sizes, table: TextTable, prompts: Prompts, device: torch.device) -> None:
        self._sizes, self._table, self._prompts, self._device = sizes, table, prompts, device
        self._texts: list[tuple[list[int], list[int]]] = []  # ids of the text, at a start and behind another
        self._spans: list[tuple[int, int]] = []  # first frame, number of frames
        self._codes: list[Tensor] = []
        self._num_frames = 0
        self._verbatim = prompts.ids(VERBATIM)
        self._random = Random(SEED)
        self.starts: npt.NDArray[np.int64] = np.zeros((0, 5), np.int64)  # as `Rows.batch` takes them
        self._rows: Rows | None = None

    def __len__(self) -> int:
        return len(self.starts)

    def add(self, utterances: list[Utterance], codes: list[Tensor]) -> None:
        first = self._prompts.many_ids([one.text for one in utterances])
        later = self._prompts.many_ids([f" {one.text}" for one in utterances])
        for ids, more, codes_TQ in zip(first, later, codes, strict=True):
            self._texts.append((ids, more))
            self._spans.append((self._num_frames, len(codes_TQ)))
            self._codes.append(codes_TQ)
            self._num_frames += len(codes_TQ)

    def build(self) -> None:
        """Neighbours are joined; every call joins other ones and draws other users' turns."""
        random, count, rows, starts, at = self._random, len(self._texts), [], [], 0
        others = [ids for ids, _ in random.choices(self._texts, k=min(count, 500))]
        shift = random.randrange(3)
        index = shift
        while index < count:
            size = min(random.choice(JOINED), count - index)
            text = list(self._texts[index][0])
            for joined in range(index + 1, index + size):
                text += self._texts[joined][1]
            frames = sum(self._spans[joined][1] for joined in range(index, index + size))
            line = self._prompts.line(user_turn(random, self._verbatim, text, others), text)
            found = self._table.find(line.rows)
            if found is not None:
                rows.append(found)
                starts.append((at, len(found), line.prompt, self._spans[index][0], frames))
                at += len(found)
            index += size
        self.starts = np.array(starts, np.int64)
        text_R = torch.from_numpy(np.concatenate(rows)).to(self._device)
        self._rows = Rows(
            self._sizes, text_R, torch.cat(self._codes).to(self._device), self._table.place(TTS_PAD)
        )

    def batches(self, rows_a_batch: int) -> Iterator[Batch]:
        """Of like lengths, in random order."""
        assert self._rows is not None, "built"
        rows = self._rows
        length = self.starts[:, 2] + self.starts[:, 4]
        noise = np.random.default_rng(self._random.randrange(2**31)).uniform(0.9, 1.1, len(length))
        order = np.argsort(length * noise)
        groups: list[list[int]] = []
        group: list[int] = []
        longest = 0
        for index in order:
            longest = max(longest, int(length[index]))
            if group and longest * (len(group) + 1) > rows_a_batch:
                groups.append(group)
                group, longest = [], int(length[index])
            group.append(int(index))
        groups.append(group)
        self._random.shuffle(groups)
        for group in groups:
            yield rows.batch(self.starts[group])


def disturb(batch: Batch, sizes: Sizes) -> Batch:
    heard = batch.heard_BLQ
    drawn = torch.randint_like(heard, sizes.codebook_size)
    wrong = torch.rand(heard.shape, device=heard.device) < NOISY_CODES
    heard = torch.where(wrong & (heard >= 0), drawn, heard)
    lost = torch.rand(heard.shape[:2], device=heard.device) < LOST_FRAMES
    heard = torch.where(lost[..., None], -1, heard)
    return Batch(batch.text_BL, batch.opening_BL, heard, batch.target_BLQ)


def losses(net: TalkerNet, table: TextTable, batch: Batch) -> tuple[Tensor, Tensor]:
    """Mean cross entropy of the first codes (the end among them), and [Q - 1] of the others."""
    hidden_BLH = net.model(input_rows(net, table.rows_VX, table.nothing, batch))
    said = (batch.target_BLQ[..., 0] >= 0).flatten().nonzero()[:, 0]
    hidden_NH, target_NQ = hidden_BLH.flatten(0, 1)[said], batch.target_BLQ.flatten(0, 1)[said]
    first = functional.cross_entropy(net.first_logits(hidden_NH).float(), target_NQ[:, 0])
    some = torch.randperm(len(said), device=said.device)[:RESIDUAL_FRAMES]
    some = some[target_NQ[some, 1] >= 0]
    return first, net.residual_losses(hidden_NH[some], target_NQ[some])


def train_talker(
    folder: Path,
    corpus: Corpus,
    sizes: Sizes,
    table: TextTable,
    prompts: Prompts,
    clock: Clock,
    rows_a_batch: int,
) -> None:
    device = table.rows_VX.device
    net = open_talker(folder, sizes, device)
    examples = Examples(sizes, table, prompts, device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.05)
    clip, average = Clip(list(net.parameters())), Average(net, 0.998)
    refreshed_s, going = -REFRESH_S, True
    while going:
        if not len(examples) or (clock.elapsed_s - refreshed_s >= REFRESH_S and clock.fraction < 0.9):
            refreshed_s = clock.elapsed_s
            fresh = corpus.refresh() if len(examples) else corpus.utterances
            examples.add(fresh, [torch.from_numpy(corpus.codes(one)) for one in fresh])
            examples.build()
            clock.say({"stage": "talker", "examples": len(examples), "hours": round(corpus.hours, 2)})
        for batch in examples.batches(rows_a_batch):
            set_rate(optimizer, learning_rate(clock.fraction, RATE))
            with torch.autocast(device.type, torch.bfloat16):
                first, others = losses(net, table, disturb(batch, sizes))
            norm = clip.step(optimizer, first + others.mean())
            average.follow()
            figures = {"first": first, "second": others[0], "last": others[-1], "norm": norm}
            going = clock.tick(figures)
            if clock.time_to_save():
                save_parts(folder, NAME, average.state())
            if not going or (clock.elapsed_s - refreshed_s >= REFRESH_S and clock.fraction < 0.9):
                break
    average.apply()
    save_parts(folder, NAME, dict(net.state_dict()))
