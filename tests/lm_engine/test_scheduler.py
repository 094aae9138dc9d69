"""Policies, budgets, admission, preemption: what single plans look like."""

import asyncio
from dataclasses import dataclass

import pytest

from contracts.errors import BadRequest, ContextLengthExceeded, TooManyRequests
from contracts.messages import Generate
from lm_engine import policies
from lm_engine.budgets import StepDraft
from lm_engine.intake import Intake
from lm_engine.policies import CacheAwareQueue, FairQueue, OrderedQueue, make_queue
from lm_engine.scheduler import Scheduler
from lm_engine.sequence import State, sample_seed
from tests.lm_engine.harness import (
    Client,
    Image,
    config_of,
    drawn,
    embeddings_of,
    greedy,
    mrope,
    prompt_of,
)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def sequences(*fields: dict, config=None, clock=None, prompts=None):
    """The first sample of one request per set of Generate fields."""
    intake = Intake(config or config_of(), mrope, clock or Clock())
    out = []
    for i, each in enumerate(fields):
        prompt = prompts[i] if prompts else prompt_of([1, 2, 3])
        message = Generate(request_id=f"r{i}", prompt=prompt, sampling=greedy(), **each)
        out.append(intake.make_request(message).sequences[0])
    return out


def order(queue) -> list[str]:
    names = []
    while (seq := queue.peek()) is not None:
        queue.take(seq)
        names.append(seq.request.id)
    return names


# --- policies -----------------------------------------------------------------------------------------------
def test_fcfs_keeps_arrival_order_also_for_a_preempted_one():
    queue = make_queue("fcfs", 8, lambda _: 0)
    a, b, c = sequences({"priority": 5}, {}, {})
    for seq in (c, b, a):
        queue.push(seq)
    assert queue.peek(skip={a}) is b
    assert order(queue) == ["r0", "r1", "r2"]
    assert len(queue) == 0


def test_priority_ages():
    clock = Clock()
    config = config_of(policy="priority", aging_s=10.0)
    intake = Intake(config, mrope, clock)
    queue = make_queue("priority", 8, lambda _: 0)
    assert isinstance(queue, OrderedQueue)

    def arrive(name, priority):
        message = Generate(request_id=name, prompt=prompt_of([1]), sampling=greedy(), priority=priority)
        queue.push(intake.make_request(message).sequences[0])

    arrive("low, early", 2)
    clock.now += 15
    arrive("high", 0)
    clock.now += 10
    arrive("high, late", 0)  # by now the low one has waited 25 s, worth 2.5 levels
    assert order(queue) == ["high", "low, early", "high, late"]


def test_fair_serves_the_tenant_that_was_given_least():
    queue = make_queue("fair", 8, lambda _: 0)
    assert isinstance(queue, FairQueue)
    heavy = sequences(*({"tenant": "heavy"} for _ in range(4)))
    (light,) = sequences({"tenant": "light"})
    for seq in heavy:
        queue.push(seq)
    queue.take(heavy[0])
    queue.charge("heavy", 100, 0)
    queue.push(light)  # lifted to heavy's counter: it did not save up while it was away
    queue.charge("light", 10, 0)
    assert queue.peek() is heavy[1]
    queue.charge("heavy", 0, 10)  # an output token weighs two
    assert queue.peek() is light
    queue.take(light)
    assert order(queue) == ["r1", "r2", "r3"]


def test_fair_shares_tokens_between_a_flood_and_a_trickle():
    """Of two tenants with equal requests each gets half, however many one of them queues."""
    client = Client(config_of(policy="fair", max_sequences=2, max_step_tokens=16))
    for i in range(12):
        client.add(
            f"flood{i}", prompt_of([1, 2, i + 1]), drawn(i, max_tokens=4, ignore_eos=True), tenant="flood"
        )
    for i in range(3):
        client.add(f"few{i}", prompt_of([5, 6, i + 1]), drawn(i, max_tokens=4, ignore_eos=True), tenant="few")
    finished: list[str] = []

    async def go():
        while client.engine.has_work():
            await client.step()
            finished.extend(n for n, a in client.answers.items() if a.done and n not in finished)

    asyncio.run(go())
    client.check()
    assert max(finished.index(f"few{i}") for i in range(3)) <= 7


