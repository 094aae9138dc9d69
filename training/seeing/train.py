"""`python -m training.seeing.train CHECKPOINT OUT`: trains tower and adapter for a given time, evaluates,
leaves all in OUT.

The first share of the time teaches the tower alone what each cell shows; then the language model answers
questions, frozen but for its picture adapter, and the gradient reaches adapter and tower. Stops by itself;
`--resume` takes up another run's OUT; an adapter that it lacks begins as nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from training.seeing.batches import Batch, DataConfig, HeldOut, Training, load
from training.seeing.checkpoints import SCHEME, Progress, restore, save
from training.seeing.conversations import Words
from training.seeing.decoder import Decoder, run_layer
from training.seeing.model import Seeing, Seen
from training.seeing.questions import ASKED, TASKS
from training.seeing.scenes import LABELS
from training.seeing.sprites import SYSTEM_FONTS, Sprites
from training.seeing.tower import CONFIG, TrainedTower, new_tower, run_block

LEAST_RATE = 0.02  # of the peak, at the end
WARM_UP_STEPS = 200
FIRST_SHARE, FIRST_RATE, RATE_ON = 0.3, 1e-3, 2e-4  # of the tower, unless told: see `Run`
LABEL_WEIGHT = 0.3  # of what cells show, beside the answers; it fades


@dataclass(frozen=True)
class TrainConfig:
    checkpoint: Path
    out: Path
    fonts: Path
    seconds: float
    tower_share: float | None  # of the time: the tower alone; None: see `Run`
    batch: int
    workers: int
    rate: float | None  # the tower's, at its highest; None: see `Run`
    adapter_rate: float
    seed: int
    resume: Path | None
    evaluated: int  # rows a task
    compiled: bool
    report_s: float
    save_s: float

    @property
    def device(self) -> torch.device:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    @property
    def data(self) -> DataConfig:
        return DataConfig(self.checkpoint, self.fonts, self.batch, self.seed)


def build(config: TrainConfig) -> tuple[Seeing, Words]:
    torch.manual_seed(config.seed)
    words = Words(config.checkpoint)
    block_forward, layer_forward = run_block, run_layer
    if config.compiled:
        torch._dynamo.config.suppress_errors = True  # slower, never stopped
        block_forward = torch.compile(run_block, dynamic=True)
        layer_forward = torch.compile(run_layer, dynamic=False)
    decoder = Decoder(config.checkpoint, config.dtype, layer_forward=layer_forward)
    tower = TrainedTower(
        new_tower(CONFIG, decoder.words, config.seed),
        len(LABELS),
        config.dtype,
        block_forward,
    )
    return Seeing(tower, decoder, words.image, words.spoken()).to(config.device), words


class Scores(NamedTuple):
    by_task: dict[str, float]
    by_kind: dict[str, float]  # as in ASKED


def shares(names: Sequence[str], right: Tensor, asked: Tensor) -> dict[str, float]:
    pairs = zip(names, right.tolist(), asked.tolist(), strict=True)
    return {name: round(good / count, 4) for name, good, count in pairs if count}


def by_task(right: Tensor, asked: Tensor) -> dict[str, float]:
    """Of counts by ASKED."""
    index = torch.tensor([TASKS.index(name.partition(".")[0]) for name in ASKED])
    sums = (torch.zeros(len(TASKS)).index_add(0, index, counted.cpu()) for counted in (right, asked))
    return shares(TASKS, *sums)


class Run:
    """One run's state: what it trains, for how long, and what it has seen."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self.started = time.monotonic()
        self.model, self.words = build(config)
        before = restore(self.model, config.resume) if config.resume is not None else Progress()
        self.steps, self.pictures, self.seconds_before = before.steps, before.pictures, before.seconds
        # What was taught otherwise, or nothing yet, begins with what tokens are to say.
        goes_on = config.resume is not None and before.scheme == SCHEME
        self.tower_share = (
            config.tower_share if config.tower_share is not None else 0.0 if goes_on else FIRST_SHARE
        )
        rate = config.rate if config.rate is not None else RATE_ON if goes_on else FIRST_RATE
        self.first_step = before.steps
        tower, adapter = (list(part.parameters()) for part in (self.model.tower, self.model.decoder))
        self.rates = (rate, rate, config.adapter_rate)  # at their highest, of the optimizer's groups
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [one for one in tower if one.ndim > 1], "weight_decay": 0.03},
                {"params": [one for one in tower if one.ndim < 2], "weight_decay": 0.0},
                {"params": adapter, "weight_decay": 0.0},
            ],
            lr=rate,
            betas=(0.9, 0.98),
            fused=config.device.type == "cuda",
        )
        self.trained = [*tower, *adapter]
        self.report = Report(self)

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.started

    @property
    def progress(self) -> Progress:
        return Progress(self.steps, self.seconds_before + self.elapsed, self.pictures, SCHEME)

    def train(self) -> None:
        config = self.config
        pinned = config.device.type == "cuda"
        data = replace(config.data, seed=config.seed + self.first_step)  # none of what came before again
        batches = iter(load(Training(data), config.workers, pin=pinned))
        self.training_began = self.elapsed
        saved = self.elapsed
        while self.elapsed < config.seconds:
            waited = time.monotonic()
            batch = to_device(next(batches), config.device)
            waited = time.monotonic() - waited
            self.step(batch, waited)
            if self.elapsed - saved > config.save_s:
                save(self.model, self.progress, config.out)
                saved = self.elapsed
        save(self.model, self.progress, config.out)

    @property
    def share(self) -> float:
        """Of the time for training, how much is over."""
        return min(1.0, (self.elapsed - self.training_began) / (self.config.seconds - self.training_began))

    def step(self, batch: Batch, waited: float) -> None:
        share = self.share
        part = LEAST_RATE + (1 - LEAST_RATE) * 0.5 * (1 + math.cos(math.pi * share))
        part *= min(1.0, (self.steps - self.first_step + 1) / WARM_UP_STEPS)
        for group, highest in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = highest * part
        if share < self.tower_share:
            seen = self.model.look(batch)
            loss = seen.label_loss
        else:
            seen = self.model.answer(batch)
            assert seen.answer_loss is not None
            loss = seen.answer_loss + LABEL_WEIGHT * (1 - share) * seen.label_loss
        loss.backward()  # type: ignore[no-untyped-call]
        clip(self.trained)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.steps += 1
        self.pictures += len(batch.pixels)
        self.report.add(seen, waited)

    @torch.no_grad()
    def evaluate(self) -> Scores:
        """Of held-out pictures, the share of questions answered right to the letter."""
        config = self.config
        self.model.tower.block_forward, self.model.decoder.layer_forward = run_block, run_layer
        right, asked = (torch.zeros(len(ASKED), device=config.device) for _ in range(2))
        workers = min(config.workers, len(TASKS))
        for batch in load(HeldOut(config.data, config.evaluated), workers, pin=False):
            seen = self.model.answer(to_device(batch, config.device))
            right += seen.right
            asked += seen.asked
        return Scores(by_task(right, asked), shares(ASKED, right, asked))


