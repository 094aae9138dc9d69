"""Random workloads with small caches: every request ends with the reference's tokens, nothing is left."""

import asyncio
import random
from dataclasses import replace

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from contracts.media import Prompt
from lm_engine.config import EngineConfig
from tests.lm_engine.harness import Client, Image, config_of, drawn, prompt_of

IMAGES = [Image(f"i{k}", size) for k, size in enumerate((1, 4, 9, 12))]
IMAGES.append(Image("rows", 9, (True,) * 4 + (False,) + (True,) * 4))
SYSTEM = [1, 2, 3, 4, 5, 6]
MAX_TURNS = 4000  # far above what any of these workloads needs; a livelock reaches it


def random_config(rng: random.Random) -> EngineConfig:
    size, sequences = rng.choice([1, 2, 4, 8]), rng.randint(1, 6)
    return config_of(
        block_size=size,
        num_blocks=1 + rng.randint(max(2, 48 // size), 120 // size + 4),
        max_sequences=sequences,
        max_step_tokens=sequences + rng.randint(13, 30),
        mixed_step_tokens=rng.choice([None, sequences + 13]),
        max_step_visual_tokens=rng.randint(1, 16),
        long_prefill_cap=rng.randint(1, 24),
        max_resident_embedding_tokens=rng.randint(1, 30),
        policy=rng.choice(["fcfs", "priority", "fair", "cache_aware"]),
        prefix_cache=rng.random() < 0.8,
        atomic_spans=rng.random() < 0.3,
        min_shared_tokens=rng.choice([None, 1, 8]),
        min_early_tokens=rng.choice([1, 3, 20]),
    )


def random_prompt(rng: random.Random, limit: int) -> Prompt:
    parts: list[object] = [SYSTEM[: rng.randint(0, 6)]]
    for _ in range(rng.randint(0, 3)):
        parts += [rng.choice(IMAGES), [rng.randint(1, 30) for _ in range(rng.randint(0, 4))]]
    prompt = prompt_of(*parts)
    return prompt if 0 < len(prompt.token_ids) <= limit else prompt_of([1, 2])


class Workload:
    """Adds, aborts, stops and resets at random; `disturbed` requests need not finish."""

    def __init__(self, seed: int, config: EngineConfig) -> None:
        self.rng = random.Random(seed)
        self.client = Client(config, shuffle=random.Random(seed + 1))
        self.todo = self.rng.randint(3, 12)
        self.disturbed: set[str] = set()

    async def run(self) -> None:
        client, rng = self.client, self.rng
        for _ in range(MAX_TURNS):
            if len(client.answers) < self.todo and rng.random() < 0.4:
                self.add()
            if client.answers and rng.random() < 0.05:
                self.disturb()
            if client.engine.has_work():
                await client.step()
            elif client.owed:
                client.deliver(1)
            elif len(client.answers) >= self.todo:
                return
        raise AssertionError("no end: the engine does not get on")

    def add(self) -> None:
        rng = self.rng
        self.client.add(
            f"r{len(self.client.answers)}",
            random_prompt(rng, self.client.config.kv_capacity_tokens),
            drawn(
                rng.randint(0, 3),
                n=rng.choice([1, 1, 1, 2, 4]),
                max_tokens=rng.randint(1, 20),
                min_tokens=rng.choice([0, 0, 3]),
                temperature=rng.choice([0.0, 1.0]),
                stop_token_ids=rng.choice([(), (11, 12)]),
            ),
            priority=rng.randint(0, 2),
            tenant=rng.choice("ab"),
            cache_salt=rng.choice([None, None, "s"]),
        )

    def disturb(self) -> None:
        name = self.rng.choice(list(self.client.answers))
        answer = self.client.answers[name]
        match self.rng.randrange(3):
            case 0:
                self.client.engine.abort(name)
            case 1:
                self.client.engine.stop_sample(name, self.rng.randrange(answer.message.sampling.n))
            case _:
                self.client.engine.reset_cache()
                return
        if not answer.done:
            self.disturbed.add(name)

    def check(self) -> None:
        for name in self.client.answers:
            if name not in self.disturbed:
                self.client.check(name)
            else:
                expected = self.client.expect(name)
                for tokens, whole in zip(self.client.answers[name].tokens, expected, strict=True):
                    assert tokens == whole[: len(tokens)]
        assert self.client.engine.is_idle()
        assert self.client.engine.check_integrity() is None


@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)
@given(seed=st.integers(0, 1 << 32))
def test_every_request_ends_in_both_loops(seed):
    """The fake runner checks each plan's budgets, the client checks conservation after each step."""
    config = random_config(random.Random(seed))
    for overlap in (False, True):
        workload = Workload(seed, replace(config, overlap=overlap))
        asyncio.run(workload.run())
        workload.check()