def test_fair_forgets_idle_tenants(monkeypatch):
    monkeypatch.setattr(policies, "MAX_TENANTS_REMEMBERED", 64)
    queue = FairQueue()
    for i in range(300):
        (seq,) = sequences({"tenant": f"t{i}"})
        queue.push(seq)
        queue.take(seq)
    assert len(queue._given) <= 65


def test_cache_aware_prefers_cached_prefixes_but_defers_boundedly():
    scores: dict[str, int] = {}
    queue = make_queue("cache_aware", 2, lambda seq: scores[seq.request.id])
    assert isinstance(queue, CacheAwareQueue)
    seqs = sequences(*({} for _ in range(6)))
    scores |= {f"r{i}": i for i in range(6)}
    for seq in seqs:
        queue.push(seq)
    # r0 is overtaken twice, then goes; r1 and those after it had been overtaken as often.
    assert order(queue) == ["r5", "r4", "r0", "r1", "r2", "r3"]


# --- one plan -----------------------------------------------------------------------------------------------
def scheduler_of(*prompts, sampling=None, **changes) -> tuple[Scheduler, list]:
    config = config_of(**changes)
    scheduler = Scheduler(config)
    requests = requests_of(*prompts, config=config, sampling=sampling)
    for request in requests:
        scheduler.add(request)
    return scheduler, requests


def requests_of(*prompts, config, sampling=None) -> list:
    intake = Intake(config, mrope, Clock())
    return [
        intake.make_request(Generate(request_id=f"r{i}", prompt=prompt, sampling=sampling or greedy()))
        for i, prompt in enumerate(prompts)
    ]


def give(scheduler: Scheduler, request, item: int) -> None:
    rows = embeddings_of(request.message.prompt.items[item])
    assert scheduler.ledger.arrived(request, item, rows)
    scheduler.room.unpark(request)


def chunks(step) -> list[tuple[int, int]]:
    return [(row.start, row.num_tokens) for row in step.plan.sequences]


def test_a_long_prefill_is_capped_and_the_rest_of_the_step_goes_to_others():
    scheduler, _ = scheduler_of(prompt_of(list(range(1, 31))), prompt_of([1] * 20), long_prefill_cap=10)
    step, _ = scheduler.plan()
    assert chunks(step) == [(0, 10), (0, 10)]
    step, _ = scheduler.plan()
    assert chunks(step) == [(10, 10), (10, 10)]
    assert [row.samples for row in step.plan.sequences] == [False, True]


def test_steps_are_smaller_while_sequences_decode():
    prompts = prompt_of([1, 2]), prompt_of([1] * 30), prompt_of([2] * 30)
    scheduler, (first, *_) = scheduler_of(*prompts, mixed_step_tokens=12, long_prefill_cap=30)
    step, _ = scheduler.plan()
    assert (chunks(step), step.num_tokens) == ([(0, 2), (0, 30)], 32)
    step, _ = scheduler.plan()
    assert (chunks(step), step.num_tokens) == ([(2, 1), (30, 1), (0, 10)], 12)
    for sequence in step.sequences[:2]:
        scheduler.finish(sequence)
    step, _ = scheduler.plan()
    assert (chunks(step), step.num_tokens) == ([(10, 20)], 20)
    assert first.num_unfinished == 0


def test_short_prompts_need_not_wait_for_a_long_one():
    prompts = [prompt_of([index] * size) for index, size in enumerate((100, 30, 4, 3, 6))]
    scheduler, _ = scheduler_of(max_step_tokens=20, num_blocks=65)
    requests = requests_of(*prompts, config=scheduler.config)
    for request in requests[:2]:
        scheduler.add(request)
    step, _ = scheduler.plan()
    assert chunks(step) == [(0, 20)]
    step, _ = scheduler.plan()
    assert chunks(step) == [(20, 20)], "the one that waits is none of them"
    for request in requests[2:4]:
        scheduler.add(request)
    step, _ = scheduler.plan()
    assert chunks(step) == [(40, 15), (0, 4)], "of four tokens, not part of one of three"
    step, _ = scheduler.plan()
    assert chunks(step) == [(4, 1), (55, 15), (0, 3)]
    scheduler.add(requests[4])
    step, _ = scheduler.plan()
    assert chunks(step) == [(5, 1), (3, 1), (70, 18)], "it is too long for a quarter"


