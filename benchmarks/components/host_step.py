"""Host CPU time of one engine step without a device: planning and applying N decoding sequences.

python -m benchmarks.components.host_step --sequences 256 --steps 400
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from concurrent.futures import Future

import numpy as np

from contracts.media import Prompt
from contracts.messages import Generate
from contracts.params import SamplingParams
from lm_engine.config import EngineConfig
from lm_engine.engine import LMEngine
from lm_engine.plan import SampledToken, StepPlan, StepResult


class NoopRunner:
    """Answers at once with token 1; the time it spends making the answer is not the host's."""

    def __init__(self) -> None:
        self.own_s = 0.0

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        started = time.thread_time()
        sampled = tuple(SampledToken(step.slot, 1, None) for step in plan.sequences if step.samples)
        future: Future[StepResult] = Future()
        future.set_result(StepResult(plan.step_id, sampled))
        self.own_s += time.thread_time() - started
        return future

    def close(self) -> None:
        pass


def _positions(prompt: Prompt) -> tuple[np.ndarray, int]:
    return np.arange(len(prompt.token_ids), dtype=np.int64)[None], 0


async def measure(num_sequences: int, num_steps: int, prompt_tokens: int, overlap: bool) -> list[float]:
    """Milliseconds of CPU time of each decode step (other processes of a busy machine do not count)."""
    length = prompt_tokens + num_steps + 64
    config = EngineConfig(
        num_blocks=2 + num_sequences * (length // 16 + 1),
        context_length=length,
        eos_token_ids=(0,),
        max_step_tokens=max(8192, num_sequences),
        max_sequences=num_sequences,
        overlap=overlap,
    )
    runner = NoopRunner()
    engine = LMEngine(config, runner, _positions)
    sampling = SamplingParams(temperature=0.0, max_tokens=num_steps + 64)
    for i in range(num_sequences):
        prompt = Prompt([2 + (i * 7 + j) % 1000 for j in range(prompt_tokens)])
        engine.add(Generate(request_id=f"r{i}", prompt=prompt, sampling=sampling))
    while engine.stats()["generation_tokens_total"] < num_sequences * 8:
        await engine.step()
    times_ms = []
    for _ in range(num_steps):
        runner.own_s = 0.0
        started = time.thread_time()
        await engine.step()
        times_ms.append((time.thread_time() - started - runner.own_s) * 1e3)
    engine.close()
    return times_ms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    options = parser.parse_args()
    for overlap in (False, True):
        times = asyncio.run(measure(options.sequences, options.steps, options.prompt_tokens, overlap))
        cuts = statistics.quantiles(times, n=100)
        loop = "overlapped" if overlap else "plain"
        print(
            f"{loop:10}  {options.sequences} sequences  ms a step: least {min(times):.3f}  "
            f"median {cuts[49]:.3f}  p90 {cuts[89]:.3f}  p99 {cuts[98]:.3f}"
        )


if __name__ == "__main__":
    main()
