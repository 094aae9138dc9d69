"""An encoder gives way to the prompts of the pictures that it has handed over, and never waits for ever."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from contracts.chunks import Chunk
from contracts.messages import Encode
from encoder_pool.batcher import BatchLimits
from encoder_pool.cache import CacheConfig
from encoder_pool.model import EncoderInput, GraphBounds
from encoder_pool.pool import EncoderPool, EncoderPoolConfig
from stages.encoder_stage import EncoderStage
from stages.gpu_turns import MAX_HOLD_S, GpuTurns
from stages.lm_stage import LMStage
from stages.options import ServeOptions
from stages.planning import make_plan
from stages.stage_logics import make_turns
from tests.lm_engine.harness import WIDTH, Client, Image, config_of, drawn, embeddings_of, prompt_of


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def turns_of(max_rows_ahead: int = 0) -> tuple[GpuTurns, Clock, list[float]]:
    clock, woken = Clock(), []
    turns = GpuTurns(max_rows_ahead, clock)
    turns.wake_with(lambda: woken.append(clock()))
    return turns, clock, woken


def test_what_was_handed_over_is_computed_first() -> None:
    turns, clock, woken = turns_of(max_rows_ahead=4)
    assert not turns.holds()
    turns.handed_over("a", 0)
    assert turns.holds()
    turns.received("a", 0, 9)
    assert turns.holds()
    turns.publish(5)
    assert turns.holds()
    assert not woken
    clock.now_s = 0.1
    turns.publish(4)
    assert not turns.holds()
    assert woken == [0.1]
    assert turns.held_s == pytest.approx(0.1)
    turns.publish(0)
    assert len(woken) == 1, "nobody waited"


def test_what_was_aborted_on_the_way_is_not_waited_for() -> None:
    turns, _, woken = turns_of()
    turns.handed_over("a", 0)
    turns.handed_over("a", 1)
    turns.handed_over("b", 0)
    turns.received("b", 0, 0)
    assert turns.holds()
    turns.forget("a")
    assert not turns.holds()
    assert len(woken) == 1


def test_a_hold_ends_in_any_case() -> None:
    turns, clock, _ = turns_of()
    turns.handed_over("lost", 0)
    assert turns.holds()
    assert turns.hold_left_s() == MAX_HOLD_S
    clock.now_s += MAX_HOLD_S
    assert turns.hold_left_s() == 0.0
    assert not turns.holds()
    turns.begin()
    assert turns.num_cut == 1
    assert turns.hold_left_s() is None
    assert not turns.holds(), "what was lost is not waited for again"
    turns.received("b", 0, 9)
    assert turns.holds(), "the next hold has its own time"
    turns.publish(0)
    turns.begin()
    assert turns.num_cut == 1


def test_an_encoder_that_is_next_lets_mixed_steps_end_and_no_more_begin() -> None:
    turns, _, woken = turns_of()
    turns.publish(0, mixed=True)
    assert not turns.encoding, "no encoder has asked"
    assert turns.holds()
    assert turns.encoding, "from now on the language model plans none"
    turns.publish(0, mixed=False)
    assert len(woken) == 1
    assert turns.encoding, "it has not begun yet"
    assert not turns.holds()
    turns.begin()
    turns.end()
    assert not turns.encoding


def test_an_encoder_that_waits_for_rows_is_not_next() -> None:
    turns, _, _ = turns_of()
    turns.handed_over("a", 0)
    turns.publish(0, mixed=True)
    assert turns.holds()
    assert not turns.encoding, "those rows are to be computed beside decodes"
    turns.received("a", 0, 0)
    assert turns.holds()
    assert turns.encoding
    turns.end_hold()
    assert not turns.encoding, "there was nothing to begin with after all"


class ToyEncoder:
    """Gives what the engine's reference expects of an item, whose first pixel is its name."""

    encoder_id, embedding_width, dtype, device = "toy", WIDTH, torch.float32, torch.device("cpu")

    def __init__(self) -> None:
        self.num_calls = self.num_replays = 0

    def encode(self, items: list[EncoderInput]) -> list[Tensor]:
        self.num_calls += 1
        return [self._rows(item) for item in items]

    def allow_graphs(self, bounds: GraphBounds, *, ahead: bool) -> None: ...

    def drop_graphs(self) -> None: ...

    def _rows(self, item: EncoderInput) -> Tensor:
        rows = torch.arange(item.num_tokens, dtype=torch.float32)
        return torch.stack([rows, torch.full_like(rows, float(item.features[0]))], dim=1)


