"""The engine's loops: whatever the schedule, each sample gets exactly the reference's tokens."""

import asyncio
import dataclasses
import gc
import threading
import weakref

import pytest
import torch

from contracts.errors import EngineError, ServiceUnavailable
from lm_engine.scheduler import Scheduler
from lm_engine.sequence import State
from tests.lm_engine.harness import EOS, Client, Image, config_of, drawn, embeddings_of, greedy, prompt_of

BOTH_LOOPS = pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlapped"])
TEXT = prompt_of([1, 2, 3, 4, 5, 6])
PICTURE = prompt_of([1, 2, 3], Image("cat", 6), [4, 5])


def ending_with_eos() -> tuple[int, int]:
    """A seed of TEXT whose 2nd … 5th token is the end token, and its index."""
    for seed in range(400):
        client = Client(config_of())
        answer = client.add("a", TEXT, drawn(seed, max_tokens=5))
        client.run()
        if answer.reasons == ["stop"] and len(answer.tokens[0]) > 1:
            return seed, len(answer.tokens[0]) - 1
    raise AssertionError("no such seed")


SEED, EOS_AT = ending_with_eos()


# --- ends ---------------------------------------------------------------------------------------------------
@BOTH_LOOPS
def test_end_token_ends_and_is_the_last_token(overlap):
    client = Client(config_of(overlap=overlap))
    answer = client.add("a", TEXT, drawn(SEED, max_tokens=20))
    client.run()
    client.check()
    assert answer.reasons == ["stop"]
    assert answer.stops == [EOS]
    assert answer.tokens[0][-1] == EOS
    assert len(answer.tokens[0]) == EOS_AT + 1


@BOTH_LOOPS
def test_ignore_eos_and_max_tokens(overlap):
    client = Client(config_of(overlap=overlap))
    answer = client.add("a", TEXT, drawn(SEED, max_tokens=9, ignore_eos=True))
    one = client.add("b", TEXT, drawn(SEED, max_tokens=1))
    client.run()
    client.check()
    assert (answer.reasons, len(answer.tokens[0])) == (["length"], 9)
    assert answer.tokens[0][EOS_AT] == EOS
    assert (one.reasons, len(one.tokens[0])) == (["length"], 1)


@BOTH_LOOPS
def test_stop_token_ids_and_min_tokens(overlap):
    first = Client(config_of())
    free = first.add("a", TEXT, drawn(3, max_tokens=12, ignore_eos=True))
    first.run()
    stop = free.tokens[0][2]
    client = Client(config_of(overlap=overlap))
    stopped = client.add("a", TEXT, drawn(3, max_tokens=12, ignore_eos=True, stop_token_ids=(stop,)))
    late = client.add(
        "b", TEXT, drawn(3, max_tokens=12, ignore_eos=True, stop_token_ids=(stop,), min_tokens=5)
    )
    client.run()
    client.check()
    assert stopped.stops == [stop]
    assert len(stopped.tokens[0]) == free.tokens[0].index(stop) + 1
    assert len(late.tokens[0]) >= 6 or late.reasons == ["length"]
    assert stop not in late.tokens[0][:5]  # the runner masks it, as it is told through the admission


def test_the_extra_row_of_a_stopped_sequence_is_discarded():
    client = Client(config_of(overlap=True))
    client.add("a", TEXT, drawn(SEED, max_tokens=20))
    client.run()
    client.check()
    rows = sum(row.samples for plan in client.runner.plans for row in plan.sequences)
    assert rows == EOS_AT + 2  # one more than tokens sent


def test_logprobs_travel_with_their_token():
    client = Client(config_of())
    client.add("a", TEXT, greedy(logprobs=1, max_tokens=2))
    deltas = []

    async def go():
        while client.engine.has_work():
            for message in (await client.engine.step()).messages:
                deltas.extend(message.deltas)

    asyncio.run(go())
    assert [delta.logprobs[0].chosen for delta in deltas] == [-6.0, -7.0]
    assert all(delta.logprobs[0].top[0][0] == delta.token_ids[0] for delta in deltas)


