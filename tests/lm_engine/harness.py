"""A client of the engine with a fake runner: builds prompts, answers embedding requests, collects tokens."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from contracts.digests import ContentDigest
from contracts.media import MediaItem, MediaSpan, Prompt
from contracts.messages import EmbeddingsNeeded, Failed, Generate, Generated
from contracts.params import SamplingParams
from lm_engine.config import EngineConfig
from lm_engine.engine import LMEngine
from lm_engine.fake_runner import FakeModel, FakeRunner, reference_tokens
from lm_engine.sequence import sample_seed

VOCAB = 40
EOS = 7
IMAGE = VOCAB - 1  # placeholder id
WIDTH = 2


@dataclass(frozen=True)
class Image:
    name: str
    num_tokens: int
    mask: tuple[bool, ...] | None = None

    @property
    def digest(self) -> ContentDigest:
        return ContentDigest(hashlib.md5(self.name.encode()).digest())


def prompt_of(*parts: int | list[int] | Image) -> Prompt:
    """Integers and lists are token ids; an image becomes its placeholders."""
    tokens: list[int] = []
    items, spans = [], []
    for part in parts:
        if isinstance(part, Image):
            rows = part.num_tokens if part.mask is None else sum(part.mask)
            spans.append(MediaSpan(len(tokens), part.num_tokens, len(items), part.digest, part.mask))
            items.append(
                MediaItem(
                    modality="image",
                    bytes_digest=part.digest,
                    pixel_digest=part.digest,
                    num_tokens=rows,
                    grid_thw=(1, 2, 2 * rows),
                    source_size=(8, 8),
                )
            )
            tokens += [IMAGE] * part.num_tokens
        else:
            tokens += [part] if isinstance(part, int) else part
    return Prompt(tokens, tuple(items), tuple(spans))


def embeddings_of(item: MediaItem) -> torch.Tensor:
    base = int.from_bytes(item.pixel_digest[:3], "little")
    rows = torch.arange(item.num_tokens, dtype=torch.float32)
    return torch.stack([rows, torch.full_like(rows, float(base))], dim=1)


def mrope(prompt: Prompt) -> tuple[np.ndarray, int]:
    """Three axes; a span advances the position by one only, so that delta matters."""
    position, columns, end = 0, [], 0
    for span in prompt.spans:
        columns += [(p, p, p) for p in range(position, position + span.offset - end)]
        position += span.offset - end
        columns += [(position, position, position + i) for i in range(span.length)]
        position, end = position + 1, span.end
    rest = len(prompt.token_ids) - end
    columns += [(p, p, p) for p in range(position, position + rest)]
    return np.array(columns, dtype=np.int64).T, position + rest - len(prompt.token_ids)


def config_of(**changes: object) -> EngineConfig:
    base: dict[str, object] = {
        "num_blocks": 65,
        "context_length": 256,
        "eos_token_ids": (EOS,),
        "block_size": 4,
        "max_step_tokens": 32,
        "max_sequences": 8,
        "max_step_visual_tokens": 16,
        "long_prefill_cap": 24,
        "max_resident_embedding_tokens": 64,
        "min_early_tokens": 1,
        "embedding_width": WIDTH,
        "overlap": False,
    }
    return EngineConfig(**(base | changes))  # type: ignore[arg-type]


def greedy(**changes: object) -> SamplingParams:
    return SamplingParams(**({"temperature": 0.0, "max_tokens": 6} | changes))  # type: ignore[arg-type]


def drawn(seed: int = 1, **changes: object) -> SamplingParams:
    return SamplingParams(**({"seed": seed, "max_tokens": 6} | changes))  # type: ignore[arg-type]


@dataclass
class Answer:
    """What one request got so far."""

    message: Generate
    tokens: list[list[int]]
    reasons: list[str | None]
    stops: list[int | None]
    num_cached: int | None = None
    error: Failed | None = None
    asked: list[int] = field(default_factory=list)

    @property
    def done(self) -> bool:
        return self.error is not None or all(self.reasons)


class Client:
    """Drives an engine. `hold` keeps embeddings back until `deliver`; otherwise they come after the step."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        threaded: bool = False,
        gate: Callable[..., None] | None = None,
        hold: bool = False,
        shuffle: random.Random | None = None,
        **engine_options: object,
    ) -> None:
        self.config = config
        self.model = FakeModel(VOCAB)
        self.runner = FakeRunner(config, self.model, threaded=threaded, gate=gate)
        self.engine = LMEngine(config, self.runner, mrope, **engine_options)  # type: ignore[arg-type]
        self.answers: dict[str, Answer] = {}
        self.hold = hold
        self.shuffle = shuffle
        self.owed: list[tuple[str, int]] = []  # embeddings asked for and not delivered

    def add(
        self, name: str, prompt: Prompt, sampling: SamplingParams | None = None, **fields: object
    ) -> Answer:
        message = Generate(request_id=name, prompt=prompt, sampling=sampling or greedy(), **fields)  # type: ignore[arg-type]
        answer = Answer(message, *([x] * message.sampling.n for x in (0, None, None)))  # type: ignore[arg-type]
        answer.tokens = [
            list(message.resume[i]) if i < len(message.resume) else [] for i in range(message.sampling.n)
        ]
        self.engine.add(message)
        self.answers[name] = answer
        return answer

    def take(self, messages: tuple[Generated | EmbeddingsNeeded | Failed, ...]) -> None:
        for message in messages:
            answer = self.answers[message.request_id]
            match message:
                case Generated(deltas=deltas, num_cached_tokens=num_cached):
                    if num_cached is not None:
                        assert answer.num_cached is None, "the cached share is told once"
                        answer.num_cached = num_cached
                    for delta in deltas:
                        assert answer.reasons[delta.sample] is None, "a token after the end"
                        answer.tokens[delta.sample] += delta.token_ids
                        answer.reasons[delta.sample] = delta.finish_reason
                        answer.stops[delta.sample] = delta.stop_token_id
                case EmbeddingsNeeded(item_indices=items):
                    answer.asked += items
                    self.owed += [(message.request_id, item) for item in items]
                case Failed():
                    answer.error = message

    def deliver(self, count: int | None = None) -> None:
        """Hands over owed embeddings (of requests still there), shuffled if the client is."""
        if self.shuffle is not None:
            self.shuffle.shuffle(self.owed)
        now, self.owed = self.owed[:count], self.owed[len(self.owed[:count]) :]
        for name, item in now:
            prompt = self.answers[name].message.prompt
            self.engine.embeddings_ready(name, item, embeddings_of(prompt.items[item]))

    async def step(self) -> None:
        self.take((await self.engine.step()).messages)
        if not self.hold:
            self.deliver(None if self.shuffle is None else self.shuffle.randint(0, 2))
        problem = self.engine.check_integrity()
        assert problem is None, problem

    async def drain(self, max_steps: int = 2000) -> None:
        """Until nothing can go on without something from outside."""
        for _ in range(max_steps):
            if not self.engine.has_work():
                if self.hold or not self.owed:
                    return
                self.deliver(1)
                continue
            await self.step()
        raise AssertionError(f"no end after {max_steps} steps")

    def run(self, max_steps: int = 2000) -> None:
        asyncio.run(self.drain(max_steps))

    def expect(self, name: str) -> list[list[int]]:
        """What each sample must be, from the reference."""
        message = self.answers[name].message
        prompt, sampling = message.prompt, message.sampling
        stops = (() if sampling.ignore_eos else self.config.eos_token_ids) + sampling.stop_token_ids
        embeddings = {i: embeddings_of(item) for i, item in enumerate(prompt.items)}
        max_length = min(len(prompt.token_ids) + sampling.max_tokens, self.config.kv_capacity_tokens + 1)
        return [
            reference_tokens(
                self.model,
                prompt,
                embeddings,
                mrope(prompt),
                sampling,
                seed=sample_seed(sampling.seed or 0, i),
                stop_ids=stops,
                max_length=max_length,
            )
            for i in range(sampling.n)
        ]

    def check(self, *names: str) -> None:
        """Every named (or every) request ended with exactly the reference's tokens, and nothing is left."""
        for name in names or self.answers:
            answer = self.answers[name]
            assert answer.error is None, answer.error
            assert answer.done, f"{name} is not done: {answer}"
            assert answer.tokens == self.expect(name), name
        if not names:
            assert self.engine.is_idle()
            assert self.engine.check_integrity() is None
            assert self.engine.stats()["kv_cache_usage_perc"] == 0