def test_priorities_are_not_turned_around_for_short_prompts():
    prompts = prompt_of([1] * 100), prompt_of([2] * 4)
    scheduler, _ = scheduler_of(*prompts, max_step_tokens=20, num_blocks=65, policy="priority")
    scheduler.plan()
    step, _ = scheduler.plan()
    assert chunks(step) == [(20, 20)]


@dataclass
class Tower:
    encoding: bool

    def publish(self, num_rows_ahead: int, *, mixed: bool) -> None:
        pass


def test_steps_are_smaller_still_while_an_encoder_computes_beside_them():
    prompts = prompt_of([1] * 4), prompt_of([2] * 30)
    scheduler, _ = scheduler_of(
        *prompts, mixed_step_tokens=12, encoder_step_tokens=8, long_prefill_cap=30, max_step_tokens=14
    )
    scheduler.neighbour = tower = Tower(encoding=True)
    step, _ = scheduler.plan()
    assert chunks(step) == [(0, 4), (0, 10)], "nobody decodes yet"
    step, _ = scheduler.plan()
    assert chunks(step) == [(4, 1), (10, 7)]
    tower.encoding = False
    step, _ = scheduler.plan()
    assert chunks(step) == [(5, 1), (17, 11)]


def test_nothing_but_decodes_beside_an_encoder():
    prompts = prompt_of([1] * 4), prompt_of([2] * 30)
    scheduler, _ = scheduler_of(*prompts, encoder_step_tokens=0, max_step_tokens=14)
    scheduler.neighbour = tower = Tower(encoding=True)
    step, _ = scheduler.plan()
    assert (chunks(step), step.mixed) == ([(0, 4), (0, 10)], False), "nobody decodes yet"
    step, _ = scheduler.plan()
    assert (chunks(step), step.mixed) == ([(4, 1)], False)
    tower.encoding = False
    step, _ = scheduler.plan()
    assert (chunks(step), step.mixed) == ([(5, 1), (10, 13)], True)


def test_a_chunk_ends_where_embeddings_are_missing_and_others_go_on():
    scheduler, (first, second) = scheduler_of(
        prompt_of([1, 2, 3], Image("a", 5), [4], Image("b", 2), [5]), prompt_of([1, 2])
    )
    step, asks = scheduler.plan()
    assert chunks(step) == [(0, 3), (0, 2)]
    assert [(a.request_id, a.item_indices) for a in asks] == [("r0", (0, 1))]
    give(scheduler, first, 0)
    step, asks = scheduler.plan()
    assert chunks(step) == [(2, 1), (3, 6)]  # decode first, then up to item b
    assert [(p.start, p.length, p.source_start) for p in step.plan.span_pieces] == [(3, 5, 0)]
    assert asks == []
    assert second.num_running == 1


def test_a_request_that_starts_with_a_missing_item_is_passed_over():
    scheduler, (first, _) = scheduler_of(prompt_of(Image("a", 5), [1]), prompt_of([1, 2]), max_sequences=1)
    step, asks = scheduler.plan()
    assert [admission.num_prompt_tokens for admission in step.plan.admissions] == [2]
    assert asks[0].request_id == "r0"
    assert first.sequences[0].parked


def test_little_text_before_a_missing_item_waits_for_it():
    prompts = [prompt_of([1] * 5, Image("a", 8), [2] * text) for text in (1, 2)]
    early = prompt_of([3] * 6, Image("b", 2), [4])
    scheduler, (first, second, _) = scheduler_of(*prompts, early, min_early_tokens=6, min_shared_tokens=8)
    step, asks = scheduler.plan()
    assert chunks(step) == [(0, 6)]
    assert [ask.item_indices for ask in asks] == [(0,)] * 3
    give(scheduler, second, 0)
    give(scheduler, first, 0)
    step, _ = scheduler.plan()
    assert chunks(step) == [(0, 14)]
    step, _ = scheduler.plan()
    assert chunks(step) == [(14, 1), (12, 3)]
    assert second.num_cached_tokens == 12  # of the picture too, which both had asked for