# --- samples ------------------------------------------------------------------------------------------------
@BOTH_LOOPS
@pytest.mark.parametrize(
    "prompt", [TEXT, PICTURE, prompt_of([9]), prompt_of([1, 2, 3, 4, 5], Image("end", 7))]
)
@pytest.mark.parametrize("slots", [2, 8])
def test_n_samples_share_the_prompt(overlap, prompt, slots):
    client = Client(config_of(overlap=overlap, max_sequences=slots))
    client.add("four", prompt, drawn(5, n=4, max_tokens=7, ignore_eos=True))
    client.add("one", prompt, drawn(5, n=1, max_tokens=7, ignore_eos=True))
    client.run()
    client.check()
    four, one = client.answers["four"], client.answers["one"]
    assert four.tokens[0] == one.tokens[0]  # sample 0 does not depend on n
    assert len({tuple(tokens) for tokens in four.tokens}) == 4


def test_n_samples_compute_the_prompt_once():
    client = Client(config_of(prefix_cache=False))
    prompt = prompt_of(list(range(1, 21)))
    client.add("a", prompt, drawn(5, n=4, max_tokens=2, ignore_eos=True))
    client.run()
    client.check()
    assert client.runner.num_computed_tokens == 20 + 3 + 4  # prompt, last token of three, one token each


@BOTH_LOOPS
def test_samples_left_over_when_the_first_is_stopped_early(overlap):
    client = Client(config_of(overlap=overlap, long_prefill_cap=2))
    client.add("a", TEXT, drawn(5, n=3))

    async def go():
        await client.step()
        client.engine.stop_sample("a", 0)  # in the middle of the prefill that the others wait for
        await client.drain()

    asyncio.run(go())
    answer, expected = client.answers["a"], client.expect("a")
    assert answer.tokens == [[], expected[1], expected[2]]
    assert answer.reasons[0] is None
    assert client.engine.is_idle()


@BOTH_LOOPS
def test_stop_sample_ends_one_and_no_other(overlap):
    client = Client(config_of(overlap=overlap))
    client.add("a", TEXT, drawn(5, n=2, max_tokens=12, ignore_eos=True))

    async def go():
        while len(client.answers["a"].tokens[1]) < 3:
            await client.step()
        before = list(client.answers["a"].tokens[1])
        client.engine.stop_sample("a", 1)
        await client.drain()
        return before

    before = asyncio.run(go())
    assert client.answers["a"].tokens == [client.expect("a")[0], before]
    client.engine.stop_sample("a", 0)  # gone: nothing happens
    assert client.engine.check_integrity() is None
    assert client.engine.is_idle()


# --- replay -------------------------------------------------------------------------------------------------
@BOTH_LOOPS
@pytest.mark.parametrize("sent", [(0, 0), (3, 0), (2, 6), (1, 1)])
def test_replayed_samples_go_on_where_they_were(overlap, sent):
    sampling = drawn(8, n=2, max_tokens=9, ignore_eos=True)
    first = Client(config_of())
    first.add("a", PICTURE, sampling)
    first.run()
    tokens = first.answers["a"].tokens
    resume = tuple(tuple(tokens[i][: sent[i]]) for i in range(2))
    client = Client(config_of(overlap=overlap))
    client.add("a", PICTURE, sampling, resume=resume)
    client.run()
    client.check()  # the harness starts from `resume`: a token sent twice would show


@BOTH_LOOPS
def test_a_replayed_sample_that_was_complete_only_ends(overlap):
    client = Client(config_of(overlap=overlap))
    first = Client(config_of())
    first.add("a", TEXT, drawn(SEED, n=2))
    first.run()
    tokens = first.answers["a"].tokens
    answer = client.add("a", TEXT, drawn(SEED, n=2), resume=(tuple(tokens[0]), ()))
    client.run()
    assert answer.reasons[0] == "stop"
    assert answer.tokens == tokens
    both = client.add("b", TEXT, drawn(SEED, n=2), resume=(tuple(tokens[0]), tuple(tokens[1])))
    assert client.engine.has_work()
    client.run()
    assert both.reasons == first.answers["a"].reasons
    assert client.engine.is_idle()


