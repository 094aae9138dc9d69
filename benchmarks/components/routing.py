"""How much of the prompts two replicas serve from their prefix caches: routed by prefix, and in turns.

python -m benchmarks.components.routing MODEL --sessions 24 --turns 4 --concurrency 8

MODEL is a checkpoint folder, run in this process with two replicas of its language model.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from pathlib import Path

from contracts.conversation import Conversation, Message, TextPart
from contracts.params import SamplingParams
from stages.launch import serve_service
from stages.omni_service import OmniService
from stages.options import ServeOptions
from stages.service import GenerationRequest, PromptReady, Tokens

WORDS = [
    "the",
    "a",
    "of",
    "to",
    "and",
    "in",
    "is",
    "it",
    "on",
    "for",
    "with",
    "as",
    "at",
    "by",
    "from",
    "or",
    "an",
    "be",
    "this",
    "that",
    "not",
    "are",
    "was",
    "but",
    "have",
    "had",
]


async def session(service: OmniService, seed: int, turns: int, output: int) -> tuple[int, int, list[float]]:
    """Prompt tokens, those of them from a cache, and each turn's time to its first token in seconds."""
    rng = random.Random(seed)
    messages: list[Message] = []
    prompt = cached = 0
    waits = []
    for _ in range(turns):
        text = " ".join(rng.choices(WORDS, k=60))
        messages.append(Message(role="user", parts=(TextPart(text),)))
        request = GenerationRequest(
            input=Conversation(messages=tuple(messages)),
            sampling=SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True),
        )
        start = time.perf_counter()
        answered = False
        async for event in service.generate(request):
            if isinstance(event, Tokens) and not answered:
                answered = True
                waits.append(time.perf_counter() - start)
                cached += event.num_cached_tokens or 0
            elif isinstance(event, PromptReady):
                prompt += len(event.prompt_token_ids)
        messages.append(Message(role="assistant", parts=(TextPart(" ".join(rng.choices(WORDS, k=20))),)))
    return prompt, cached, waits


async def measure(model: Path, by_prefix: bool, given: argparse.Namespace) -> str:
    overrides = ("thinker.replicas=2", f"routing.by_prefix={str(by_prefix).lower()}")
    async with serve_service(ServeOptions(model=model, overrides=overrides)) as service:
        gate = asyncio.Semaphore(given.concurrency)

        async def gated(seed: int) -> tuple[int, int, list[float]]:
            async with gate:
                return await session(service, seed, given.turns, given.output)

        start = time.perf_counter()
        results = await asyncio.gather(*(gated(seed) for seed in range(given.sessions)))
        seconds = time.perf_counter() - start
    prompt, cached = sum(r[0] for r in results), sum(r[1] for r in results)
    waits = sorted(wait for r in results for wait in r[2])
    name = "by prefix" if by_prefix else "in turns"
    median_ms = waits[len(waits) // 2] * 1e3
    share = f"{cached / prompt:8.1%} of {prompt} prompt tokens"
    return f"{name:10} {share}  TTFT p50 {median_ms:7.1f} ms  {seconds:6.1f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--sessions", type=int, default=24)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--output", type=int, default=8)
    given = parser.parse_args()
    for by_prefix in (True, False):
        print(asyncio.run(measure(given.model, by_prefix, given)), flush=True)


if __name__ == "__main__":
    main()
