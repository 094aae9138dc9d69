"""The talker's engine: streams in any order and pace, grants, batches, abort, and what remains after."""

from __future__ import annotations

import asyncio
import random
from concurrent.futures import Future

import pytest
import torch

from contracts.errors import BadRequest, ContextLengthExceeded, ServiceUnavailable, TooManyRequests
from lm_engine.talker.pieces import MANY, joined, looked_up, rows_of
from lm_engine.talker.plan import RowPiece
from tests.lm_engine.talker.tiny_talker import (
    END,
    GREEDY,
    HIDDEN,
    SILENT,
    Client,
    TinyTalker,
    alone,
    config_of,
    drawn,
)

torch.set_num_threads(1)

PROMPT = [3, 55, 56, 9, 12, 51, 4]
TEXT = [11, 8, 30, 2, 17, 25]


def requests(count=8):
    """Of different prompts, texts, voices, lengths and ways of sampling."""
    kinds = [GREEDY, drawn(3), drawn(4, top_k=0, temperature=1.3), GREEDY]
    return [
        {
            "prompt": [(7 * i + j) % 60 for j in range(2 + 5 * i)],
            "text": [(3 * i + j) % 50 for j in range(1 + i)],
            "voice": str(i % 2),
            "sampling": kinds[i % 4],
            "max_frames": 6 + 2 * (i % 5),
        }
        for i in range(count)
    ]


@pytest.mark.parametrize("overlap", [False, True])
def test_many_at_once_equal_each_alone(overlap):
    expected = [alone(**request) for request in requests()]
    model = TinyTalker()
    with Client(model, config_of(overlap=overlap)) as client:
        for i, request in enumerate(requests()):
            client.say(str(i), **request)
        client.run()
        assert client.engine.is_idle()
        assert client.engine.check_integrity() is None
        assert client.engine.stats()["kv_cache_usage_perc"] == 0
    assert model.max_batch > 4
    for i, answer in enumerate(expected):
        found = client.answers[str(i)]
        assert (found.frames, found.reason) == (answer.frames, answer.reason)
        assert len(found.frames) == found.message.max_frames or found.reason == "stop"
    assert len({tuple(a.frames) for a in expected}) == len(expected)


def test_everything_that_arrives_decides_the_frames():
    base = alone(PROMPT, TEXT)
    assert len(base.frames) == 12
    others = [
        alone(PROMPT, TEXT, voice="1"),
        alone(PROMPT[:-1], TEXT),
        alone(PROMPT, [12, *TEXT[1:]]),
        alone(PROMPT, TEXT, sampling=drawn(1)),
        alone(PROMPT, TEXT, sampling=drawn(2)),
    ]
    assert all(other.frames != base.frames for other in others)
    # The text's k-th token after the first is heard at frame k, its end one frame later.
    assert alone(PROMPT, [*TEXT[:3], 40, *TEXT[4:]]).frames[:3] == base.frames[:3]
    assert alone(PROMPT, [*TEXT[:3], 40, *TEXT[4:]]).frames != base.frames
    longer = alone(PROMPT, [*TEXT, 5])
    assert longer.frames[: len(TEXT)] == base.frames[: len(TEXT)]
    assert longer.frames != base.frames


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("text_hidden", [False, True])
def test_text_that_arrives_late_waits_for_it_and_changes_nothing(overlap, text_hidden):
    model = TinyTalker(text_hidden=text_hidden)
    expected = alone(PROMPT, TEXT, model=TinyTalker(text_hidden=text_hidden), sampling=drawn(7))
    with Client(model, config_of(overlap=overlap)) as client:
        answer = client.add("late", PROMPT, TEXT, sampling=drawn(7))

        async def trickle() -> list[int]:
            counts = []
            client.think("late", 1, last=False)
            await client.drain()
            assert not answer.frames, "its prompt lacks hidden states"
            client.see("late")
            await client.drain()
            counts.append(len(answer.frames))
            for start in range(1, len(TEXT)):
                client.think("late", 1, start=start, last=False)
                await client.drain()
                assert not client.engine.has_work()
                counts.append(len(answer.frames))
            client.think("late", start=len(TEXT))
            await client.drain()
            return counts

        counts = asyncio.run(trickle())
        assert client.engine.is_idle()
    assert counts == [1, 2, 3, 4, 5, 6], "one frame for the prompt, one for each further token"
    assert answer.frames == expected.frames
    assert answer.reason == expected.reason == "length"