# --- embeddings ---------------------------------------------------------------------------------------------
@BOTH_LOOPS
def test_waiting_for_embeddings_is_no_work(overlap):
    client = Client(config_of(overlap=overlap), hold=True)
    client.add("a", PICTURE)

    async def go():
        await client.drain()
        assert client.owed == [("a", 0)]
        assert not client.engine.has_work()
        assert (await client.engine.step()).messages == ()  # returns, though nothing can be done
        assert not client.engine.has_work()
        assert not client.engine.is_idle()
        client.add("b", TEXT)
        await client.drain()
        client.check("b")
        client.deliver()
        assert client.engine.has_work()
        await client.drain()

    asyncio.run(go())
    client.check()


@BOTH_LOOPS
def test_requests_for_embeddings_do_not_wait_for_a_running_step(overlap):
    release = threading.Event()

    def gate(plan):
        if not release.wait(5):
            raise RuntimeError("nobody lets the step run")

    client = Client(config_of(overlap=overlap), threaded=True, gate=gate, hold=True)
    client.add("a", PICTURE)

    async def go():
        client.take((await client.engine.step()).messages)
        assert client.owed == [("a", 0)]  # the step that computes the text before the picture still runs
        release.set()
        await client.drain()
        client.deliver()
        await client.drain()

    asyncio.run(go())
    client.check()
    client.engine.close()


@BOTH_LOOPS
@pytest.mark.parametrize("shape", [(5, 2), (7, 2), (6, 3), (6,)])
def test_rows_of_the_wrong_shape_fail_only_their_request(overlap, shape):  # CAC-13
    client = Client(config_of(overlap=overlap), hold=True)
    client.add("bad", PICTURE)
    client.add("good", prompt_of([7, 8], Image("dog", 5), [9]))

    async def go():
        await client.drain()
        client.engine.embeddings_ready("bad", 0, torch.zeros(shape))
        await client.drain()
        client.deliver()
        await client.drain()

    asyncio.run(go())
    error = client.answers["bad"].error
    assert error is not None
    assert error.error.kind == "EngineError"
    assert "(6, 2)" in error.error.message
    client.check("good")
    assert client.engine.is_idle()
    assert client.engine.check_integrity() is None


def test_late_repeated_and_unknown_embeddings_are_ignored():
    client = Client(config_of(), hold=True)
    client.add("a", PICTURE)
    rows = embeddings_of(PICTURE.items[0])

    async def go():
        client.engine.embeddings_ready("nobody", 0, rows)
        client.engine.embeddings_ready("a", 0, rows)  # before it asked
        await client.drain()
        client.engine.embeddings_ready("a", 0, rows)
        client.engine.embeddings_ready("a", 0, torch.zeros_like(rows))
        await client.drain()
        client.engine.embeddings_ready("a", 0, rows)

    asyncio.run(go())
    client.check()


def test_rows_are_let_go_as_soon_as_their_kv_is_computed():
    client = Client(config_of(), hold=True)
    client.add("a", prompt_of([1], Image("a", 4), [2, 3], Image("b", 4), [4]), greedy(ignore_eos=True))

    async def go():
        await client.drain()
        rows = embeddings_of(client.answers["a"].message.prompt.items[0])
        seen = weakref.ref(rows)
        client.engine.embeddings_ready("a", 0, rows)
        del rows
        await client.drain()
        client.runner.plans.clear()
        gc.collect()
        assert seen() is None  # item b has not even come
        client.owed.remove(("a", 0))
        client.deliver()
        await client.drain()

    asyncio.run(go())
    client.check()


