"""Batches of conversations with their pictures, made by worker processes ahead of the device.

P pictures, B rows, L tokens of a row, C cells of a picture, T turns.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from training.seeing.conversations import (
    IGNORED,
    MAX_TURNS,
    ROW_LENGTH,
    Grid,
    Row,
    Words,
    single,
    talk,
    talk_of_else,
)
from training.seeing.layout import Tokens, lay_out
from training.seeing.questions import ASKED, TASKS, Exchange, ask, ask_about_two, ask_task, can_ask
from training.seeing.scenes import Kind, Painter, Picture, Scene
from training.seeing.sprites import Sprites
from training.seeing.vocabulary import Split, dictionary

# Rows and columns of tokens: areas between the smallest and the largest picture that preprocessing makes.
GRIDS: tuple[Grid, ...] = (
    *((8, 8), (9, 9), (10, 10), (7, 9), (9, 7), (8, 10), (10, 8), (7, 11), (11, 7)),
    *((6, 12), (5, 14), (4, 16), (12, 6), (9, 11), (8, 12)),
)
SMALL_GRIDS: tuple[Grid, ...] = ((8, 8), (7, 9), (9, 7))  # of which two fit into a row
KINDS: tuple[Kind, ...] = ("things",) * 18 + ("number",) + ("word",) * 5 + ("emoji",) * 2 + ("nothing",)
SHARE_OF_TWO = 0.4
TEXT_KINDS = ("number", "word")


class Batch(NamedTuple):
    pixels: Tensor  # uint8 [P, height, width, 3]
    noise: Tensor  # float32 [P]
    labels: Tensor  # int16 [P, C, labels of a cell]
    shown: Tensor  # int32 [P, C]: the token whose embedding a cell is to be, -1: none
    ids: Tensor  # int64 [B, L]
    targets: Tensor  # int64 [B, L]: the next token where it is part of an answer, else IGNORED
    turns: Tensor  # uint8 [B, L]: which turn a target belongs to, from 1
    said: Tensor  # int64: where among the B x L places there are targets, ascending
    tasks: Tensor  # int8 [B, T]: index into ASKED, or -1


@dataclass(frozen=True)
class DataConfig:
    checkpoint: Path
    fonts: Path
    batch: int
    seed: int
    length: int = ROW_LENGTH


class _Drawing:
    """What a process needs to make batches, opened where it is used."""

    def __init__(self, config: DataConfig, split: Split) -> None:
        self.words = Words(config.checkpoint)
        self.painter = Painter(Sprites(config.fonts), dictionary(self.words.tokenizer), split)


class Training(IterableDataset[Batch]):
    """Without end; worker w's n-th batch depends on the seed, w and n alone."""

    def __init__(self, config: DataConfig) -> None:
        super().__init__()
        self._config = config

    def __iter__(self) -> Iterator[Batch]:
        info = get_worker_info()
        drawing = _Drawing(self._config, "train")
        rng = random.Random(f"{self._config.seed} {0 if info is None else info.id}")
        while True:
            two = rng.random() < SHARE_OF_TWO
            grid = rng.choice(SMALL_GRIDS if two else GRIDS)
            yield self._batch(drawing, grid, 2 if two else 1, rng)

    def _batch(self, drawing: _Drawing, grid: Grid, pictures: int, rng: random.Random) -> Batch:
        drawn: list[Picture] = []
        rows: list[Row] = []
        for _ in range(self._config.batch):
            kinds = [rng.choice(KINDS) for _ in range(pictures)]
            if grid[0] <= 6 and rng.random() < 0.5:
                kinds = ["word" if rng.random() < 0.7 else "number"] * pictures  # flat pictures hold text
            if pictures == 2 and rng.random() < 0.3:
                kinds[1] = kinds[0]
            new = [drawing.painter.draw(kind, *grid, rng) for kind in kinds]
            drawn += new
            scenes = [picture.scene for picture in new]
            rows.append(talk(drawing.words, scenes, grid, rng, self._config.length))
        return pack(drawn, rows, drawing.words, self._config.length)