def test_one_without_text_or_grant_holds_nobody_up():
    expected = alone(PROMPT, TEXT)
    with Client() as client:
        waiting = client.add("no text", PROMPT, TEXT)
        client.see("no text")
        starved = client.say("no grant", PROMPT, TEXT, granted=3)
        unheard = client.say("not at all", PROMPT, TEXT, granted=0)
        client.say("other", PROMPT, TEXT)
        client.run()
        assert client.answers["other"].frames == expected.frames
        assert (waiting.frames, unheard.frames) == ([], [])
        assert starved.frames == expected.frames[:3]
        assert starved.reason is None
        client.engine.grant("no grant", 5)
        client.engine.grant("no grant", 4)  # an older one, overtaken
        client.run()
        assert starved.frames == expected.frames[:5]
        client.engine.grant("no grant", 100)
        client.engine.grant("not at all", 100)
        client.think("no text")
        client.run()
        assert starved.frames == waiting.frames == unheard.frames == expected.frames
        assert client.engine.is_idle()


def test_the_final_grant_cuts():
    expected = alone(PROMPT, TEXT)
    with Client() as client:
        answer = client.say("cut", PROMPT, TEXT, granted=3)
        client.engine.grant("cut", 4, final=True)
        client.run()
        assert answer.frames == expected.frames[:4]
        assert answer.reason == "length"
        late = client.say("late", PROMPT, TEXT, granted=5)
        client.run()
        assert late.reason is None
        client.engine.grant("late", 5, final=True)  # it is there already
        client.run()
        assert late.frames == expected.frames[:5]
        assert late.reason == "length"
        assert client.engine.stats()["length_stops_total"] == 2


@pytest.mark.parametrize("overlap", [False, True])
def test_an_end_code_ends_it_and_is_no_frame(overlap):
    plain = alone(PROMPT, TEXT, sampling=drawn(5), max_frames=40)
    biased = {"sampling": drawn(5), "max_frames": 40}
    expected = alone(PROMPT, TEXT, model=TinyTalker(end_bias=1.0), **biased)
    assert expected.reason == "stop"
    assert 0 < len(expected.frames) < 40
    assert expected.frames == plain.frames[: len(expected.frames)]
    with Client(TinyTalker(end_bias=1.0), config_of(overlap=overlap)) as client:
        answers = [client.say(str(i), PROMPT, TEXT, **biased) for i in range(3)]
        client.run()
        assert client.engine.is_idle()
    assert all((a.frames, a.reason) == (expected.frames, "stop") for a in answers)
    assert all(END not in (f[0] for f in a.frames) for a in answers)
    assert alone(PROMPT, TEXT, model=TinyTalker(end_bias=1e4)).frames == []


def test_suppressed_codes_are_never_drawn():
    model = TinyTalker()
    model.end_bias[SILENT] = 1e4
    assert all(frame[0] != SILENT for frame in alone(PROMPT, TEXT, model=model).frames)


def test_an_answer_without_words_is_no_speech():
    assert alone(PROMPT, []).frames == []
    with Client() as client:
        answer = client.add("mute", PROMPT, [])
        client.think("mute")
        client.run()
        assert answer.reason == "stop"
        assert client.engine.is_idle()


def test_kv_is_reserved_for_all_frames_and_freed_at_the_end():
    """Two fit at once; the third waits for one of them, whoever else is smaller."""
    request = {"prompt": list(range(10)), "text": TEXT, "max_frames": 20}
    config = config_of(num_blocks=1 + 2 * 8)  # 12 rows and 19 more: 31 tokens in 8 blocks of 4
    expected = alone(**request)
    with Client(config=config) as client:
        for i in range(4):
            client.say(str(i), **request)
        asyncio.run(client.step())
        assert client.engine.stats()["num_requests_running"] == 2
        assert client.engine.stats()["kv_cache_usage_perc"] == 1.0
        client.run()
        assert client.engine.is_idle()
    assert all(answer.frames == expected.frames for answer in client.answers.values())


