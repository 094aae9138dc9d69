"""The pause that the death of a worker costs a stream: kill -9 in the middle, the time to the next token.

    python -m benchmarks.components.restart MODEL [--rounds 5] [--idle-s 20]

With `--idle-s` it also measures the CPU time of all processes of the idle server.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from contracts.params import SamplingParams
from stages.launch import serve_service
from stages.omni_service import OmniService
from stages.options import ServeOptions
from stages.service import GenerationRequest, Tokens

PROMPT = "Tell me a story about a lighthouse."
TOKENS_BEFORE = 16
TOKENS_AFTER = 16
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


async def pause_s(service: OmniService, stage: str) -> float:
    """Of one stream, from its last token before the death of the stage's worker to the next one."""
    sampling = SamplingParams(temperature=0.0, max_tokens=TOKENS_BEFORE + TOKENS_AFTER, ignore_eos=True)
    request = GenerationRequest(input=PROMPT, sampling=sampling)
    num_tokens, killed_s, longest_s = 0, 0.0, 0.0
    async for event in service.generate(request):
        if not isinstance(event, Tokens):
            continue
        if killed_s and not longest_s:
            longest_s = time.perf_counter() - killed_s
        num_tokens += sum(len(delta.token_ids) for delta in event.deltas)
        if num_tokens >= TOKENS_BEFORE and not killed_s:
            (worker,) = (w for w in service.workers() if stage in w.stages)
            killed_s = time.perf_counter()
            os.kill(worker.pid, signal.SIGKILL)
    while not service.ready():
        await service.stages_changed()
    return longest_s


def descendants(pid: int) -> list[int]:
    found = [pid]
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += descendants(int(child))
    return found


def cpu_seconds(pids: Sequence[int]) -> float:
    total = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / CLOCK_TICKS


async def measure(model: Path | None, rounds: int, idle_s: float) -> None:
    options = ServeOptions(model=model, workers="per-stage")
    started = time.perf_counter()
    async with serve_service(options) as service:
        print(f"start to ready          {time.perf_counter() - started:6.2f} s")
        pauses = [await pause_s(service, "thinker") for _ in range(rounds)]
        middle, worst = statistics.median(pauses), max(pauses)
        print(f"pause of a stream       {middle:6.2f} s median, {worst:.2f} s worst of {rounds}")
        if idle_s:
            pids = descendants(os.getpid())
            before, start = cpu_seconds(pids), time.perf_counter()
            await asyncio.sleep(idle_s)
            share = (cpu_seconds(pids) - before) / (time.perf_counter() - start)
            print(f"idle, {len(pids)} processes       {share * 100:6.2f} % of a core over {idle_s:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, help="checkpoint folder (default: the default model)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--idle-s", type=float, default=0.0)
    args = parser.parse_args()
    asyncio.run(measure(args.model, args.rounds, args.idle_s))


if __name__ == "__main__":
    main()