def unread(ref: object) -> np.ndarray:
    raise AssertionError("features come with the message")


class Pair:
    """An encoder and a language model with one device, their edge and the front between them. Time stands
    still, so that no hold ends by itself."""

    def __init__(self, client: Client, max_ahead: int, max_items: int, cache_bytes: int = 0) -> None:
        self.client, self.encoder = client, ToyEncoder()
        self.turns = GpuTurns(max_ahead, Clock())
        limits = BatchLimits(max_items=max_items)
        cache = CacheConfig(device_bytes=cache_bytes)

        def build() -> tuple[EncoderPool, str]:
            return EncoderPool(self.encoder, EncoderPoolConfig(limits=limits, cache=cache), "vision"), ""

        self.vision = EncoderStage("vision", build, unread, turns={"thinker": self.turns})
        self.thinker = LMStage("thinker", lambda: (client.engine, ""), turns=[self.turns])
        self.vision.start()
        self.thinker.start()
        self.edge: deque[Chunk] = deque()
        self.orders: deque[Encode] = deque()

    async def compute(self) -> None:
        self.client.take(tuple((await self.thinker.step()).messages))  # type: ignore[arg-type]
        for name, index in self.client.owed:
            item = self.client.answers[name].message.prompt.items[index]
            self.orders.append(Encode(request_id=name, item_index=index, item=item, target="thinker"))
        self.client.owed.clear()

    def order(self) -> None:
        message = self.orders.popleft()
        name = float(embeddings_of(message.item)[0, 1])
        self.vision.pool.add(message, torch.tensor([name]))

    async def encode(self) -> None:
        for _, chunk in (await self.vision.step()).chunks:
            self.edge.append(chunk)
            self.vision.sent(chunk)

    def deliver(self) -> None:
        assert not self.thinker.accept(self.edge.popleft())

    def abort(self, name: str) -> None:
        self.edge = deque(chunk for chunk in self.edge if chunk.request_id != name)
        self.orders = deque(order for order in self.orders if order.request_id != name)
        self.vision.abort(name)
        self.thinker.abort(name)

    def possible(self) -> list[str]:
        there = {
            "compute": self.thinker.has_work(),
            "encode": self.vision.has_work(),
            "order": bool(self.orders),
            "deliver": bool(self.edge),
        }
        return [action for action, can_be in there.items() if can_be]

    async def act(self, action: str) -> None:
        match action:
            case "compute":
                await self.compute()
            case "encode":
                await self.encode()
            case "order":
                self.order()
            case "deliver":
                self.deliver()


IMAGES = [Image(f"p{index}", size) for index, size in enumerate((1, 3, 8, 12, 12))]


async def compute_at_random(rng: random.Random, client: Client, pair: Pair) -> set[str]:
    """Returns those that were aborted."""
    aborted: set[str] = set()
    num_requests = rng.randint(2, 8)
    for _ in range(5000):
        actions = pair.possible()
        if len(client.answers) < num_requests:
            actions.append("add")
        if not actions:
            return aborted
        if client.answers and rng.random() < 0.03:
            name = rng.choice(list(client.answers))
            pair.abort(name)
            aborted.add(name)
            continue
        action = rng.choice(actions)
        if action != "add":
            await pair.act(action)
            continue
        parts: list[object] = [[1, 2, 3][: rng.randint(0, 3)]]
        for image in rng.choices(IMAGES, k=rng.randint(0, 3)):
            parts += [image, [rng.randint(1, 30)]]
        prompt = prompt_of(*parts, [4])
        client.add(f"r{len(client.answers)}", prompt, drawn(1, max_tokens=rng.randint(1, 9)))
    raise AssertionError("no end")