def test_visual_budget_leaves_decodes_alone():
    images = [Image(f"i{k}", 10) for k in range(12)]
    scheduler, (text, many) = scheduler_of(
        prompt_of([1, 2]),
        prompt_of([3], *images),
        max_step_visual_tokens=6,
        max_resident_embedding_tokens=200,
        sampling=greedy(max_tokens=40, ignore_eos=True),
    )
    scheduler.plan()
    for item in range(12):
        give(scheduler, many, item)
    seen = 0
    for _ in range(20):
        step, _ = scheduler.plan()
        assert step.plan.sequences[0].slot == text.sequences[0].slot
        visual = sum(piece.length for piece in step.plan.span_pieces)
        assert visual == 6
        seen += visual
        land(text, 9)
    assert seen == 120


def test_visual_budget_counts_the_whole_span():  # SCH-02
    mask = (True, True, False) * 4
    scheduler, (request,) = scheduler_of(prompt_of(Image("rows", 12, mask), [1]), max_step_visual_tokens=6)
    scheduler.plan()
    give(scheduler, request, 0)
    step, _ = scheduler.plan()
    assert chunks(step) == [(0, 6)]  # six positions, of which four take a row
    assert [(p.start, p.length, p.source_start) for p in step.plan.span_pieces] == [(0, 2, 0), (3, 2, 2)]
    step, _ = scheduler.plan()
    assert [(p.start, p.length, p.source_start) for p in step.plan.span_pieces] == [(6, 2, 4), (9, 2, 6)]


@pytest.mark.parametrize("cap", [3, 8, 24])
def test_atomic_spans_are_never_split(cap):  # SCH-07
    prompt = prompt_of([1, 2], Image("a", 9), Image("b", 11), [3, 4, 5])
    client = Client(config_of(atomic_spans=True, long_prefill_cap=cap, max_step_visual_tokens=4))
    for i in range(3):
        client.add(f"r{i}", prompt, drawn(i, n=2))
    client.run()
    client.check()
    for plan in client.runner.plans:
        for row in plan.sequences:
            for span in prompt.spans:
                start, end = row.start, row.start + row.num_tokens
                inside = min(end, span.end) - max(start, span.offset)
                assert inside <= 0 or inside == span.length


def test_atomic_spans_that_never_fit_are_refused():  # SCH-07
    with pytest.raises(ValueError, match="must not be split"):
        config_of(atomic_spans=True, max_step_tokens=32, max_sequences=8, max_item_tokens=25)
    client = Client(config_of(atomic_spans=True, max_step_tokens=32, max_sequences=8))
    with pytest.raises(BadRequest, match=r"25 tokens.* at most 24"):
        client.add("a", prompt_of(Image("a", 25)))
    client.add("b", prompt_of(Image("a", 24)))
    client.run()
    client.check()


def test_running_sequences_keep_their_memory_and_the_latest_is_preempted():
    scheduler, (first, second) = scheduler_of(
        prompt_of([1] * 7), prompt_of([2] * 7), num_blocks=5, sampling=greedy(max_tokens=12, ignore_eos=True)
    )
    scheduler.plan()
    for _ in range(2):
        land(first, 9)
        land(second, 9)
        step, _ = scheduler.plan()
    assert scheduler.counters.preemptions == 1
    assert step.plan.released_slots == (1,)
    assert len(step.plan.sequences) == 1
    assert second.sequences[0].slot == -1
    assert first.sequences[0].slot >= 0
    assert scheduler.check_integrity() is None


def test_low_priority_is_preempted_before_late():
    client = Client(config_of(num_blocks=7, policy="priority"))
    client.add("low", prompt_of([1] * 7), greedy(max_tokens=12, ignore_eos=True), priority=3)
    client.add("high", prompt_of([2] * 7), greedy(max_tokens=12, ignore_eos=True))
    finished = []

    async def go():
        while client.engine.has_work():
            await client.step()
            finished.extend(n for n, a in client.answers.items() if a.done and n not in finished)

    asyncio.run(go())
    client.check()
    assert client.engine.stats()["num_preemptions_total"] >= 1
    assert finished == ["high", "low"]


