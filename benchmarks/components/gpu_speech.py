"""Speed of a talker and a vocoder on one GPU, each alone: a checkpoint folder's shape, through engine and
pool.

python -m benchmarks.components.shape_folder qwen3_omni_30b_a3b /tmp/q3o
python -m benchmarks.components.gpu_speech /tmp/q3o --streams 1 16 64 --frames 101 [--json FILE]

The talker speaks 40 tokens of text that are all there at once. The vocoder decodes chunks of so many rows and
frames. `--trace N` prints the kernels that take longest at N streams. `--device cpu` is for a tiny folder.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from contracts.conversation import Conversation, Message, TextPart
from contracts.media import Prompt
from contracts.messages import Speak
from lm_engine.config import EngineConfig
from lm_engine.memory import allocate_kv
from lm_engine.talker.engine import TalkerEngine
from lm_engine.talker.model import TalkerModel
from lm_engine.talker.runner import TalkerRunner
from model_families.family import Family
from model_families.registry import open_family
from vocoder.model import VocoderModel, VocoderRow

BLOCK_SIZE, CONTEXT = 16, 1024
NUM_TEXT_TOKENS = 40
ROUNDS = 3
QUESTION = Conversation(messages=(Message(role="user", parts=(TextPart("h" * 40),)),))  # 48 rows
CHUNKS = ("1x1", "1x16", "4x4", "16x1", "16x4", "16x16", "32x1", "32x8")  # rows and frames


Vocoder = VocoderModel[Any]


@dataclass(frozen=True)
class TalkerFigure:
    streams: int
    first_frame_ms: float
    frame_ms: float  # of all streams, the first frame among them
    host_cpu_ms: float  # a frame
    audio_s_per_s: float


@dataclass(frozen=True)
class VocoderFigure:
    rows: int
    frames: int
    decode_ms: float
    times_real_time: float


@dataclass
class Figures:
    """What a run that fails in the middle has found until then."""

    talker: list[TalkerFigure] = field(default_factory=list)
    vocoder: list[VocoderFigure] = field(default_factory=list)


def make_engine(model: TalkerModel, num_streams: int) -> tuple[TalkerEngine, TalkerRunner]:
    num_blocks = 1 + num_streams * CONTEXT // BLOCK_SIZE
    decoder = model.config.decoder
    kv = allocate_kv(decoder, num_blocks, BLOCK_SIZE, model.dtype, model.device)
    config = EngineConfig(
        num_blocks=num_blocks,
        context_length=CONTEXT,
        eos_token_ids=(),
        block_size=BLOCK_SIZE,
        max_step_tokens=8192,
        max_sequences=num_streams,
        overlap=True,
        stage="talker",
    )
    runner = TalkerRunner(model, kv, max_sequences=num_streams, max_length=CONTEXT)
    return TalkerEngine(config, model, runner), runner


async def speak(
    engine: TalkerEngine, family: Family, num_streams: int, num_frames: int
) -> tuple[float, int, float]:
    """Seconds until all have their first frame; frames of all; seconds for all."""
    assert family.speech is not None
    prompt = Prompt(family.tokenizer.encode_conversation(QUESTION))
    num_words = min(1000, family.decoder_config.vocab_size)
    rng, started = np.random.default_rng(0), time.perf_counter()
    for index in range(num_streams):
        name = f"stream {index}"
        message = Speak(
            request_id=name,
            prompt=prompt,
            voice=family.speech.voices[0],
            sampling=msgspec.structs.replace(family.speech.sampling, seed=index),
            max_frames=num_frames,
            granted_frames=num_frames,
        )
        engine.add(message)
        hidden = torch.zeros(0, family.decoder_config.hidden_size)
        engine.prompt_ready(name, {"positions": torch.zeros(0, dtype=torch.int64), "hidden": hidden}, True)
        text = torch.from_numpy(rng.integers(0, num_words, NUM_TEXT_TOKENS))
        engine.text_ready(name, {"token_ids": text}, True)
    begun: set[str] = set()
    first_s, total = 0.0, 0
    while engine.has_work():
        events = await engine.step()
        assert not events.messages, events.messages
        for chunk in events.chunks:
            total += len(chunk.tensors["codes"])
            begun.add(chunk.request_id)
            if len(begun) == num_streams and first_s == 0.0:
                first_s = time.perf_counter() - started
    return first_s, total, time.perf_counter() - started


def measure_talker(
    family: Family, model: TalkerModel, options: argparse.Namespace, found: list[TalkerFigure]
) -> None:
    print("streams  first frame ms  ms a frame   host CPU ms a frame   audio-s/s")
    assert family.speech is not None
    frames_per_s = family.speech.sample_rate / family.speech.samples_per_frame
    for num_streams in options.streams:
        engine, runner = make_engine(model, num_streams)
        runner.capture_graphs()
        for _ in range(ROUNDS):
            cpu_s = time.process_time()
            first_s, total, all_s = asyncio.run(speak(engine, family, num_streams, options.frames))
            cpu_s = time.process_time() - cpu_s
        per_frame = 1e3 / options.frames
        rate = total / frames_per_s / all_s
        one = TalkerFigure(num_streams, first_s * 1e3, all_s * per_frame, cpu_s * per_frame, rate)
        found.append(one)
        print(
            f"{num_streams:7}{one.first_frame_ms:16.1f}{one.frame_ms:12.2f}{one.host_cpu_ms:22.2f}"
            f"{one.audio_s_per_s:12.0f}",
            flush=True,
        )
        if num_streams in options.trace:
            with profile(activities=[ProfilerActivity.CUDA]) as trace:
                asyncio.run(speak(engine, family, num_streams, 12))
            print(
                trace.key_averages().table(sort_by="cuda_time_total", row_limit=32, max_name_column_width=60)
            )
        engine.close()


def decode(model: Vocoder, num_rows: int, num_frames: int, rounds: int) -> float:
    """Seconds a decode."""
    states = [model.open(model.voices[0] if model.voices else "", 0) for _ in range(num_rows)]
    codes = torch.randint(0, model.codebook_size, (num_frames, model.num_code_groups))
    for row in states:
        model.decode([VocoderRow(row, codes[:1], last=False)])
    rows = [VocoderRow(state, codes, last=False) for state in states]
    model.decode(rows)
    started = time.perf_counter()
    for _ in range(rounds):
        model.decode(rows)
    return (time.perf_counter() - started) / rounds


def measure_vocoder(model: Vocoder, options: argparse.Namespace, found: list[VocoderFigure]) -> None:
    print("rows frames  ms a decode  x realtime")
    for chunk in options.chunks:
        num_rows, num_frames = (int(part) for part in chunk.split("x"))
        took_s = decode(model, num_rows, num_frames, 10)
        made_s = num_rows * num_frames * model.samples_per_frame / model.sample_rate
        found.append(VocoderFigure(num_rows, num_frames, took_s * 1e3, made_s / took_s))
        print(f"{num_rows:4}{num_frames:7}{took_s * 1e3:13.2f}{made_s / took_s:12.0f}", flush=True)
    if options.trace:
        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            decode(model, 16, 16, 3)
        print(trace.key_averages().table(sort_by="cuda_time_total", row_limit=24, max_name_column_width=60))


def measure(options: argparse.Namespace, found: Figures) -> None:
    device, family = torch.device(options.device), open_family(options.folder)
    place = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"{place}, torch {torch.__version__}")
    started = time.perf_counter()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    vocoder = family.load_vocoder(device, getattr(torch, options.vocoder_dtype))
    num_graphs = vocoder.capture_graphs()
    took_s = time.perf_counter() - started
    print(f"vocoder, {options.vocoder_dtype}: loaded and {num_graphs} graphs in {took_s:.1f} s", flush=True)
    measure_vocoder(vocoder, options, found.vocoder)
    started = time.perf_counter()
    talker = family.load_talker(device, dtype, "auto")
    print(f"talker: loaded in {time.perf_counter() - started:.1f} s", flush=True)
    measure_talker(family, talker, options, found.talker)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--frames", type=int, default=101)
    parser.add_argument("--chunks", nargs="*", default=CHUNKS, metavar="ROWSxFRAMES")
    precisions = ("float32", "bfloat16")
    parser.add_argument("--vocoder-dtype", choices=precisions, default="float32", help="default: as served")
    parser.add_argument("--trace", type=int, nargs="*", default=[])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    found = Figures()
    try:
        measure(options, found)
    finally:
        if options.json is not None:
            options.json.write_text(json.dumps(asdict(found)))


if __name__ == "__main__":
    main()
