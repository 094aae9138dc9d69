"""Tower and language model together: the losses of a batch, and which of its answers are right to the
letter."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from training.seeing.batches import Batch
from training.seeing.conversations import IGNORED, Words
from training.seeing.decoder import Decoder
from training.seeing.questions import TASKS
from training.seeing.scenes import LABELS, LETTERS
from training.seeing.tower import TrainedTower


@dataclass(frozen=True)
class Seen:
    answer_loss: Tensor | None
    label_loss: Tensor
    right: Tensor  # float [tasks]: answers right in every token
    asked: Tensor  # float [tasks]


def label_words(words: Words, table: Tensor) -> Tensor:
    """[labels, width]: where each label's phrase lies, from the mean word."""
    mean = table.float().mean(0)
    rows = [torch.zeros_like(mean)]
    for name in LABELS[1:]:
        single = len(name) == 1 and (name in LETTERS or name.isdigit())
        ids = torch.tensor(words.encode(name if single else f" {name}"))
        rows.append(table[ids].float().mean(0) - mean)
    return torch.stack(rows)


class Seeing(nn.Module):
    def __init__(self, tower: TrainedTower, decoder: Decoder, image_token: int) -> None:
        super().__init__()
        self.tower = tower
        self.decoder = decoder
        self.image_token = image_token

    def look(self, batch: Batch) -> Seen:
        """The tower alone."""
        looked = self.tower.look(batch.pixels, batch.noise)
        none = torch.zeros(len(TASKS), device=batch.ids.device)
        return Seen(None, self.tower.label_loss(looked, batch.labels), none, none)

    def answer(self, batch: Batch) -> Seen:
        looked = self.tower.look(batch.pixels, batch.noise)
        embeddings = functional.embedding(batch.ids, self.decoder.words)
        shown = (batch.ids == self.image_token).unsqueeze(2)
        embeddings = embeddings.masked_scatter(shown, looked.tokens.to(embeddings.dtype))
        hidden = self.decoder(embeddings, batch.positions)
        place = batch.targets != IGNORED
        logits = self.decoder.logits(hidden[place])
        targets = batch.targets[place]
        wrong = (logits.detach().argmax(1) != targets).float()
        right, asked = _score(batch, place, wrong)
        loss = functional.cross_entropy(logits, targets)
        return Seen(loss, self.tower.label_loss(looked, batch.labels), right, asked)


def _score(batch: Batch, place: Tensor, wrong: Tensor) -> tuple[Tensor, Tensor]:
    """A task's answers, and those whose every token is the likeliest: what greedy decoding would write."""
    turns = batch.tasks.shape[1]
    row = place.nonzero()[:, 0]
    slot = row * turns + batch.turns[place].long() - 1
    errors = torch.zeros(batch.tasks.numel(), device=wrong.device).index_add_(0, slot, wrong)
    task = batch.tasks.flatten().long()
    there = task >= 0
    right = (errors[there] == 0).float()
    zeros = torch.zeros(len(TASKS), device=wrong.device)
    return zeros.index_add(0, task[there], right), zeros.index_add(0, task[there], torch.ones_like(right))