def test_blocks_filled_in_a_step_are_hit_from_the_next_step_on():
    prompt = prompt_of([1, 2, 3, 4, 5, 6, 7, 8, 9])
    scheduler, (first, second) = scheduler_of(prompt, prompt)
    step, _ = scheduler.plan()
    assert chunks(step) == [(0, 9), (0, 9)]  # the second may not read what the first is about to write
    message = Generate(request_id="r2", prompt=prompt, sampling=greedy())
    scheduler.add(Intake(scheduler.config, mrope).make_request(message))
    step, _ = scheduler.plan()
    assert (8, 1) in chunks(step)
    admission = step.plan.admissions[0]
    assert list(admission.block_ids[:2]) == first.sequences[0].block_ids[:2]
    assert second.num_cached_tokens == 0


def test_of_equal_beginnings_one_is_computed_for_all():
    same = [*range(1, 13), *range(1, 13)]
    prompts = prompt_of(same, [1]), prompt_of(same, [2]), prompt_of(same[:8], [3] * 16), prompt_of([4] * 9)
    scheduler, (first, second, third, _) = scheduler_of(*prompts, min_shared_tokens=8, long_prefill_cap=12)
    step, _ = scheduler.plan()
    assert chunks(step) == [
        (0, 12),
        (0, 9),
    ]  # the others wait for the first; the last has nothing to do with it
    step, _ = scheduler.plan()
    assert chunks(step) == [(9, 1), (12, 12), (8, 12)]  # the third shares no more than the first has computed
    assert third.num_cached_tokens == 8
    step, _ = scheduler.plan()
    assert chunks(step)[1:] == [(24, 1), (20, 4), (24, 1)]
    assert second.num_cached_tokens == 24
    assert second.sequences[0].block_ids[:6] == first.sequences[0].block_ids[:6]
    assert scheduler.check_integrity() is None


def test_who_waited_for_a_prefill_that_ends_computes_for_itself_and_for_others():
    prompts = [prompt_of([5] * 30, [index]) for index in range(3)]
    scheduler, (first, second, third) = scheduler_of(*prompts, min_shared_tokens=8, long_prefill_cap=6)
    step, _ = scheduler.plan()
    assert chunks(step) == [(0, 6)]
    scheduler.remove(first)
    step, _ = scheduler.plan()
    assert chunks(step) == [(4, 6)]
    assert [seq.request for seq in step.sequences] == [second]
    scheduler.remove(third)
    assert scheduler.check_integrity() is None


@pytest.mark.parametrize(("salts", "least"), [(("a", "b"), 8), ((None, None), 24), ((None, None), None)])
def test_nobody_waits_for_what_it_cannot_share_or_for_little(salts, least):
    config = config_of(min_shared_tokens=least)
    scheduler, intake = Scheduler(config), Intake(config, mrope, Clock())
    for name, salt in zip("ab", salts, strict=True):
        prompt = prompt_of([5] * 14, [len(scheduler.requests)])
        message = Generate(request_id=name, prompt=prompt, sampling=greedy(), cache_salt=salt)
        scheduler.add(intake.make_request(message))
    step, _ = scheduler.plan()
    assert chunks(step) == [(0, 15), (0, 15)]


def test_samples_fork_from_the_first_finished_prefill():
    prompt = prompt_of([1, 2, 3, 4, 5, 6, 7, 8, 9, 10])
    scheduler, (request,) = scheduler_of(prompt, sampling=drawn(n=3))
    step, _ = scheduler.plan()
    assert chunks(step) == [(0, 10)]
    step, _ = scheduler.plan()
    assert chunks(step) == [(10, 1), (9, 1), (9, 1)]
    leader, *others = request.sequences
    for seq in others:
        assert seq.block_ids[:2] == leader.block_ids[:2]
        assert seq.block_ids[2] != leader.block_ids[2]
        assert (leader.block_ids[2], seq.block_ids[2]) in step.plan.block_copies
    assert scheduler.check_integrity() is None


def land(request, *tokens: int) -> None:
    """As if the step's results had come: one token for each sample that waits for one."""
    for seq, token in zip([s for s in request.sequences if s.num_in_flight], tokens, strict=True):
        seq.token_ids.append(token)
        seq.num_in_flight -= 1


