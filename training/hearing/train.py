"""Trains the ears by the clock: `python -m training.hearing.train WORK --assets ASSETS --seconds 200`.

ASSETS: `tokenizer.json` of the default model and `encoder.safetensors` (`training.hearing.bundle`). Starts
the workers that speak, learns to spell what they say, judges itself on held-out sentences. WORK holds what a
later call goes on from. Shapes: B sounds, S samples, R rows.
"""

from __future__ import annotations

import argparse
import json
import queue
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from model_families.omnistage_nano.ears import NanoEars
from model_families.omnistage_nano.letters import read_letters, spell
from training.hearing.ears import NEW, letter_logits, new_ears, num_rows, trained_tensors
from training.hearing.features import disturb, log_mel, num_frames
from training.hearing.sentences import HEARD_RATE, LEFT_OUT, PLAIN, SHARES, VARIED
from training.hearing.variety import beside, hurried, masked, pace, recorded, throats
from training.speaking.clock import Clip, Clock, learning_rate, set_rate
from training.speaking.corpus import Corpus, Utterance
from training.speaking.judge_words import distance, words_of
from training.speaking.weights import load_parts, save_parts

NAME, LOG, EVALUATION = "hearing", "hearing.jsonl", "hearing.json"
RATE = 1e-3  # of what is new
OLD_SHARE = 0.3  # of that, for Whisper's own layers
REFRESH_S = 20.0
READY_LIMIT_S = 150.0
EDGE_S = 1.0  # of silence before and behind, at most
JUDGED_TOGETHER = 25


@dataclass(frozen=True)
class Plan:
    work: Path
    assets: Path
    corpus: Path
    seconds: float
    workers: int
    ready_s: float  # of speech before anything is trained
    batch_s: float
    rate: float
    old_share: float
    without: list[str]  # voices that it is judged by
    held_out: int  # sentences that it is judged by
    device: torch.device

    @property
    def tokenizer(self) -> Path:
        return self.assets / "tokenizer.json"


@dataclass(frozen=True, eq=False)
class Batch:
    sound_BS: Tensor  # int16
    lengths_B: Tensor
    letters: Tensor  # of all sounds, one behind the other
    counts_B: Tensor

    def to(self, device: torch.device) -> Batch:
        parts = (self.sound_BS, self.lengths_B, self.letters, self.counts_B)
        return Batch(*(part.to(device, non_blocking=True) for part in parts))


def collate(corpus: Corpus, chosen: list[Utterance], random: Random) -> Batch:
    """Each sound with a random silence before and behind it."""
    silences = [[int(random.random() ** 4 * EDGE_S * HEARD_RATE) for _ in range(2)] for _ in chosen]
    lengths = [a + one.num_samples + b for one, (a, b) in zip(chosen, silences, strict=True)]
    sound = np.zeros((len(chosen), max(lengths)), np.int16)
    for row, one, (before, _) in zip(sound, chosen, silences, strict=True):
        row[before : before + one.num_samples] = corpus.sound(one)
    spelled = [spell(one.text) for one in chosen]
    return Batch(
        torch.from_numpy(sound),
        torch.tensor(lengths),
        torch.tensor([letter for letters in spelled for letter in letters]),
        torch.tensor([len(letters) for letters in spelled]),
    )


def grouped(utterances: list[Utterance], batch_s: float, random: Random) -> list[list[Utterance]]:
    """Like lengths together, at most so much sound at once, in random order."""
    order = sorted(utterances, key=lambda one: one.num_samples * random.uniform(0.9, 1.1))
    groups: list[list[Utterance]] = [[]]
    longest = 0
    for one in order:
        longest = max(longest, one.num_samples)
        if groups[-1] and longest * (len(groups[-1]) + 1) > batch_s * HEARD_RATE:
            groups.append([])
            longest = one.num_samples
        groups[-1].append(one)
    random.shuffle(groups)
    return groups


