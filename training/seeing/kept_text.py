"""Rows of plain text on which an adapted language model is held to what it said before."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from training.seeing.conversations import DEFAULT_SYSTEM, ROW_LENGTH, Words


def text_rows(words: Words, directory: Path, batch: int, seed: int) -> Iterator[Tensor]:
    """int64 [batch, L] without end, of the documents under `directory`: half of them as a chat's turns."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(directory.rglob("*.md"))]
    ids = [token for text in texts for token in words.encode(text)]
    assert len(ids) > ROW_LENGTH, f"too little text under {directory}"
    rng = random.Random(seed)
    opening = [*words.opened("system"), *words.encode(DEFAULT_SYSTEM), *words.closed(), *words.opened("user")]
    turn = [*words.closed(), *words.opened("assistant")]
    while True:
        rows = []
        for _ in range(batch):
            start = rng.randrange(len(ids) - ROW_LENGTH)
            row = ids[start : start + ROW_LENGTH]
            if rng.random() < 0.5:
                row = [*opening, *row[: rng.randrange(4, 40)], *turn, *row[40:]]
            rows.append(row[:ROW_LENGTH] + row[: max(0, ROW_LENGTH - len(row))])
        yield torch.tensor(rows)