def preempt(scheduler: Scheduler, *victims) -> None:
    for seq in victims:
        scheduler._preempt(seq, StepDraft(0, 0))


def test_a_copy_is_never_copied_in_the_same_step():
    scheduler, (request,) = scheduler_of(prompt_of([1, 2, 3, 4, 5, 6]), sampling=drawn(n=3))
    scheduler.plan()
    land(request, 9)
    scheduler.plan()
    land(request, 9, 9, 9)
    first, second, third = request.sequences
    preempt(scheduler, first, second)
    step, _ = scheduler.plan()
    assert [source for source, _ in step.plan.block_copies] == [third.block_ids[1]] * 2
    assert {target for _, target in step.plan.block_copies} == {first.block_ids[1], second.block_ids[1]}


def test_a_sample_does_not_fork_from_a_prefill_of_the_same_step():
    scheduler, (request,) = scheduler_of(
        prompt_of([1, 2, 3, 4, 5, 6]), sampling=drawn(n=2), prefix_cache=False
    )
    scheduler.plan()
    land(request, 9)
    scheduler.plan()
    land(request, 9, 9)
    preempt(scheduler, *request.sequences)
    step, _ = scheduler.plan()
    assert step.plan.block_copies == ()
    assert chunks(step) == [(0, 8), (0, 7)]


def test_a_preempted_sequence_waits_for_the_token_it_drew():
    scheduler, (request,) = scheduler_of(prompt_of([1, 2, 3]))
    scheduler.plan()
    preempt(scheduler, request.sequences[0])
    assert scheduler.plan()[0] is None  # its last token is not known on the host yet
    land(request, 9)
    step, _ = scheduler.plan()
    assert step.plan.admissions[0].token_ids == [1, 2, 3, 9]


def test_nobody_is_admitted_in_a_step_that_preempted():
    config = config_of(num_blocks=6, max_sequences=2, policy="priority")
    scheduler = Scheduler(config)
    intake = Intake(config, mrope, Clock())

    def arrive(name, prompt, priority):
        sampling = greedy(max_tokens=12, ignore_eos=True)
        message = Generate(request_id=name, prompt=prompt, sampling=sampling, priority=priority)
        request = intake.make_request(message)
        scheduler.add(request)
        return request

    old, large = arrive("old", prompt_of([1] * 7), 0), arrive("large", prompt_of([2] * 11), 5)
    scheduler.plan()
    small = arrive("small", prompt_of([3]), 1)
    for _ in range(2):
        land(old, 9)
        land(large, 9)
        step, _ = scheduler.plan()
    assert large.sequences[0].state is State.WAITING
    assert len(step.plan.sequences) == 1
    assert step.plan.admissions == ()
    land(old, 9)
    step, _ = scheduler.plan()
    assert len(step.plan.admissions) == 1
    assert small.num_running == 1


def test_sample_seeds_are_fixed_and_spread():
    assert [sample_seed(0, 0), sample_seed(1, 0), sample_seed(0, 1)] == [
        sample_seed(1 << 64, 0),
        sample_seed(1 + (1 << 64), 0),
        sample_seed(0, 1),
    ]
    seeds = {sample_seed(s, i) for s in range(-50, 50) for i in range(50)}
    assert len(seeds) == 5000
    assert all(0 <= seed < 1 << 63 for seed in seeds)
    assert sample_seed(1234, 2) == 5374077976233291326  # changing the mix changes every client's draws


# --- the door -----------------------------------------------------------------------------------------------
def test_context_length_counts_text_media_and_output():  # SCH-06
    config = config_of(context_length=40, num_blocks=65)
    fits = prompt_of([1] * 3, Image("a", 31))
    client = Client(config)
    client.add("exact", fits, greedy(max_tokens=6))
    client.run()
    client.check()
    with pytest.raises(ContextLengthExceeded) as caught:
        client.add("over", fits, greedy(max_tokens=7))
    assert caught.value.status == 400
    for part in ("40", "41", "3 text", "31 media", "7 output"):
        assert part in caught.value.message
    assert client.engine.is_idle()