class Feed:
    """Batches without end, made by a thread ahead of the device; takes in what the workers add."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.corpus = Corpus(plan.corpus, HEARD_RATE)
        self.corpus.refresh()
        self.corpus.wait(plan.ready_s / 3600, READY_LIMIT_S)
        self._batches: queue.Queue[Batch] = queue.Queue(8)
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        random, refreshed_s = Random(1), time.monotonic()
        while True:
            for group in grouped(
                [u for u in self.corpus.utterances if u.file < PLAIN], self._plan.batch_s, random
            ):
                self._batches.put(collate(self.corpus, group, random))
                if time.monotonic() - refreshed_s > REFRESH_S:
                    refreshed_s = time.monotonic()
                    if self.corpus.refresh():
                        break

    def __iter__(self) -> Iterator[Batch]:
        while True:
            yield self._batches.get(timeout=READY_LIMIT_S)


def letters_loss(ears: NanoEars, batch: Batch, *, varied: bool) -> Tensor:
    with torch.no_grad():
        mel_BMF, frames_B = _features(batch, varied=varied)
    with torch.autocast(mel_BMF.device.type, torch.bfloat16, enabled=mel_BMF.device.type == "cuda"):
        logits = letter_logits(ears, mel_BMF, frames_B)
    chances_RBL = logits.float().log_softmax(-1).transpose(0, 1)
    rows_B = num_rows(frames_B)
    return functional.ctc_loss(chances_RBL, batch.letters, rows_B, batch.counts_B, zero_infinity=True)


def _features(batch: Batch, *, varied: bool) -> tuple[Tensor, Tensor]:
    sound_BS, lengths_B = batch.sound_BS.float() / 32768, batch.lengths_B
    if not varied:
        return log_mel(sound_BS, lengths_B), num_frames(lengths_B)
    sound_BS, lengths_B = pace(sound_BS, lengths_B)
    sound_BS = disturb(beside(sound_BS, lengths_B), lengths_B)
    mel_BMF = log_mel(recorded(sound_BS, lengths_B), lengths_B, throats(lengths_B))
    mel_BMF, frames_B = hurried(mel_BMF, num_frames(lengths_B))
    return masked(mel_BMF, frames_B), frames_B


def rate_groups(ears: NanoEars, old_share: float = OLD_SHARE) -> list[dict[str, Any]]:
    """What is trained, for an optimizer: Whisper's own layers more slowly than those that are new."""
    trained = [(name, value) for name, value in ears.named_parameters() if value.requires_grad]
    new = {name for name, _ in trained if name.startswith(NEW)}
    return [
        {"params": [value for name, value in trained if (name in new) == is_new], "share": share}
        for is_new, share in ((True, 1.0), (False, old_share))
    ]


def train(plan: Plan, ears: NanoEars, feed: Feed, clock: Clock) -> None:
    parameters = [parameter for parameter in ears.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        rate_groups(ears, plan.old_share), lr=RATE, betas=(0.9, 0.98), weight_decay=0.01
    )
    clip = Clip(parameters)
    ears.train()
    waited_s = 0.0
    batches = iter(feed)
    going = True
    while going:
        before_s = time.monotonic()
        batch = next(batches).to(plan.device)
        waited_s += time.monotonic() - before_s
        set_rate(optimizer, learning_rate(clock.fraction, plan.rate, warm=0.05, bottom=0.02))
        for group in optimizer.param_groups:
            group["lr"] *= group["share"]
        loss = letters_loss(ears, batch, varied=True)
        norm = clip.step(optimizer, loss)
        figures: dict[str, Tensor | float] = {"loss": loss, "norm": norm, "sounds": len(batch.counts_B)}
        going = clock.tick(figures | {"hours": feed.corpus.hours, "waited_s": waited_s})
        if clock.time_to_save():
            save_parts(plan.work, NAME, trained_tensors(ears))
    save_parts(plan.work, NAME, trained_tensors(ears))


@torch.no_grad()
def evaluate(plan: Plan, ears: NanoEars, *, say: int = 12) -> dict[str, float]:
    """Word error rates of held-out sentences: as the package says them, in other voices, and those in
    rooms; of voices that were left out, if any."""
    ears.eval()
    corpus = Corpus(plan.corpus, HEARD_RATE)
    corpus.refresh()
    errors: dict[str, float] = {}
    cases = (("plain", PLAIN, False), ("varied", VARIED, False), ("rooms", VARIED, True))
    for name, file, rooms in (*cases, ("left out", LEFT_OUT, False)):
        chosen = [one for one in corpus.utterances if one.file == file]
        if not chosen:
            continue
        wrong = words = 0
        for start in range(0, len(chosen), JUDGED_TOGETHER):
            some = chosen[start : start + JUDGED_TOGETHER]
            for one, heard in zip(
                some, hear(ears, collate(corpus, some, Random(start)), plan, rooms), strict=True
            ):
                wrong += distance(words_of(one.text), words_of(heard))
                words += len(words_of(one.text))
                if start == 0 and some.index(one) < say:
                    print(f"{name}: {one.text!r} -> {heard!r}", flush=True)
        errors[name] = round(wrong / max(words, 1), 4)
    return errors