@pytest.mark.parametrize("seed", range(40))
def test_every_request_ends_though_no_hold_ends_by_itself(seed: int) -> None:
    rng = random.Random(seed)
    config = config_of(
        num_blocks=rng.choice([16, 33, 65]),
        max_sequences=rng.randint(1, 4),
        max_step_tokens=rng.randint(5, 20),
        mixed_step_tokens=rng.choice([None, 5]),
        encoder_step_tokens=rng.choice([None, 4, 0, 0]),
        max_resident_embedding_tokens=rng.randint(1, 40),
        max_step_visual_tokens=rng.randint(1, 16),
        min_early_tokens=rng.choice([1, 6]),
        prefix_cache=rng.random() < 0.7,
        overlap=rng.random() < 0.5,
    )
    client = Client(config, hold=True)
    max_ahead = rng.choice([0, 0, 5, 1000])
    pair = Pair(client, max_ahead, max_items=rng.randint(1, 3), cache_bytes=rng.choice([0, 1000]))
    aborted = asyncio.run(compute_at_random(rng, client, pair))
    for name in client.answers.keys() - aborted:
        client.check(name)
    assert client.engine.is_idle()
    assert pair.vision.is_idle()
    assert client.engine.check_integrity() is None
    assert pair.vision.check_integrity() is None
    assert not pair.turns.holds(), "something is still waited for"


async def compute_encoder_first(client: Client, pair: Pair) -> int:
    """The encoder begins whenever it may; returns how many pictures it has begun when the first prompt is
    computed."""
    for index in range(4):
        client.add(f"r{index}", prompt_of(Image(f"q{index}", 12), [1]), drawn(1, max_tokens=1))
    begun = 0
    while actions := pair.possible():
        for action in ("order", "encode", "deliver", "compute"):
            if action in actions:
                await pair.act(action)
                break
        if not begun and client.answers["r0"].done:
            begun = pair.encoder.num_calls
    client.check()
    return begun


@pytest.mark.parametrize(("max_ahead", "begun"), [(0, 1), (12, 2), (1000, 4)])
def test_the_encoder_runs_no_further_ahead_than_it_may(max_ahead: int, begun: int) -> None:
    client = Client(config_of(max_step_tokens=13, prefix_cache=False), hold=True)
    pair = Pair(client, max_ahead, max_items=1)
    assert asyncio.run(compute_encoder_first(client, pair)) == begun


def test_a_later_picture_does_not_wait_for_one_that_needs_it() -> None:
    asyncio.run(wait_for_the_first_of_two())


async def wait_for_the_first_of_two() -> None:
    """The second picture of a prompt comes first, from the cache: nothing can be computed with it."""
    client = Client(config_of(), hold=True)
    pair = Pair(client, 0, max_items=1)
    client.add("r", prompt_of(IMAGES[2], [1], IMAGES[3], [2]), drawn(1, max_tokens=1))
    await pair.compute()
    first, second = pair.orders
    pair.orders.clear()
    pair.orders.append(second)
    pair.order()
    await pair.encode()
    pair.deliver()
    pair.orders.append(first)
    pair.order()
    await pair.compute()  # finds that there is nothing to compute
    assert pair.vision.has_work()


def test_a_held_stage_asks_again_in_time_and_only_while_it_is_held() -> None:
    asyncio.run(ask_again())