@BOTH_LOOPS
def test_an_item_larger_than_the_budgets_is_served_alone(overlap):  # SCH-01
    config = config_of(overlap=overlap, max_resident_embedding_tokens=8, max_step_visual_tokens=5)
    client = Client(config)
    large = prompt_of([1, 2], Image("large", 30), [3])
    for i in range(3):
        client.add(f"large{i}", large, drawn(i))
        client.add(f"small{i}", prompt_of([1], Image(f"s{i}", 6), [3]), drawn(i))
    resident = []

    async def go():
        while not all(answer.done for answer in client.answers.values()):
            await client.step()
            resident.append(client.engine.stats()["resident_embedding_tokens"])

    asyncio.run(go())
    asyncio.run(client.drain())
    client.check()
    assert set(resident) <= {0, 6, 30}  # 30 only alone


@BOTH_LOOPS
def test_waiting_requests_give_embeddings_up_to_running_ones(overlap):  # SCH-05
    """A runs and comes to its second picture when the waiting ones hold all the room."""
    config = config_of(overlap=overlap, max_resident_embedding_tokens=12, max_sequences=1)
    client = Client(config, hold=True)
    a = client.add("a", prompt_of([1], Image("a1", 8), [2], Image("a2", 8), [3]))
    for i in range(2):
        client.add(f"w{i}", prompt_of([1], Image(f"w{i}", 4), [2]))

    async def go():
        await client.drain()
        assert client.owed == [("a", 0)]  # strictly in order: nobody passes a's second picture
        client.deliver()
        await client.drain()
        assert client.owed == [("a", 1), ("w0", 0)]
        client.hold = False
        await client.drain()

    asyncio.run(go())
    client.check()
    assert a.asked == [0, 1]


def test_dropped_embeddings_are_asked_for_again():
    """A waiting request holds rows and finds no KV; a running one needs their room."""
    config = config_of(max_resident_embedding_tokens=10, num_blocks=9, policy="priority")
    client = Client(config, hold=True)
    client.add("first", prompt_of([1] * 9), greedy(max_tokens=20, ignore_eos=True))
    waits = client.add("waits", prompt_of(Image("w", 6), list(range(1, 23))))  # 28 of the 32 tokens of KV

    async def go():
        await client.step()
        await client.step()
        client.deliver()
        assert waits.asked == [0]
        assert client.engine.stats()["resident_embedding_tokens"] == 6
        urgent = client.add("urgent", prompt_of([5], Image("u", 8), [6]), priority=-1)
        while not urgent.asked:
            await client.step()
        assert client.engine.stats()["resident_embedding_tokens"] == 8
        client.hold = False
        client.deliver()
        await client.drain()

    asyncio.run(go())
    client.check()
    assert waits.asked == [0, 0]


@BOTH_LOOPS
def test_a_picture_that_another_request_computes_meanwhile_is_not_asked_for(overlap):
    client = Client(config_of(overlap=overlap, max_resident_embedding_tokens=8))
    prompt = prompt_of(Image("same", 8), [1, 2, 3, 4, 5])
    first, second = client.add("first", prompt), client.add("second", prompt)
    client.run()
    client.check()
    assert (first.asked, second.asked) == ([0], [])
    assert second.num_cached == 12


@BOTH_LOOPS
def test_a_shared_picture_survives_the_end_and_preemption_of_others(overlap):  # CAC-12
    config = config_of(overlap=overlap, num_blocks=14, long_prefill_cap=4)
    client = Client(config)
    picture = Image("shared", 9)
    client.add("a", prompt_of([1, 2], picture, [3]), drawn(1, max_tokens=2))
    client.add("b", prompt_of([4, 5, 6], picture, [7]), drawn(2, max_tokens=30, ignore_eos=True))
    client.add("c", prompt_of([8], picture, [7]), drawn(2, max_tokens=30, ignore_eos=True))
    client.run()
    client.check()
    assert client.engine.stats()["num_preemptions_total"] >= 1


@BOTH_LOOPS
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_preempted_requests_with_media_give_the_same_tokens(overlap, prefix_cache):  # SCH-10
    config = config_of(overlap=overlap, num_blocks=13, prefix_cache=prefix_cache)  # 48 tokens: 1.5 requests
    client = Client(config)
    for i in range(4):
        prompt = prompt_of([1, 2], Image(f"p{i}", 7), [3], Image("all", 4), [4])
        client.add(f"r{i}", prompt, greedy(max_tokens=16, ignore_eos=True))
    client.run()
    client.check()
    assert client.engine.stats()["num_preemptions_total"] >= 2
    if not prefix_cache:
        assert max(answer.asked.count(0) for answer in client.answers.values()) >= 2  # asked for again