@pytest.mark.parametrize("overlap", [False, True])
def test_what_is_reserved_beyond_the_end_of_the_text_is_given_back(overlap):
    """To whoever waits, and by whoever waits: then as many run side by side as their texts allow."""
    request = {"prompt": list(range(10)), "text": TEXT}  # 12 rows
    config = config_of(num_blocks=1 + 15, overlap=overlap)  # of 4: one of 48 frames, or three of 8
    expected = alone(**request, max_frames=8)
    with Client(config=config) as client:
        for name in ("first", "second", "third"):
            client.say(name, **request, max_frames=48, granted=3)
        client.run()
        assert [len(a.frames) for a in client.answers.values()] == [3, 0, 0]
        client.engine.grant("first", 3, False, 8)  # no further frame yet, but no more than so many
        client.run()
        assert [len(a.frames) for a in client.answers.values()] == [3, 0, 0], "the next may still need all"
        client.engine.grant("third", 3, False, 8)
        client.engine.grant("second", 3, False, 8)
        client.run()
        assert [len(a.frames) for a in client.answers.values()] == [3, 3, 3]
        assert client.engine.stats()["num_requests_running"] == 3
        assert client.engine.check_integrity() is None
        for name in client.answers:
            client.engine.grant(name, 8, True, 8)
        client.run()
        assert client.engine.is_idle()
        assert client.engine.check_integrity() is None
    assert all((a.frames, a.reason) == (expected.frames, "length") for a in client.answers.values())


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("overlap", [False, True])
def test_a_bound_that_comes_at_any_time_changes_no_frame(overlap, seed):
    """Also one that comes when more is planned already. Blocks change hands amid steps under way."""
    expected = [alone(**request) for request in requests()]
    draw = random.Random(seed)
    with Client(config=config_of(overlap=overlap, num_blocks=1 + 24)) as client:

        async def play():
            unheard = {}
            for i, (request, answer) in enumerate(zip(requests(), expected, strict=True)):
                unheard[str(i)] = max(len(answer.frames), 1)
                client.say(str(i), **{**request, "max_frames": 40, "granted": request["max_frames"]})
                await client.step()
            while unheard:
                for _ in range(draw.randrange(3)):
                    await client.step()
                    assert client.engine.check_integrity() is None
                name = draw.choice(list(unheard))
                most = draw.choice((1, requests()[int(name)]["max_frames"]))
                if most > 1:
                    client.engine.grant(name, most, True, most)
                    del unheard[name]
                elif len(client.answers[name].frames) >= requests()[int(name)]["max_frames"] - 1:
                    client.engine.grant(name, 1, False, most)  # beyond it already: stays as it is
                    del unheard[name]
            await client.drain()

        asyncio.run(play())
        assert client.engine.is_idle()
        assert client.engine.check_integrity() is None
    for i, answer in enumerate(expected):
        found = client.answers[str(i)]
        assert answer.frames[: len(found.frames)] == found.frames
        assert len(answer.frames) - len(found.frames) <= 1
        assert found.reason in ("stop", "length")


def test_bounds_of_the_engine():
    with Client(config=config_of(num_blocks=1 + 8, context_length=64, max_waiting_requests=2)) as client:
        with pytest.raises(ContextLengthExceeded):
            client.add("long", [1] * 40, TEXT)
        cut = client.say("cut", [1] * 26, TEXT, max_frames=50)  # 28 rows, 32 tokens of KV
        client.run()
        assert (len(cut.frames), cut.reason) == (5, "length")
        with pytest.raises(BadRequest):
            client.add("strange", PROMPT, TEXT, voice="7")
        client.add("0", PROMPT, TEXT)
        client.add("1", PROMPT, TEXT)
        with pytest.raises(TooManyRequests):
            client.add("2", PROMPT, TEXT)
        assert client.engine.check_integrity() is None
        client.engine.close()
        with pytest.raises(ServiceUnavailable):
            client.add("3", PROMPT, TEXT)


