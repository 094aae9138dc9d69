"""Decode speed of one GPU: steps of a 3B text decoder with random weights, driven through Runner.submit.

python -m benchmarks.components.gpu_decode --batches 1 8 32 128 --context 519 --steps 128 [--json FILE]

The floor is the time to read all weights and the context's keys and values once at `--bandwidth`. `--tiny`
runs the same on a CPU, with a decoder of no interest. `--ablate` measures each batch again with one
optimisation less, one at a time.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch

from contracts.params import SamplingParams
from lm_engine.decoder import Decoder
from lm_engine.layers.selection import select_kernels
from lm_engine.memory import allocate_kv
from lm_engine.model import DecoderConfig, PagedKV, RopeConfig
from lm_engine.model import Kernels as KernelChoice
from lm_engine.plan import Admission, SequenceStep, StepPlan, StepResult
from lm_engine.runner import Runner

BLOCK_SIZE = 16
MAX_STEP_TOKENS = 8192
DEPTH = 2  # steps in flight, as in the engine's overlapped loop
ABLATIONS = ("CUDA graphs", "programmatic launch", "fused layers", "a step ahead")
NUM_WARM_STEPS = 8
# The text half of Qwen2.5-VL-3B.
SHAPE = DecoderConfig(
    vocab_size=151936,
    hidden_size=2048,
    intermediate_size=11008,
    num_layers=36,
    num_heads=16,
    num_kv_heads=2,
    head_dim=128,
    rms_norm_eps=1e-6,
    rope=RopeConfig(1e6, tuple(1e6 ** (-p / 64) for p in range(64)), mrope_section=(16, 24, 24)),
    max_position=128000,
    qkv_bias=True,
    tie_embeddings=True,
)
TINY = replace(SHAPE, vocab_size=512, hidden_size=256, intermediate_size=512, num_layers=2, num_heads=4)


class RandomWeights:
    """A WeightSource of the right sizes."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self.num_bytes = 0

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        weight = torch.randn(shape, device=self.device, dtype=self.dtype)
        self.num_bytes += weight.nbytes
        return weight.mul_(0.02) if "norm" not in name else weight.mul_(0.02).add_(1)


class TimedRunner(Runner):
    """Adds up the CPU time of launching."""

    launch_s = 0.0

    def _launch(self, plan: StepPlan):  # type: ignore[no-untyped-def]
        started = time.thread_time()
        try:
            return super()._launch(plan)
        finally:
            self.launch_s += time.thread_time() - started


@dataclass(frozen=True)
class Figures:
    without: str | None  # of ABLATIONS
    batch: int
    prefill_s: float
    tpot_ms: float  # with DEPTH steps in flight, each result awaited
    ahead_ms: float  # all steps submitted at once
    host_ms: float
    floor_ms: float