# --- abort --------------------------------------------------------------------------------------------------
def in_state(name: str, client: Client) -> bool:
    """Whether request "x" stands where the test wants to abort it."""
    request = client.engine._scheduler.requests.get("x")
    if request is None:
        return False
    leader = request.sequences[0]
    match name:
        case "waiting":
            return leader.state is State.WAITING and not leader.parked
        case "parked":
            return leader.parked
        case "embeddings half there":
            return leader.state is State.RUNNING and None in request.claims.values()
        case "prefilling":
            return leader.state is State.RUNNING and 0 < leader.num_computed < request.num_prompt
        case "in flight":
            return leader.num_in_flight > 0
        case "preempted":
            return leader.state is State.WAITING and leader.num_output > 0
        case "before the fork":
            return leader.num_output > 0 and request.sequences[1].state is State.WAITING
        case "forked, no token yet":
            return request.sequences[1].state is State.RUNNING and request.sequences[1].num_output == 0
    raise AssertionError(name)


@pytest.mark.parametrize(
    ("name", "prompt", "changes"),
    [
        ("waiting", TEXT, {"max_sequences": 1}),
        ("parked", prompt_of(Image("x", 5), [1]), {}),
        ("embeddings half there", prompt_of([1], Image("x", 5), [1], Image("y", 5), [2]), {}),
        ("prefilling", prompt_of([1] * 20), {"long_prefill_cap": 6}),
        ("in flight", TEXT, {"overlap": True}),
        ("preempted", prompt_of([1] * 7), {"num_blocks": 6}),
        ("before the fork", TEXT, {"max_sequences": 2}),
        ("forked, no token yet", TEXT, {"overlap": True}),
    ],
)
def test_abort_in_every_state_leaves_nothing(name, prompt, changes):
    client = Client(config_of(**changes))
    other = prompt_of([9, 9, 9, 9, 9])
    client.add("y", other, greedy(max_tokens=14, ignore_eos=True))
    client.add("x", prompt, drawn(3, n=3, max_tokens=14, ignore_eos=True))

    async def go():
        client.hold = name in ("parked", "embeddings half there")
        for _ in range(200):
            if in_state(name, client):
                break
            await client.step()
            if client.hold and name != "parked" and client.owed:
                client.deliver(1)
        assert in_state(name, client), "the state never came"
        client.engine.abort("x")
        client.engine.abort("x")
        assert "x" not in client.engine._scheduler.requests
        assert client.engine.check_integrity() is None
        tokens = [list(t) for t in client.answers["x"].tokens]
        await client.drain()
        assert client.answers["x"].tokens == tokens
        client.deliver()  # embeddings that come too late

    asyncio.run(go())
    client.check("y")
    assert client.engine.is_idle()
    assert client.engine.check_integrity() is None
    client.answers.pop("x")
    client.add("x", prompt)  # the id is free again
    client.hold = False
    client.run()
    client.check()


@BOTH_LOOPS
def test_an_id_used_again_while_its_old_step_runs_gets_only_its_own_tokens(overlap):
    client = Client(config_of(overlap=overlap))
    client.add("x", TEXT, drawn(1, max_tokens=20, ignore_eos=True))

    async def go():
        for _ in range(4):
            client.take((await client.engine.step()).messages)
        client.engine.abort("x")
        client.add("x", PICTURE, drawn(2))
        await client.drain()

    asyncio.run(go())
    client.check()