def test_a_prompt_that_never_fits_the_cache_is_refused_and_the_largest_is_served():
    client = Client(config_of(num_blocks=4))  # 12 tokens
    with pytest.raises(ContextLengthExceeded, match="holds 12 tokens, the prompt alone has 13"):
        client.add("over", prompt_of([1] * 13), greedy(max_tokens=1))
    client.add("exact", prompt_of([1] * 12), greedy(max_tokens=1))
    outgrows = client.add("outgrows", prompt_of([2] * 10), greedy(max_tokens=50, ignore_eos=True))
    client.run()
    client.check()
    assert outgrows.reasons == ["length"]
    assert len(outgrows.tokens[0]) == 3  # the last token needs no KV


def test_the_waiting_queue_is_bounded():
    clock = Clock()
    client = Client(config_of(max_waiting_requests=3, max_sequences=1), clock=clock)
    for i in range(3):
        client.add(f"r{i}", prompt_of([1, 2, 3]))
    with pytest.raises(TooManyRequests) as caught:
        client.add("over", prompt_of([1, 2, 3]))
    assert caught.value.retry_after_s == 1.0  # nothing measured yet
    client.add("replayed", prompt_of([1, 2, 3]), resume=((5,),))  # was let in before
    client.run()
    del client.answers["replayed"]  # its first token is not what the model would have drawn
    client.add("again", prompt_of([1, 2, 3]))
    client.run()
    client.check()


def test_the_waiting_queue_is_bounded_in_tokens():
    client = Client(config_of(max_waiting_tokens=30, max_sequences=1))
    client.add("large", prompt_of([1] * 40))  # alone it may exceed the bound
    with pytest.raises(TooManyRequests):
        client.add("next", prompt_of([1]))
    client.run()
    client.add("a", prompt_of([1] * 20))
    client.add("b", prompt_of([1] * 10))
    with pytest.raises(TooManyRequests):
        client.add("c", prompt_of([1]))
    client.run()
    client.check()


def test_retry_after_follows_the_measured_rate():
    clock = Clock()

    def gate(plan):
        clock.now += 0.5 * plan.num_tokens  # two tokens a second

    client = Client(config_of(max_waiting_requests=1, max_sequences=1), clock=clock, gate=gate)
    client.add("warm", prompt_of([1] * 10), greedy(max_tokens=3, ignore_eos=True))
    client.run()
    client.add("waits", prompt_of([1] * 24))
    with pytest.raises(TooManyRequests) as caught:
        client.add("over", prompt_of([1]))
    assert caught.value.retry_after_s == pytest.approx(12.0)


@pytest.mark.parametrize(
    "changes",
    [
        {"max_step_tokens": 4, "max_sequences": 8},
        {"mixed_step_tokens": 4, "max_sequences": 8},
        {"num_blocks": 1},
        {"max_step_visual_tokens": 0},
        {"long_prefill_cap": 0},
    ],
)
def test_bounds_that_cannot_progress_are_refused_at_build(changes):
    with pytest.raises(ValueError, match=r"want|below"):
        config_of(**changes)


def test_nobody_stands_behind_those_who_wait_for_a_prefill():
    """More than a step looks at wait for one long beginning; a small stranger comes last."""
    same = [1] * 200
    prompts = [prompt_of(same, [index]) for index in range(2, 35)]
    prompts += [prompt_of(same, [index, index]) for index in range(2, 35)]
    prompts += [prompt_of(same, [index, index, index]) for index in range(2, 35)]
    scheduler, requests = scheduler_of(
        *prompts, prompt_of([3, 4]), min_shared_tokens=8, long_prefill_cap=12, max_step_tokens=16
    )
    small = requests[-1].sequences[0]
    for _ in range(3):
        scheduler.plan()
        assert scheduler.check_integrity() is None
    assert small.state is State.RUNNING
    assert scheduler.num_running_sequences == 2, "the others still wait for the first"
    scheduler.remove(requests[1])
    scheduler.remove(requests[0])
    scheduler.plan()
    assert requests[2].sequences[0].state is State.RUNNING, "one of them goes on with it"
    assert scheduler.num_running_sequences == 2
    for request in requests[2:]:
        scheduler.remove(request)
    assert scheduler.check_idle() is None