class Load:
    """Sequences of equal length, advanced together."""

    def __init__(self, runner: Runner, num_sequences: int, context: int, sampling: SamplingParams) -> None:
        self.runner, self.sampling, self.shape = runner, sampling, runner.model.config
        self.lengths = [0] * num_sequences
        self.blocks = [0] * num_sequences
        self.context = context
        self._next_block = 1
        self._step_id = 0
        self._rng = np.random.default_rng(0)

    def prefill(self) -> None:
        """Whole prompts, as many a step as fit."""
        per_step = max(1, MAX_STEP_TOKENS // self.context)
        futures = []
        for first in range(0, len(self.lengths), per_step):
            slots = range(first, min(first + per_step, len(self.lengths)))
            admissions = tuple(self._admission(slot) for slot in slots)
            futures.append(self._submit([self._advance(slot, self.context) for slot in slots], admissions))
        for future in futures:
            future.result()

    def decode(self) -> Future[StepResult]:
        return self._submit([self._advance(slot, 1) for slot in range(len(self.lengths))])

    def release(self) -> None:
        self.runner.submit(StepPlan(self._step_id, tuple(range(len(self.lengths))), (), (), (), ())).result()

    def _submit(
        self, steps: list[SequenceStep], admissions: tuple[Admission, ...] = ()
    ) -> Future[StepResult]:
        self._step_id += 1
        return self.runner.submit(StepPlan(self._step_id, (), admissions, (), tuple(steps), ()))

    def _admission(self, slot: int) -> Admission:
        tokens = self._rng.integers(0, self.shape.vocab_size, self.context).tolist()
        positions_AL = np.broadcast_to(np.arange(self.context), (self.shape.num_position_axes, self.context))
        return Admission(slot, tokens, self.context, positions_AL, 0, self.sampling, slot, ())

    def _advance(self, slot: int, count: int) -> SequenceStep:
        start = self.lengths[slot]
        self.lengths[slot] = start + count
        num_new = -(-self.lengths[slot] // BLOCK_SIZE) - self.blocks[slot]
        self.blocks[slot] += num_new
        new_blocks = tuple(range(self._next_block, self._next_block + num_new))
        self._next_block += num_new
        return SequenceStep(slot, start, count, new_blocks, samples=True)


def decode_together(load: Load, num_steps: int, depth: int) -> float:
    """Seconds a step."""
    flights: deque[Future[StepResult]] = deque()
    started = time.perf_counter()
    for _ in range(num_steps):
        if len(flights) == depth:
            flights.popleft().result()
        flights.append(load.decode())
    for flight in flights:
        flight.result()
    return (time.perf_counter() - started) / num_steps


def measure(
    runner: TimedRunner,
    num_sequences: int,
    options: argparse.Namespace,
    weight_bytes: int,
    without: str | None = None,
) -> Figures:
    depth = 1 if without == "a step ahead" else DEPTH
    sampling = SamplingParams(temperature=options.temperature)
    load = Load(runner, num_sequences, options.context, sampling)
    load.prefill()
    load.release()
    load = Load(runner, num_sequences, options.context, sampling)
    started = time.perf_counter()
    load.prefill()
    prefill_s = time.perf_counter() - started
    decode_together(load, NUM_WARM_STEPS, depth)
    runner.launch_s = 0.0
    tpot_s = decode_together(load, options.steps, depth)
    host_s = runner.launch_s / options.steps
    middle = sum(load.lengths) - num_sequences * options.steps // 2
    ahead_s = decode_together(load, options.steps, options.steps)
    load.release()
    kv_bytes = middle * runner.model.config.kv_bytes_per_token(torch.bfloat16)
    floor_s = (weight_bytes + kv_bytes) / options.bandwidth
    times_ms = (1e3 * seconds for seconds in (tpot_s, ahead_s, host_s, floor_s))
    return Figures(without, num_sequences, prefill_s, *times_ms)


def make_kv(shape: DecoderConfig, num_sequences: int, length: int, device: torch.device) -> PagedKV:
    num_blocks = 1 + num_sequences * (-(-length // BLOCK_SIZE) + 1)
    return allocate_kv(shape, num_blocks, BLOCK_SIZE, torch.bfloat16, device)


def make_decoder(options: argparse.Namespace) -> tuple[Decoder, int]:
    """With the bytes of its weights."""
    device = torch.device("cpu" if options.tiny else "cuda")
    shape = TINY if options.tiny else SHAPE
    choice: KernelChoice = "reference" if options.tiny else options.kernels
    source = RandomWeights(device, torch.bfloat16)
    model = Decoder(shape, source, select_kernels(choice, device, torch.bfloat16))
    place = "CPU" if options.tiny else torch.cuda.get_device_name()
    print(f"{place}, torch {torch.__version__}, {model.attention.name} attention")
    print(f"weights {source.num_bytes / 1e9:.2f} GB, context {options.context}, {options.steps} steps")
    return model, source.num_bytes


def make_runner(model: Decoder, options: argparse.Namespace, *, cuda_graphs: bool) -> TimedRunner:
    length = options.context + 2 * options.steps + NUM_WARM_STEPS + BLOCK_SIZE
    most = max(options.batches)
    return TimedRunner(
        model,
        model.attention,
        make_kv(model.config, most, length, model.device),
        max_sequences=most,
        max_length=length,
        cuda_graphs=cuda_graphs,
    )


@contextmanager
def one_less(model: Decoder, without: str | None) -> Iterator[None]:
    """The decoder in the plain way of one of ABLATIONS."""
    fused = model._fused
    if without == "fused layers":
        model._fused = None
    launches_ahead = None
    if without == "programmatic launch" and model.device.type == "cuda":
        from lm_engine.triton import launch

        launches_ahead, launch.uses_pdl = launch.uses_pdl, lambda device: False
    try:
        yield
    finally:
        model._fused = fused
        if launches_ahead is not None:
            launch.uses_pdl = launches_ahead


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--context", type=int, default=519)
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--kernels", default="triton", choices=["triton", "reference"])
    parser.add_argument("--no-graphs", action="store_true")
    parser.add_argument("--ablate", action="store_true", help="again without each optimisation")
    parser.add_argument("--bandwidth", type=float, default=4.3e12, help="bytes a second (H200: 4.3e12)")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    model, weight_bytes = make_decoder(options)
    print(f"{HEADER}  without")
    measured = []
    for without in (None, *(ABLATIONS if options.ablate else ())):
        with one_less(model, without):
            runner = make_runner(
                model, options, cuda_graphs=not options.no_graphs and without != "CUDA graphs"
            )
            for num_sequences in options.batches:
                found = measure(runner, num_sequences, options, weight_bytes, without)
                measured.append(asdict(found))
                print(row_of(found, options.steps), flush=True)
            runner.close()
    if options.json is not None:
        options.json.write_text(json.dumps(measured))


HEADER = "   batch   TPOT ms   ahead ms   host ms  floor ms     tok/s  prefill s  tok/s with prefill"


def row_of(found: Figures, steps: int) -> str:
    total_s = found.prefill_s + steps * found.tpot_ms / 1e3
    return (
        f"{found.batch:8}{found.tpot_ms:10.3f}{found.ahead_ms:11.3f}{found.host_ms:10.3f}"
        f"{found.floor_ms:10.3f}{found.batch / found.tpot_ms * 1e3:10.0f}{found.prefill_s:11.3f}"
        f"{found.batch * steps / total_s:20.0f}  {found.without or '-'}"
    )


if __name__ == "__main__":
    main()