# --- loops --------------------------------------------------------------------------------------------------
def test_the_next_step_is_submitted_while_one_runs():
    running, release = threading.Event(), threading.Event()

    def gate(plan):
        if plan.step_id == 1:
            running.set()
            assert release.wait(20)

    client = Client(config_of(overlap=True), threaded=True, gate=gate)
    client.add("a", TEXT, greedy(max_tokens=8, ignore_eos=True))

    async def go():
        client.take((await client.engine.step()).messages)  # submits 0
        client.take((await client.engine.step()).messages)  # submits 1, waits for 0
        await asyncio.to_thread(running.wait, 20)
        assert len(client.engine._in_flight) == 1
        third = asyncio.ensure_future(client.engine.step())  # submits 2 while 1 runs
        while len(client.engine._in_flight) < 2:
            await asyncio.sleep(0)
        assert [flight.step.plan.step_id for flight in client.engine._in_flight] == [1, 2]
        assert len(client.runner.plans) == 2
        release.set()
        client.take((await third).messages)
        await client.drain()

    asyncio.run(go())
    client.check()
    client.engine.close()


@BOTH_LOOPS
def test_a_cancelled_step_is_picked_up_by_the_next(overlap):
    release = threading.Event()
    client = Client(config_of(overlap=overlap), threaded=True, gate=lambda plan: release.wait(20))
    client.add("a", TEXT)

    async def go():
        if overlap:
            client.take((await client.engine.step()).messages)
        task = asyncio.ensure_future(client.engine.step())
        while not client.engine._in_flight:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        release.set()
        await client.drain()

    asyncio.run(go())
    client.check()
    client.engine.close()


@BOTH_LOOPS
def test_adds_and_aborts_while_a_step_runs(overlap):
    client = Client(config_of(overlap=overlap), threaded=True)
    client.add("a", PICTURE, drawn(1, n=2, max_tokens=12, ignore_eos=True))

    async def go():
        for i in range(6):
            step = asyncio.ensure_future(client.engine.step())
            await asyncio.sleep(0)
            client.add(f"b{i}", PICTURE, drawn(i))
            if i % 2:
                client.engine.abort(f"b{i - 1}")
                client.answers.pop(f"b{i - 1}")
            client.take(tuple(m for m in (await step).messages if m.request_id in client.answers))
            client.owed = [(n, i) for n, i in client.owed if n in client.answers]
            client.deliver()
        await client.drain()

    asyncio.run(go())
    client.check()
    client.engine.close()


# --- failures -----------------------------------------------------------------------------------------------
@BOTH_LOOPS
@pytest.mark.parametrize("threaded", [False, True])
def test_a_failed_step_fails_its_requests_and_the_engine_goes_on(overlap, threaded):  # REL-01
    def gate(plan):
        if plan.step_id == 3:
            raise RuntimeError("no memory left")

    client = Client(config_of(overlap=overlap, max_sequences=2), threaded=threaded, gate=gate)
    for i in range(4):
        client.add(f"r{i}", prompt_of([i + 1] * 9), drawn(i, n=1 + i % 2))
    client.run()
    failed = [name for name, answer in client.answers.items() if answer.error is not None]
    assert failed == ["r0", "r1"]
    for name in failed:
        info = client.answers[name].error.error
        assert (info.kind, info.stage) == ("EngineError", "lm")
        assert "RuntimeError" in info.message
        assert "no memory left" not in info.message  # for the log, not for the client
    client.check("r2", "r3")
    assert client.engine.is_idle()
    assert client.engine.check_integrity() is None
    again = client.add("again", prompt_of([1] * 9))
    client.run()
    client.check("again")
    assert again.num_cached == 0  # nothing that the failed step wrote is trusted
    client.engine.close()


@BOTH_LOOPS
def test_values_that_are_not_finite_fail_their_request_alone(overlap, monkeypatch):  # API-12
    client = Client(config_of(overlap=overlap, max_sequences=2))
    compute = client.runner._run

    def run(plan):
        result = compute(plan)
        bad = tuple(s.slot for s in result.sampled if plan.step_id == 3)[:1]
        return dataclasses.replace(result, failed_slots=bad)

    monkeypatch.setattr(client.runner, "_run", run)
    for i in range(3):
        client.add(f"r{i}", prompt_of([i + 1] * 9), drawn(i))
    client.run()
    failed = [name for name, answer in client.answers.items() if answer.error is not None]
    assert failed == ["r0"]
    assert "not finite" in client.answers["r0"].error.error.message
    client.check("r1", "r2")
    assert client.engine.is_idle()
    assert client.engine.check_integrity() is None
    client.engine.close()