class HeldOut(IterableDataset[Batch]):
    """One question a row, `rows` of each task: pictures, numbers and words that training never draws."""

    def __init__(self, config: DataConfig, rows: int) -> None:
        super().__init__()
        self._config = config
        tasks = TASKS if Sprites(config.fonts).has_emoji else [task for task in TASKS if task != "emoji"]
        self._chunks = [(task, start) for task in tasks for start in range(0, rows, config.batch)]
        self._rows = rows

    def __iter__(self) -> Iterator[Batch]:
        info = get_worker_info()
        mine = self._chunks if info is None else self._chunks[info.id :: info.num_workers]
        drawing = _Drawing(self._config, "held_out") if mine else None
        for task, start in mine:
            assert drawing is not None
            rng = random.Random(f"held out {self._config.seed} {task} {start}")
            count = min(self._config.batch, self._rows - start)
            yield self._batch(drawing, task, count, rng)

    def _batch(self, drawing: _Drawing, task: str, count: int, rng: random.Random) -> Batch:
        two = task == "two_pictures"
        grid = rng.choice(SMALL_GRIDS if two else GRIDS)
        drawn: list[Picture] = []
        rows: list[Row] = []
        while len(rows) < count:
            kinds = [kind for kind in KINDS if two or task == "talk" or can_ask(kind, task)]
            new = [drawing.painter.draw(rng.choice(kinds), *grid, rng) for _ in range(2 if two else 1)]
            exchange = self._question([picture.scene for picture in new], task, rng)
            if exchange is None:
                continue
            drawn += new
            if task == "talk":
                row = single(drawing.words, talk_of_else("held_out", rng), grid, after=exchange)
            else:
                row = single(drawing.words, exchange, grid, len(new))
            rows.append(row)
        return pack(drawn, rows, drawing.words, self._config.length)

    def _question(self, scenes: list[Scene], task: str, rng: random.Random) -> Exchange | None:
        if len(scenes) == 2:
            return ask_about_two(scenes[0], scenes[1], rng)
        return ask(scenes[0], rng) if task == "talk" else ask_task(scenes[0], task, rng)


def pack(pictures: list[Picture], rows: list[Row], words: Words, length: int) -> Batch:
    count = len(rows)
    ids, targets = np.zeros((count, length), np.int64), np.full((count, length), IGNORED, np.int64)
    turns = np.zeros((count, length), np.uint8)
    tasks = np.full((count, MAX_TURNS), -1, np.int8)
    for index, row in enumerate(rows):
        used = len(row.ids)
        ids[index, :used] = row.ids
        answered = np.array(row.answered[1:])
        turns[index, : used - 1] = answered
        targets[index, : used - 1] = np.where(answered > 0, row.ids[1:], IGNORED)
        tasks[index, : len(row.asked)] = [ASKED.index(asked) for asked in row.asked]
    return Batch(
        pixels=torch.from_numpy(np.stack([picture.pixels for picture in pictures])),
        noise=torch.tensor([picture.noise for picture in pictures], dtype=torch.float32),
        labels=torch.from_numpy(np.stack([picture.labels for picture in pictures])),
        shown=torch.from_numpy(
            np.stack([shown_tokens(picture, rows[0].grid, words) for picture in pictures])
        ),
        ids=torch.from_numpy(ids),
        targets=torch.from_numpy(targets),
        turns=torch.from_numpy(turns),
        said=torch.from_numpy(np.flatnonzero(targets != IGNORED)),
        tasks=torch.from_numpy(tasks),
    )


def shown_tokens(picture: Picture, grid: Grid, words: Words) -> Tokens:
    """[C]: the token whose embedding a cell is to be, -1: none."""
    phrases = [
        (phrase.cell, tuple(token for name in phrase.names for token in words.phrase(name)))
        for phrase in picture.phrases
    ]
    return lay_out(phrases, grid[0] * grid[1], grid[1])


def load(data: IterableDataset[Batch], workers: int, *, pin: bool) -> DataLoader[Batch]:
    """Batches in the order of the workers, so that a run is repeatable."""
    ahead = 3 if workers else None
    return DataLoader(
        data,
        batch_size=None,
        num_workers=workers,
        prefetch_factor=ahead,
        pin_memory=pin,
        worker_init_fn=_one_thread,
    )


def _one_thread(_: int) -> None:
    """Pictures can wait for the process that keeps the device busy."""
    torch.set_num_threads(1)
    os.nice(5)
