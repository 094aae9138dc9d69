"""Trains the speaking half in one go, by the clock.

`python -m training.speaking.run all WORK --assets ASSETS --seconds 460` starts the workers of the corpus,
trains
decoder and talker side by side (each on a GPU of its own where there are two), and speaks held-out sentences.
WORK holds what a later call goes on from. ASSETS: `tokenizer.json` and `table.safetensors`. One stage alone:
`decoder`, `talker` or `sample`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from training.speaking.clock import Clock
from training.speaking.corpus import Corpus
from training.speaking.prompts import open_prompts
from training.speaking.sampling import Speaker
from training.speaking.sizes import NANO, TINY, Sizes
from training.speaking.synthesis import Voice, open_sentences
from training.speaking.table import load_table
from training.speaking.train_decoder import open_decoder, train_decoder
from training.speaking.train_talker import open_talker, train_talker
from vocoder.code2wav import Code2Wav

STAGES = ("decoder", "talker")
SAMPLE_S = 25.0
DECODER_HOURS = 4.0
READY_LIMIT_S = 120.0
SAMPLES, TRUE_SAMPLES, TEMPERATURE = 16, 6, 0.5
LOG, SPOKEN = "log.jsonl", "spoken.npz"


@dataclass(frozen=True)
class Plan:
    work: Path
    assets: Path
    corpus: Path
    seconds: float
    sizes: Sizes
    device: torch.device
    workers: int
    batch: int
    rows: int
    hours: float  # of speech before anything is trained
    judged: float | None  # None: see `train_decoder`
    recorded: bool

    @property
    def log(self) -> Path:
        return self.work / LOG

    @property
    def tokenizer(self) -> Path:
        return self.assets / "tokenizer.json"

    @property
    def table(self) -> Path:
        return self.assets / "table.safetensors"


def run_decoder(plan: Plan, end_s: float) -> None:
    corpus = _open_corpus(plan, with_sound=True)
    clock = Clock("decoder", end_s - time.time(), plan.log)
    train_decoder(
        plan.work,
        corpus,
        plan.sizes,
        plan.device,
        clock,
        batch=plan.batch,
        hours=DECODER_HOURS,
        judged=plan.judged,
        recorded=plan.recorded,
    )


def run_talker(plan: Plan, end_s: float) -> None:
    layout, table = open_prompts(plan.tokenizer).layout, load_table(plan.table, plan.device)
    corpus = _open_corpus(plan, with_sound=False)
    clock = Clock("talker", end_s - time.time(), plan.log)
    train_talker(plan.work, corpus, plan.sizes, table, layout, clock, plan.rows, recorded=plan.recorded)


def run_sample(plan: Plan) -> None:
    """`spoken.npz`: texts, what the talker makes of them, and what the decoder makes of the true codes."""
    prompts, table = open_prompts(plan.tokenizer), load_table(plan.table, plan.device)
    decoder = Code2Wav(open_decoder(plan.work, plan.sizes, plan.device))
    net = open_talker(plan.work, plan.sizes, plan.device).eval()
    texts = open_sentences(plan.tokenizer).held_out(SAMPLES)
    lines = [prompts.of(text) for text in texts]
    longest = 2 * max(len(line.rows) for line in lines) + 30
    limit = longest if plan.device.type == "cuda" else 12
    with torch.autocast(plan.device.type, torch.bfloat16, plan.device.type == "cuda"):
        frames = Speaker(net, table).speak(lines, temperature=TEMPERATURE, max_frames=limit)
    arrays = {f"talker{index}": _pcm(decoder, codes) for index, codes in enumerate(frames)}
    voice = Voice()
    for index, text in enumerate(texts[:TRUE_SAMPLES]):
        if (spoken := voice(text, seed=1)) is not None:
            true_TQ = torch.from_numpy(spoken[1]).long()
            true_TQ[:, plan.sizes.pointer] = 0
            arrays[f"decoder{index}"] = _pcm(decoder, true_TQ)
    arrays["texts"] = np.array(texts)
    np.savez_compressed(plan.work / SPOKEN, allow_pickle=False, **arrays)
    lengths = [len(codes) for codes in frames]
    Clock("sample", 1, plan.log).say({"stage": "sample", "frames": lengths, "limit": limit})


def _pcm(decoder: Code2Wav, codes_TQ: Tensor) -> npt.NDArray[Any]:
    if len(codes_TQ) == 0:
        return np.zeros(0, np.int16)
    return (decoder.decode_whole(codes_TQ.cpu()) * 32767).to(torch.int16).numpy()


def run_all(plan: Plan) -> None:
    end_s = time.time() + plan.seconds - SAMPLE_S
    children = [_worker(plan, index, 0.6 * plan.seconds) for index in range(plan.workers)]
    stages = [_stage(plan, index, end_s) for index in range(len(STAGES))]
    try:
        failed = [stage.args for stage in stages if stage.wait() != 0]
        if failed:
            raise SystemExit(f"failed: {failed}")
    finally:
        for child in [*children, *stages]:
            child.kill()
            child.wait()
    run_sample(plan)


def _open_corpus(plan: Plan, *, with_sound: bool) -> Corpus:
    corpus = Corpus(plan.corpus, with_sound=with_sound)
    corpus.refresh()
    corpus.wait(plan.hours, READY_LIMIT_S)
    return corpus


def _worker(plan: Plan, index: int, seconds: float) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "training.speaking.synthesis", str(plan.corpus)]
    command += ["--worker", str(index), "--workers", str(plan.workers), "--seconds", str(seconds)]
    return subprocess.Popen([*command, "--tokenizer", str(plan.tokenizer)])


def _stage(plan: Plan, index: int, end_s: float) -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        "-m",
        "training.speaking.run",
        STAGES[index],
        *sys.argv[2:],
        "--end",
        str(end_s),
    ]
    if plan.device.type == "cuda":
        command += ["--device", f"cuda:{index % torch.cuda.device_count()}"]
    return subprocess.Popen(command)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stage", choices=("all", *STAGES, "sample"))
    parser.add_argument("work", type=Path)
    parser.add_argument("--assets", type=Path, required=True)
    parser.add_argument("--corpus", type=Path, default=Path("/tmp/corpus"))
    parser.add_argument("--seconds", type=float, default=460.0)
    parser.add_argument("--end", type=float, help="when a stage ends, in seconds since 1970")
    parser.add_argument("--sizes", choices=("nano", "tiny"), default="nano")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=7)
    parser.add_argument("--batch", type=int, default=16, help="crops of a step of the decoder")
    parser.add_argument("--rows", type=int, default=12288, help="rows of a step of the talker")
    parser.add_argument("--hours", type=float, default=0.7)
    parser.add_argument("--judged", type=float, help="share of the decoder's time with discriminators")
    parser.add_argument("--plain", action="store_true", help="no CUDA graphs")
    parser.add_argument("--out", type=Path, help="where what is worth keeping is copied to")
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    given.corpus.mkdir(parents=True, exist_ok=True)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    plan = Plan(
        work=given.work,
        assets=given.assets,
        corpus=given.corpus,
        seconds=given.seconds,
        sizes=NANO if given.sizes == "nano" else TINY,
        device=torch.device(given.device),
        workers=given.workers,
        batch=given.batch,
        rows=given.rows,
        hours=given.hours,
        judged=given.judged,
        recorded=not given.plain,
    )
    end_s = given.end or time.time() + given.seconds
    stages = {
        "all": lambda: run_all(plan),
        "decoder": lambda: run_decoder(plan, end_s),
        "talker": lambda: run_talker(plan, end_s),
        "sample": lambda: run_sample(plan),
    }
    stages[given.stage]()
    if given.out is not None and given.stage == "all":
        for path in (*given.work.glob("*.safetensors"), plan.log, plan.work / SPOKEN):
            shutil.copy(path, given.out)
        print(json.dumps(sorted(path.name for path in given.out.iterdir())))


if __name__ == "__main__":
    main()