def hear(ears: NanoEars, batch: Batch, plan: Plan, rooms: bool) -> list[str]:
    batch = batch.to(plan.device)
    sound_BS = batch.sound_BS.float() / 32768
    if rooms:
        sound_BS = disturb(sound_BS, batch.lengths_B)
    frames_B = num_frames(batch.lengths_B)
    best_BR = letter_logits(ears, log_mel(sound_BS, batch.lengths_B), frames_B).argmax(-1).cpu()
    rows = num_rows(frames_B).tolist()
    return [read_letters(best[:count].tolist()) for best, count in zip(best_BR, rows, strict=True)]


def start_workers(plan: Plan) -> list[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "training.hearing.synthesis", str(plan.corpus)]
    command += ["--tokenizer", str(plan.tokenizer), "--seconds", str(0.75 * plan.seconds)]
    command += ["--without", *plan.without]
    children = [subprocess.Popen([*command, "--held-out", str(plan.held_out)])]
    for index in range(plan.workers):
        children.append(subprocess.Popen([*command, "--worker", str(index), "--workers", str(plan.workers)]))
    return children


def run(plan: Plan, *, speak_only: bool) -> None:
    end_s = time.monotonic() + plan.seconds
    children = start_workers(plan) if plan.workers else []
    try:
        if speak_only:
            for child in children:
                child.wait()
            return
        ears = new_ears(plan.assets / "encoder.safetensors", Tokenizer.from_file(str(plan.tokenizer)))
        if found := load_parts(plan.work, NAME):
            ears.load_state_dict(ears.state_dict() | found)
        ears.to(plan.device)
        feed = Feed(plan)
        train(plan, ears, feed, Clock(NAME, end_s - time.monotonic(), plan.work / LOG))
    finally:
        for child in children:
            child.kill()
            child.wait()
    errors = evaluate(plan, ears)
    (plan.work / EVALUATION).write_text(json.dumps(errors) + "\n")
    print(json.dumps(errors), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("--assets", type=Path, required=True)
    parser.add_argument("--corpus", type=Path, default=Path("/tmp/heard"))
    parser.add_argument(
        "--seconds", type=float, default=200.0, help="of the whole run but for its evaluation"
    )
    parser.add_argument("--workers", type=int, default=6, help="that speak; 0: the corpus is there")
    parser.add_argument("--speak-only", action="store_true", help="only fill the corpus")
    parser.add_argument("--ready-s", type=float, default=1200.0, help="of speech before training begins")
    parser.add_argument("--batch-s", type=float, default=800.0, help="of sound in a step")
    parser.add_argument("--rate", type=float, default=RATE, help="less for smaller steps")
    parser.add_argument(
        "--old-share", type=float, default=OLD_SHARE, help="of that rate, for Whisper's layers"
    )
    parser.add_argument("--without", nargs="*", choices=SHARES, default=[], help="voices to judge by alone")
    parser.add_argument("--held-out", type=int, default=200, help="sentences that it is judged by")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="where what is worth keeping is copied to")
    given = parser.parse_args()
    for folder in (given.work, given.corpus):
        folder.mkdir(parents=True, exist_ok=True)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    plan = Plan(
        work=given.work,
        assets=given.assets,
        corpus=given.corpus,
        seconds=given.seconds,
        workers=given.workers,
        ready_s=given.ready_s,
        batch_s=given.batch_s,
        rate=given.rate,
        old_share=given.old_share,
        without=given.without,
        held_out=given.held_out,
        device=torch.device(given.device),
    )
    run(plan, speak_only=given.speak_only)
    if given.out is not None and not given.speak_only:
        for path in (*given.work.glob(f"{NAME}-*.safetensors"), given.work / LOG, given.work / EVALUATION):
            shutil.copy(path, given.out)


if __name__ == "__main__":
    main()