def test_what_was_put_onto_a_failed_steps_blocks_fails_too():
    """Step 1 computes a prefix and fails while step 2, which shares that prefix, is under way."""

    def gate(plan):
        if plan.step_id == 1:
            raise RuntimeError("broken")

    client = Client(config_of(overlap=True), gate=gate)
    client.add("early", prompt_of([9, 9]), greedy(max_tokens=1))

    async def go():
        await client.step()  # submits 0
        client.add("writer", prompt_of([1, 2, 3, 4, 5]))
        client.take((await client.engine.step()).messages)  # submits 1 before 0 is looked at
        client.add("reader", prompt_of([1, 2, 3, 4, 6]))
        client.add("bystander", prompt_of([5, 6, 7, 8, 9]))
        await client.drain()

    asyncio.run(go())
    assert client.answers["writer"].error is not None
    assert client.answers["reader"].error is not None
    client.check("early", "bystander")
    assert client.engine.is_idle()


def test_a_step_without_progress_is_an_error_not_a_spin(monkeypatch):
    client = Client(config_of())
    client.add("a", TEXT)
    monkeypatch.setattr(Scheduler, "_admit_waiting", lambda self, draft: None)
    with pytest.raises(AssertionError, match="nothing is awaited"):
        client.run()


def test_doors_close():
    client = Client(config_of(overlap=True), threaded=True)
    client.add("a", TEXT)
    with pytest.raises(EngineError, match="in progress"):
        client.add("a", TEXT)

    async def go():
        await client.engine.step()
        client.engine.close()
        client.engine.close()

    asyncio.run(go())
    with pytest.raises(ServiceUnavailable):
        client.add("b", TEXT)
    assert not client.engine.has_work()
    assert client.engine.check_integrity() is None


def test_contradicting_layouts_fail_at_the_door():
    client = Client(config_of())
    item = PICTURE.items[0]
    short = type(item)(**{f: getattr(item, f) for f in item.__struct_fields__} | {"num_tokens": 5})
    with pytest.raises(EngineError, match="has 5 embedding rows, its spans take 6"):
        client.add("a", type(PICTURE)(PICTURE.token_ids, (short,), PICTURE.spans))
    with pytest.raises(EngineError, match="takes no embeddings"):
        Client(config_of(embedding_width=0)).add("a", PICTURE)
    assert client.engine.is_idle()


# --- housekeeping -------------------------------------------------------------------------------------------
@BOTH_LOOPS
def test_reset_cache_while_requests_run(overlap):
    client = Client(config_of(overlap=overlap))
    client.add("a", PICTURE, drawn(1, max_tokens=20, ignore_eos=True))

    async def go():
        for _ in range(6):
            await client.step()
        client.engine.reset_cache()
        client.add("b", PICTURE, drawn(1))
        await client.drain()

    asyncio.run(go())
    client.check()
    assert client.answers["b"].num_cached == 0


def test_stats_tell_what_happened():
    client = Client(config_of(max_sequences=1))
    client.add("a", TEXT, greedy(max_tokens=4, ignore_eos=True))
    client.add("b", TEXT, greedy(max_tokens=4, ignore_eos=True))
    stats = client.engine.stats()
    assert (stats["num_requests_waiting"], stats["num_requests_running"]) == (2, 0)
    asyncio.run(client.step())
    stats = client.engine.stats()
    assert (stats["num_requests_waiting"], stats["num_requests_running"]) == (1, 1)
    assert stats["kv_cache_usage_perc"] == pytest.approx(2 / 64)
    client.run()
    stats = client.engine.stats()
    assert stats["prompt_tokens_total"] == 12
    assert stats["generation_tokens_total"] == 8
    assert stats["prefix_cache_queries_total"] == 12
    assert stats["prefix_cache_hits_total"] == 4
    assert stats["num_steps_total"] == client.runner.num_steps
    assert all(isinstance(value, (int, float)) for value in stats.values())