@torch.no_grad()
def clip(parameters: list[nn.Parameter]) -> None:
    """Gradients of a norm of at most one, or zeros where it is not finite. The device is not waited for."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = torch.stack(torch._foreach_norm(gradients)).norm()
    scale = torch.where(norm.isfinite(), (1.0 / (norm + 1e-6)).clamp(max=1.0), torch.zeros_like(norm))
    for gradient in gradients:
        gradient.nan_to_num_(0.0, 0.0, 0.0)
    torch._foreach_mul_(gradients, scale)


class Report:
    """Means since the last line, printed every so many seconds."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._clear()

    def _clear(self) -> None:
        self._since, self._steps = self._run.elapsed, self._run.steps
        self._pictures = self._run.pictures
        self._losses: list[tuple[Tensor, Tensor | None]] = []
        self._waited = 0.0
        self._scores: list[tuple[Tensor, Tensor]] = []

    def add(self, seen: Seen, waited: float) -> None:
        self._losses.append(
            (seen.label_loss.detach(), None if seen.answer_loss is None else seen.answer_loss.detach())
        )
        self._scores.append((seen.right, seen.asked))
        self._waited += waited
        run = self._run
        if run.elapsed - self._since > run.config.report_s:
            self._print()
            self._clear()

    def _print(self) -> None:
        run = self._run
        seconds = run.elapsed - self._since
        labels = sum(label.item() for label, _ in self._losses) / len(self._losses)
        answers = [answer.item() for _, answer in self._losses if answer is not None]
        right = sum(score.cpu() for score, _ in self._scores)
        asked = sum(score.cpu() for _, score in self._scores)
        assert isinstance(right, Tensor)
        assert isinstance(asked, Tensor)
        tasks = " ".join(f"{task}={share:.3f}" for task, share in by_task(right, asked).items())
        print(
            f"{run.elapsed:.0f}s step {run.steps} {(run.pictures - self._pictures) / seconds:.0f} pictures/s"
            f" waited {self._waited / seconds:.0%} label loss {labels:.4f}"
            f" answer loss {sum(answers) / len(answers) if answers else math.nan:.4f} {tasks}",
            flush=True,
        )


def to_device(batch: Batch, device: torch.device) -> Batch:
    return Batch(*(tensor.to(device, non_blocking=True) for tensor in batch))


def main() -> None:
    config = parse()
    missing = Sprites(config.fonts).missing()
    print(f"device {config.device}, missing fonts: {missing or 'none'}", flush=True)
    run = Run(config)
    print(
        f"built after {run.elapsed:.0f} s, {sum(p.numel() for p in run.trained) / 1e6:.2f}M trained",
        flush=True,
    )
    run.train()
    print(f"trained {run.steps} steps, {run.pictures} pictures, {run.elapsed:.0f} s; evaluating", flush=True)
    scores = run.evaluate()
    (config.out / "evaluation.json").write_text(json.dumps(scores.by_task, indent=1) + "\n")
    (config.out / "by_kind.json").write_text(json.dumps(scores.by_kind, indent=1) + "\n")
    print(json.dumps(scores.by_kind))
    print(json.dumps(scores.by_task), f"{run.elapsed:.0f} s", flush=True)


def parse() -> TrainConfig:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--fonts", type=Path, default=SYSTEM_FONTS)
    parser.add_argument("--seconds", type=float, default=470, help="of the whole run but for its evaluation")
    parser.add_argument(
        "--tower-share", type=float, help="of the time: the tower alone; else 0.3, and 0 to go on"
    )
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--workers", type=int, default=13)
    parser.add_argument("--rate", type=float, help="the tower's; else 1e-3, and 2e-4 to go on")
    parser.add_argument("--adapter-rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--evaluated", type=int, default=512)
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--report-s", type=float, default=20)
    parser.add_argument("--save-s", type=float, default=60)
    return TrainConfig(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()
