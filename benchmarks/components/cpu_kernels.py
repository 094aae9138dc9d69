"""Times the CPU kernels over the shapes of a 135M Llama: `python -m benchmarks.components.cpu_kernels`.

Weights are random. Every figure is the best of several runs, the rivals taking turns: on a shared machine the
best run is the one that was disturbed least.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from lm_engine.layers.kernels import HeadShape, Kernels, Linear
from lm_engine.layers.reference import ReferenceKernels
from lm_engine.model import AttentionMetadata, PagedKV
from lm_engine.native import Unavailable, native_kernels

NUM_LAYERS, HIDDEN, INTERMEDIATE, VOCABULARY = 30, 576, 1536, 49152
HEADS = HeadShape(num_heads=9, num_kv_heads=3, head_dim=64)
LAYER_SHAPES = (
    (HEADS.width, HIDDEN),
    (HIDDEN, HEADS.num_heads * HEADS.head_dim),
    (2 * INTERMEDIATE, HIDDEN),
    (HIDDEN, INTERMEDIATE),
)
BLOCK_SIZE = 16
EPS = 1e-5
SETTLE_S = 0.02  # OpenMP threads of the rival before spin on after their last operation


@dataclass(frozen=True)
class Candidate:
    """`weights` and `activations` may differ in dtype for the native kernels."""

    name: str
    kernels: Kernels
    weights: torch.dtype
    activations: torch.dtype


@dataclass(frozen=True)
class Model:
    candidate: Candidate
    layers: list[list[Linear]]
    head: Linear

    @property
    def num_weights(self) -> int:
        linears = [linear for layer in self.layers for linear in layer] + [self.head]
        return sum(linear.in_features * linear.out_features for linear in linears)


def make_model(candidate: Candidate) -> Model:
    def pack(outputs: int, inputs: int) -> Linear:
        weight_OI = (torch.randn(outputs, inputs) * inputs**-0.5).to(candidate.weights)
        return candidate.kernels.pack_linear(weight_OI)

    layers = [[pack(*shape) for shape in LAYER_SHAPES] for _ in range(NUM_LAYERS)]
    return Model(candidate, layers, pack(VOCABULARY, HIDDEN))


def linears_only(model: Model, rows: int) -> Callable[[], None]:
    inputs = {
        width: torch.randn(rows, width).to(model.candidate.activations) for width in (HIDDEN, INTERMEDIATE)
    }

    def run() -> None:
        for layer in model.layers:
            for linear in layer:
                linear(inputs[linear.in_features])
        model.head(inputs[HIDDEN])

    return run


def decode_step(model: Model, streams: int, context: int) -> Callable[[], None]:
    """One token of each stream through the whole decoder: all that a step computes but the sampling."""
    kernels, dtype = model.candidate.kernels, model.candidate.activations
    metadata = decode_metadata(streams, context)
    num_blocks = int(metadata.block_tables.max()) + 1
    cache_size = (NUM_LAYERS, num_blocks, BLOCK_SIZE, HEADS.num_kv_heads, HEADS.head_dim)
    kv = PagedKV(
        torch.randn(cache_size).to(model.candidate.weights),
        torch.randn(cache_size).to(model.candidate.weights),
    )
    weight_H = torch.ones(HIDDEN, dtype=model.candidate.weights)
    angle_TP = torch.randn(streams, HEADS.head_dim // 2)
    cos_TP, sin_TP = angle_TP.cos(), angle_TP.sin()
    start_TH = torch.randn(streams, HIDDEN).to(dtype)

    def run() -> None:
        x_TH, residual_TH = torch.zeros_like(start_TH), start_TH.clone()
        for index, (qkv, output, gate_up, down) in enumerate(model.layers):
            x_TH, residual_TH = kernels.add_rms_norm(x_TH, residual_TH, weight_H, EPS)
            q, k, v = kernels.split_rope(qkv(x_TH), HEADS, cos_TP, sin_TP, None)
            mixed_TND = kernels.attention.attend(q, k, v, kv, index, metadata)
            x_TH = output(mixed_TND.flatten(1))
            x_TH, residual_TH = kernels.add_rms_norm(x_TH, residual_TH, weight_H, EPS)
            x_TH = down(kernels.silu_mul(gate_up(x_TH)))
        model.head(kernels.add_rms_norm(x_TH, residual_TH, weight_H, EPS)[0])

    return run


def decode_metadata(streams: int, context: int) -> AttentionMetadata:
    blocks = -(-context // BLOCK_SIZE)
    tables_RM = torch.arange(1, streams * blocks + 1, dtype=torch.int32).view(streams, blocks)
    last = context - 1
    return AttentionMetadata(
        query_starts=torch.arange(streams + 1, dtype=torch.int32),
        sequence_lengths=torch.full((streams,), context, dtype=torch.int32),
        block_tables=tables_RM,
        slot_mapping=tables_RM[:, last // BLOCK_SIZE].long() * BLOCK_SIZE + last % BLOCK_SIZE,
        max_query_length=1,
        max_sequence_length=context,
        host_query_starts=tuple(range(streams + 1)),
        host_sequence_lengths=(context,) * streams,
    )


def best_times_s(runs: list[Callable[[], None]], budget_s: float) -> list[float]:
    """Best time of each; they take turns until the budget is spent, three rounds at least."""
    best = [float("inf")] * len(runs)
    for run in runs:
        run()
    rounds, deadline = 0, time.perf_counter() + budget_s
    while rounds < 3 or time.perf_counter() < deadline:
        for index, run in enumerate(runs):
            time.sleep(SETTLE_S)
            begin = time.perf_counter()
            run()
            best[index] = min(best[index], time.perf_counter() - begin)
        rounds += 1
    return best


def read_bandwidth(megabytes: int = 256) -> float:
    """Bytes a second that torch's threads read from memory: the floor of every step."""
    block = torch.ones(megabytes * 2**20 // 8, dtype=torch.int64)

    def run() -> None:
        block.sum()

    return block.nbytes / best_times_s([run], budget_s=2.0)[0]


def describe_machine() -> str:
    cpuinfo = Path("/proc/cpuinfo").read_text().splitlines()
    name = next((line.split(":", 1)[1].strip() for line in cpuinfo if line.startswith("model name")), "CPU")
    python = sys.version.split()[0]
    return f"{name}, {torch.get_num_threads()} threads, torch {torch.__version__}, Python {python}"


def candidates(native: Kernels) -> list[Candidate]:
    plain = ReferenceKernels()
    return [
        Candidate("native bf16", native, torch.bfloat16, torch.bfloat16),
        Candidate("native bf16, f32 activations", native, torch.bfloat16, torch.float32),
        Candidate("native f32", native, torch.float32, torch.float32),
        Candidate("torch bf16", plain, torch.bfloat16, torch.bfloat16),
        Candidate("torch f32", plain, torch.float32, torch.float32),
    ]


def print_linears(models: list[Model], row_counts: list[int], bandwidth: float, budget_s: float) -> None:
    print("\nAll linears of the model once, M rows: ms (GB/s of weights read, GFLOP/s)")
    print(f"{'M':>4}" + "".join(f"{model.candidate.name:>30}" for model in models))
    for rows in row_counts:
        times = best_times_s([linears_only(model, rows) for model in models], budget_s)
        cells = []
        for model, best_s in zip(models, times, strict=True):
            gigabytes = model.num_weights * model.candidate.weights.itemsize / best_s / 1e9
            gigaflops = 2 * rows * model.num_weights / best_s / 1e9
            cells.append(f"{best_s * 1e3:14.1f} ({gigabytes:5.1f}, {gigaflops:5.1f})")
        print(f"{rows:>4}" + "".join(f"{cell:>30}" for cell in cells), flush=True)
    floors = [model.num_weights * model.candidate.weights.itemsize / bandwidth * 1e3 for model in models]
    print("floor" + "".join(f"{floor:29.1f} " for floor in floors) + f"(reads at {bandwidth / 1e9:.1f} GB/s)")


def print_steps(models: list[Model], contexts: list[int], budget_s: float) -> None:
    print("\nOne decode step of the whole decoder (linears, norms, rotary, paged attention, logits): ms")
    print(f"{'streams x context':>18}" + "".join(f"{model.candidate.name:>30}" for model in models))
    for streams in (1, 8):
        for context in contexts:
            times = best_times_s([decode_step(model, streams, context) for model in models], budget_s)
            cells = "".join(f"{best_s * 1e3:30.1f}" for best_s in times)
            print(f"{streams:>7} x {context:<8}" + cells, flush=True)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 64, 256])
    parser.add_argument("--contexts", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--budget-s", type=float, default=6.0, help="per row of a table")
    parser.add_argument("--only", default="", help="candidates whose name holds this")
    arguments = parser.parse_args()
    native = native_kernels(torch.device("cpu"), torch.bfloat16)
    if isinstance(native, Unavailable):
        raise SystemExit(native.reason)
    print(describe_machine())
    models = [make_model(candidate) for candidate in candidates(native) if arguments.only in candidate.name]
    print_linears(models, arguments.rows, read_bandwidth(), arguments.budget_s)
    print_steps(models, arguments.contexts, arguments.budget_s)


if __name__ == "__main__":
    main()
