"""Tower and language model together: the losses of a batch, and which of its answers are right to the
letter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from training.seeing.batches import Batch
from training.seeing.decoder import Decoder
from training.seeing.questions import ASKED
from training.seeing.tower import Looked, TrainedTower


@dataclass(frozen=True)
class Seen:
    answer_loss: Tensor | None
    label_loss: Tensor
    right: Tensor  # float [ASKED]: answers right in every token
    asked: Tensor  # float [ASKED]


class Seeing(nn.Module):
    def __init__(
        self, tower: TrainedTower, decoder: Decoder, image_token: int, spoken: Sequence[int]
    ) -> None:
        """`spoken`: every token that a picture's may be taught to be."""
        super().__init__()
        place_of_token = torch.full((len(decoder.words),), -1)
        place_of_token[list(spoken)] = torch.arange(len(spoken))
        self.register_buffer("spoken", torch.tensor(spoken), persistent=False)
        self.register_buffer("place_of_token", place_of_token, persistent=False)
        self.spoken: Tensor
        self.place_of_token: Tensor
        self.tower = tower
        self.decoder = decoder
        self.image_token = image_token

    def look(self, batch: Batch) -> Seen:
        """The tower alone."""
        looked = self.tower.look(batch.pixels, batch.noise)
        none = torch.zeros(len(ASKED), device=batch.ids.device)
        return Seen(None, self._label_loss(looked, batch), none, none)

    def answer(self, batch: Batch) -> Seen:
        looked = self.tower.look(batch.pixels, batch.noise)
        embeddings = functional.embedding(batch.ids, self.decoder.words)
        shown = batch.ids == self.image_token
        embeddings = embeddings.masked_scatter(shown.unsqueeze(2), looked.tokens.to(embeddings.dtype))
        hidden = self.decoder(embeddings, one_per_token(batch.ids), shown.cumsum(1) > 0)
        logits = self.decoder.logits(hidden.flatten(0, 1)[batch.said])
        targets = batch.targets.flatten()[batch.said]
        wrong = (logits.detach().argmax(1) != targets).float()
        right, asked = _score(batch, wrong)
        loss = functional.cross_entropy(logits, targets)
        return Seen(loss, self._label_loss(looked, batch), right, asked)

    def _label_loss(self, looked: Looked, batch: Batch) -> Tensor:
        which = functional.embedding(batch.shown.clamp(min=0), self.place_of_token.unsqueeze(1)).squeeze(2)
        which = which.masked_fill(batch.shown < 0, -1)
        spoken = functional.embedding(self.spoken, self.decoder.words)
        return self.tower.label_loss(looked, batch.labels, spoken, which)


def one_per_token(ids: Tensor) -> Tensor:
    """[B, L] → int [1, 3, L]: a picture's tokens have positions like a text's."""
    return torch.arange(ids.shape[1], device=ids.device).expand(1, 3, -1)


def _score(batch: Batch, wrong: Tensor) -> tuple[Tensor, Tensor]:
    """A task's answers, and those whose every token is the likeliest: what greedy decoding would write."""
    turns, length = batch.tasks.shape[1], batch.ids.shape[1]
    slot = batch.said // length * turns + batch.turns.flatten()[batch.said].long() - 1
    errors = torch.zeros(batch.tasks.numel(), device=wrong.device).index_add_(0, slot, wrong)
    task = batch.tasks.flatten().long()
    there = (task >= 0).float()
    right = (errors == 0).float() * there
    zeros, task = torch.zeros(len(ASKED), device=wrong.device), task.clamp(min=0)
    return zeros.index_add(0, task, right), zeros.index_add(0, task, there)
