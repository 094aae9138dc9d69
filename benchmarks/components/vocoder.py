"""Samples per second of code2wav on one core: our stream against transformers, in one run on the same
weights.

    python -m benchmarks.components.vocoder [--rounds 5] [--frames 96] [--shapes tiny,middle]

Seeded random weights. `error` is the largest distance to transformers' decode in one piece; `missing`
counts the
samples that a way of decoding in chunks loses against it. The floor is the time of the same multiply-adds
at the
rate of a large float32 matmul on that core, measured in the same run; x realtime is at 24 kHz.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeCode2WavConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav

from model_families.qwen3_omni_moe.vocoder import SAMPLE_RATE, load_vocoder
from vocoder.code2wav import Code2Wav
from vocoder.model import VocoderRow

PUBLISHED_RATES = {"upsample_rates": [8, 5, 4, 3], "upsampling_ratios": [2, 2]}
SHAPES = {
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "decoder_dim": 96,
    },
    "middle": {
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "decoder_dim": 384,
    },
}
STREAM_CHUNKS = (1, 4, 16)
NUM_STREAMS = 8
CHUNKED = {"chunk_size": 25, "left_context_size": 25}


@dataclass(frozen=True)
class Contestant:
    """`decode` gives the PCM of every stream it decodes, each of all frames."""

    name: str
    decode: Callable[[], list[Tensor]]


def build(fields: dict[str, object], folder: Path) -> tuple[Qwen3OmniMoeCode2Wav, Code2Wav]:
    torch.manual_seed(0)
    reference = Qwen3OmniMoeCode2Wav(Qwen3OmniMoeCode2WavConfig(**fields)).eval()
    with torch.no_grad():
        for tensor in reference.parameters():
            scale = 0.7 * tensor[0].numel() ** -0.5 if tensor.dim() > 1 else 0.1
            tensor.copy_(torch.randn(tensor.shape) * scale)
        for tensor in reference.decoder[-1].parameters():
            tensor.mul_(0.05)
    tensors = {f"code2wav.{name}": tensor.contiguous() for name, tensor in reference.state_dict().items()}
    save_file(tensors, str(folder / "model.safetensors"))
    (folder / "config.json").write_text(json.dumps({"code2wav_config": fields}))
    return reference, load_vocoder(folder, torch.device("cpu"), torch.float32)


def stream(vocoder: Code2Wav, codes_KQ: Tensor, chunk: int, num_streams: int) -> list[Tensor]:
    states = [vocoder.open() for _ in range(num_streams)]
    parts = torch.split(codes_KQ, chunk)
    pcm: list[list[Tensor]] = [[] for _ in states]
    for index, part in enumerate(parts):
        rows = [VocoderRow(state, part, index == len(parts) - 1) for state in states]
        for made, samples in zip(pcm, vocoder.decode(rows), strict=True):
            made.append(samples)
    return [torch.cat(made) for made in pcm]


def contestants(reference: Qwen3OmniMoeCode2Wav, ours: Code2Wav, codes_KQ: Tensor) -> list[Contestant]:
    codes_1QK = codes_KQ.T[None]

    @torch.inference_mode()
    def whole() -> list[Tensor]:
        return [reference(codes_1QK)[0, 0]]

    @torch.inference_mode()
    def chunked() -> list[Tensor]:
        return [reference.chunked_decode(codes_1QK, **CHUNKED)[0, 0]]

    def ours_streaming(chunk: int, num_streams: int) -> Contestant:
        name = f"ours, {num_streams} stream{'s' * (num_streams > 1)} by {chunk}"
        return Contestant(name, lambda: stream(ours, codes_KQ, chunk, num_streams))

    return [
        Contestant("transformers, one piece", whole),
        Contestant("transformers, chunked_decode 25 + 25", chunked),
        Contestant("ours, one piece", lambda: [ours.decode_whole(codes_KQ)]),
        *(ours_streaming(chunk, 1) for chunk in STREAM_CHUNKS),
        ours_streaming(4, NUM_STREAMS),
    ]


def measure(rivals: list[Contestant], rounds: int) -> dict[str, float]:
    """Median CPU seconds of each, taking turns so that other load meets all of them alike."""
    taken: dict[str, list[float]] = {rival.name: [] for rival in rivals}
    for _ in range(rounds):
        for rival in rivals:
            start = time.process_time()
            rival.decode()
            taken[rival.name].append(time.process_time() - start)
    return {name: statistics.median(times) for name, times in taken.items()}


def matmul_flops_per_s(size: int = 768) -> float:
    a, b = torch.randn(size, size), torch.randn(size, size)
    best = float("inf")
    for _ in range(20):
        start = time.process_time()
        a @ b
        best = min(best, time.process_time() - start)
    return 2 * size**3 / best


def count_flops(decode: Callable[[], list[Tensor]]) -> int:
    counter = FlopCounterMode(display=False)
    with counter:
        decode()
    return int(counter.get_total_flops())


def report(shape: str, rounds: int, num_frames: int, folder: Path) -> None:
    reference, ours = build({**SHAPES[shape], **PUBLISHED_RATES}, folder)
    generator = torch.Generator().manual_seed(1)
    codes_KQ = torch.randint(0, ours.codebook_size, (num_frames, ours.num_code_groups), generator=generator)
    rivals = contestants(reference, ours, codes_KQ)
    wanted = rivals[0].decode()[0]
    taken = measure(rivals, rounds)
    flops = count_flops(rivals[0].decode)
    for rival in rivals:
        made = rival.decode()
        samples_per_s = wanted.numel() * len(made) / taken[rival.name]
        error = "-" if made[0].shape != wanted.shape else f"{(made[0] - wanted).abs().max():.0e}"
        print(
            f"| {shape} | {rival.name} | {samples_per_s:,.0f} | {samples_per_s / SAMPLE_RATE:.2f} |"
            f" {error} | {wanted.numel() - made[0].numel()} |"
        )
    floor = wanted.numel() / (flops / matmul_flops_per_s())
    print(f"| {shape} | floor ({flops / 1e9:.1f} GFLOP) | {floor:,.0f} | {floor / SAMPLE_RATE:.2f} | | |")


def processor_name() -> str:
    with open("/proc/cpuinfo") as cpuinfo:
        names = [line.split(":", 1)[1].strip() for line in cpuinfo if line.startswith("model name")]
    return names[0] if names else platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--frames", type=int, default=96)
    parser.add_argument("--shapes", default="tiny,middle")
    arguments = parser.parse_args()
    core = min(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    print(
        f"command: python -m benchmarks.components.vocoder --rounds {arguments.rounds}"
        f" --frames {arguments.frames} --shapes {arguments.shapes}"
    )
    print(
        f"torch {torch.__version__}, transformers {transformers.__version__}; {processor_name()}, pinned to"
        f" core {core}; median CPU time of {arguments.rounds}; {arguments.frames} frames of 80 ms, float32"
    )
    print("\n| shape | decoder | samples/s | x realtime | error | missing |")
    print("|---|---|---|---|---|---|")
    for shape in arguments.shapes.split(","):
        with tempfile.TemporaryDirectory() as folder:
            report(shape, arguments.rounds, arguments.frames, Path(folder))


if __name__ == "__main__":
    main()