async def ask_again() -> None:
    client = Client(config_of(), hold=True)
    pair = Pair(client, 0, max_items=1, cache_bytes=1 << 20)  # room for all: nothing to evict
    for name, image in (("a", IMAGES[2]), ("b", IMAGES[3])):
        client.add(name, prompt_of(image, [1]), drawn(1, max_tokens=1))
    await pair.compute()
    pair.order()
    pair.order()
    assert pair.vision.due_in_s() is None
    await pair.encode()
    assert not pair.vision.has_work()
    pair.deliver()
    assert not pair.vision.has_work(), "no step has been planned with it yet"
    assert pair.vision.due_in_s() == MAX_HOLD_S
    pair.vision.abort("b")
    assert pair.vision.due_in_s() is None
    assert pair.turns.hold_left_s() is None
    pair.abort("a")
    assert not pair.turns.holds()


def test_a_step_that_computes_all_of_a_picture_is_waited_for() -> None:
    asyncio.run(wait_for_the_step())


async def wait_for_the_step() -> None:
    client = Client(config_of(overlap=True), hold=True)
    pair = Pair(client, 0, max_items=1, cache_bytes=1 << 20)  # room for all: nothing to evict
    for name, image in (("a", IMAGES[2]), ("b", IMAGES[3])):
        client.add(name, prompt_of(image, [1]), drawn(1, max_tokens=1))
    await pair.compute()
    pair.order()
    pair.order()
    await pair.encode()
    pair.deliver()
    await pair.compute()
    assert client.runner.num_steps == 1
    assert not client.answers["a"].done
    assert not pair.vision.has_work()
    await pair.compute()
    assert client.answers["a"].done
    assert pair.vision.has_work()


@pytest.mark.parametrize(
    ("overrides", "takes_turns"),
    [
        ((), True),
        (("thinker.devices=cuda:1",), False),
        (("vision.devices=cpu",), False),
        (("vision.devices=cpu", "thinker.devices=cpu"), False),
        (("vision.devices=cpu", "thinker.devices=cpu", "vision.max_tokens_ahead=0"), True),
    ],
)
def test_who_shares_a_gpu_takes_turns(
    tiny: Callable[..., Path], overrides: tuple[str, ...], takes_turns: bool
) -> None:
    placed = ("vision.devices=cuda:0", "thinker.devices=cuda:0", "thinker.kv_memory=8MiB", *overrides)
    options = ServeOptions(model=tiny("qwen2_5_vl"), overrides=placed, assumed_gpu_memory="64GiB")
    plan = make_plan(options)
    assert set(make_turns(plan, ("vision", "thinker"))) == ({("vision", "thinker")} if takes_turns else set())
    assert not make_turns(plan, ("vision",)), "the other is in another process"


def test_no_prompt_is_computed_beside_decodes_while_the_encoder_waits_to_begin() -> None:
    asyncio.run(alternate())


def computes_mixed(client: Client) -> bool:
    return any(flight.step.mixed for flight in client.engine._in_flight)


async def alternate() -> None:
    config = config_of(
        max_step_tokens=8, encoder_step_tokens=0, overlap=True, prefix_cache=False, num_blocks=65
    )
    client = Client(config, hold=True)
    pair = Pair(client, 0, max_items=1)
    client.add("decodes", prompt_of([1]), drawn(1, max_tokens=30))
    while not client.answers["decodes"].tokens:
        await pair.compute()
    client.add("long", prompt_of([2] * 60), drawn(1, max_tokens=1))
    client.add("shows", prompt_of(IMAGES[2], [1]), drawn(1, max_tokens=1))
    while not pair.orders:
        await pair.compute()
    pair.order()
    while not computes_mixed(client):
        await pair.compute()
    assert not pair.vision.has_work(), "it waits for that step"
    for _ in range(3):
        await pair.compute()
    assert not computes_mixed(client), "another was planned"
    assert not client.answers["long"].done
    assert pair.vision.has_work()
    await pair.encode()
    while actions := pair.possible():
        await pair.act(actions[0])
    client.check()