@pytest.mark.parametrize("overlap", [False, True])
def test_abort_at_any_time_leaves_nothing(overlap):
    expected = alone(PROMPT, TEXT)
    with Client(config=config_of(overlap=overlap)) as client:

        async def play() -> None:
            client.add("early", PROMPT, TEXT)
            client.engine.abort("early")
            for steps in range(1, 6):
                name = f"after {steps}"
                client.say(name, PROMPT, TEXT)
                client.say(f"beside {steps}", PROMPT, TEXT)
                for _ in range(steps):
                    await client.step()
                client.engine.abort(name)
                client.engine.abort(name)
                assert client.engine.check_integrity() is None
                # What is still under way for it is dropped.
                client.see(name)
                client.think(name)
                client.engine.grant(name, 9)
                await client.drain()
                assert client.answers[name].reason is None
            assert client.engine.is_idle()
            assert client.engine.check_integrity() is None

        asyncio.run(play())
    assert all(client.answers[f"beside {n}"].frames == expected.frames for n in range(1, 6))


def test_what_no_thinker_sends_fails_that_request_alone():
    expected = alone(PROMPT, TEXT)
    with Client() as client:
        bad = ["width", "missing", "token", "twice"]
        for name in bad:
            client.add(name, PROMPT, TEXT)
        client.say("good", PROMPT, TEXT)
        client.show("width", [1], torch.zeros(1, HIDDEN + 1))
        client.show("missing", [1, 5], torch.zeros(2, HIDDEN))
        client.think("missing")
        client.engine.text_ready("token", {"token_ids": torch.tensor([60])}, False)
        client.see("twice")
        client.see("twice")
        client.run()
        assert client.engine.is_idle()
    assert client.answers["good"].frames == expected.frames
    for name in bad:
        assert client.answers[name].error is not None, name
        assert not client.answers[name].frames


@pytest.mark.parametrize("overlap", [False, True])
def test_a_failed_step_and_values_that_are_not_finite(overlap):
    expected = alone(PROMPT, TEXT)
    with Client(config=config_of(overlap=overlap)) as client:
        client.say("burnt", PROMPT, TEXT)
        client.model.fail_next = True
        client.run()
        assert client.answers["burnt"].error is not None
        client.say("poisoned", PROMPT, TEXT)
        client.model.poison = True
        client.run()
        assert client.answers["poisoned"].error is not None
        client.say("after", PROMPT, TEXT)
        client.run()
        assert client.answers["after"].frames == expected.frames
        assert client.engine.stats()["failed_steps_total"] == 1 + overlap  # the step behind it, too
        assert client.engine.is_idle()


def test_hidden_states_come_in_any_number_of_pieces():
    expected = alone(PROMPT, TEXT)
    with Client() as client:
        answer = client.add("pieces", PROMPT, TEXT)
        whole = torch.randn(64, HIDDEN, generator=torch.Generator().manual_seed(5))
        client.think("pieces")
        for positions in ([0, 2], [1, 6], [5]):  # more than it needs
            client.show("pieces", positions, whole[positions], last=False)
        client.show("pieces", [], torch.zeros(0, HIDDEN))
        client.run()
    assert answer.frames == expected.frames


def test_a_rehearsal_leaves_nothing_behind():
    expected = [alone(**request) for request in requests(3)]
    with Client() as client:
        steps = []
        forward = client.model.forward
        client.model.forward = lambda *args: steps.append(len(args[0])) or forward(*args)
        client.runner.rehearse()
        assert steps == [16, 1, client.config.context_length - 1, 1]
        assert not client.runner.table.rows
        for i, request in enumerate(requests(3)):
            client.say(str(i), **request)
        client.run()
        assert client.engine.is_idle()
    assert [client.answers[str(i)].frames for i in range(3)] == [answer.frames for answer in expected]


def test_single_rows_are_looked_up_as_they_are_sliced():
    made = [Future() for _ in range(3)]
    for future, length in zip(made, (9, 2, 1), strict=True):
        future.set_result(torch.randn(length, HIDDEN))
    rng = random.Random(0)
    for sources in (made, made[:1]):
        pieces = []
        for _ in range(2 * MANY):
            rows = rng.choice(sources)
            pieces.append(RowPiece(rows, rng.randrange(len(rows.result())), 1))
        found = looked_up(pieces, torch.device("cpu"))
        assert torch.equal(found, joined(pieces))
        assert torch.equal(rows_of(pieces, torch.device("cpu")), found)
    whole = [*pieces, RowPiece(made[0], 3, 4)]
    assert torch.equal(rows_of(whole, torch.device("cpu")), joined(whole))
