"""Caches too small, budgets too small, contexts filled to the brim: answers stay the oracle's, refusals are
clear."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from contracts.errors import BadRequest, ContextLengthExceeded
from encoder_pool.pool import EncoderPool
from tests.parity.test_matrix import A, B, C, D, oracle
from tests.served import Served, picture
from tests.tiny_models import reference_inputs

NEW_TOKENS = 12
FAMILY = "qwen2_5_vl"


@pytest.fixture
def folder(tiny: Callable[[str], Path]) -> Path:
    return tiny(FAMILY)


def question(image, text: str = "what is it?"):
    return [("user", [image, text])]


def test_caches_too_small_for_the_pictures_in_use(folder: Path) -> None:
    """Eight pictures, room for few embeddings and few features, shuffled, with aborts: a miss is never an
    error."""
    pictures = [picture(seed) for seed in range(20, 28)]
    expected = {i: oracle(folder, question(p))[0] for i, p in enumerate(pictures)}
    settings = (
        "thinker.kv_memory=8MiB",
        "thinker.prefix_cache=false",
        "vision.embedding_cache=9KiB",
        "vision.embedding_cache_host=5KiB",
        "preprocess.arena_bytes=96KiB",
        "preprocess.index_items=4",
    )
    rng = random.Random(5)
    order = [rng.randrange(8) for _ in range(24)]
    with Served(folder, *settings) as served:

        async def one(index: int, abort: bool) -> None:
            task = asyncio.create_task(served.answer(question(pictures[index]), max_tokens=NEW_TOKENS))
            if abort:
                for _ in range(index * 7):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                return
            assert (await task).tokens == expected[index]

        async def storm() -> None:
            await asyncio.gather(*(one(index, abort=i % 4 == 3) for i, index in enumerate(order)))

        served.run(storm())
        served.assert_clean()


def test_all_caches_off(folder: Path) -> None:
    settings = (
        "thinker.kv_memory=8MiB",
        "thinker.prefix_cache=false",
        "vision.embedding_cache=0",
        "vision.embedding_cache_host=0",
    )
    with Served(folder, *settings) as served:
        for _ in range(2):
            assert served.ask(question(A), max_tokens=NEW_TOKENS).tokens == oracle(folder, question(A))[0]
        assert served.stats("vision")["encoder_items_total"] == 2
        served.assert_clean()


def test_a_later_picture_leaves_the_earlier_prefix_cached(folder: Path) -> None:
    turns: list = []
    cached = []
    with Served(folder, "thinker.kv_memory=8MiB", "thinker.block_size=4") as served:
        for number, image in enumerate((A, B, C, D)):
            turns.append(("user", [image, f"turn {number}?"]))
            answer = served.ask(turns, max_tokens=4)
            cached.append((answer.num_cached_tokens, len(answer.prompt_token_ids)))
            turns.append(("assistant", [f"answer {number}"]))
    assert cached[0][0] == 0
    for (_, previous_length), (hit, _) in pairwise(cached):
        assert hit >= previous_length // 4 * 4 - 4, cached


def test_the_context_may_be_filled_exactly_and_not_by_one_more(folder: Path) -> None:
    length = reference_inputs(folder, [{"role": "user", "content": [{"type": "image"}]}], [A])[
        "input_ids"
    ].shape[1]
    with Served(folder, "thinker.kv_memory=8MiB", f"thinker.max_context={length + 5}") as served:
        answer = served.ask([("user", [A])], max_tokens=5, ignore_eos=True)
        assert len(answer.tokens) == 5
        encoded = served.stats("vision")["encoder_items_total"]
        with pytest.raises(ContextLengthExceeded, match="32 of media"):
            served.ask([("user", [picture(5, 112, 112), picture(6, 112, 112), "too large"])], max_tokens=1)
        assert served.stats("vision")["encoder_items_total"] == encoded, "refused before it is encoded"
        with pytest.raises(ContextLengthExceeded) as caught:
            served.ask([("user", [A])], max_tokens=6)
        message = caught.value.message
        for number in (length + 5, length - 9, 9, 6):  # context, text, media, output
            assert str(number) in message
        served.assert_clean()


def test_a_picture_larger_than_every_budget_still_answers(folder: Path) -> None:
    """One item above the encoder's, the step's visual and the resident budget: alone, in pieces, the same
    answer."""
    image = picture(31, 112, 112)
    settings = (
        "thinker.kv_memory=8MiB",
        "vision.max_batch_tokens=4",
        "thinker.max_step_visual_tokens=3",
        "thinker.max_resident_embedding_tokens=5",
    )
    with Served(folder, *settings) as served:
        answers = served.ask_all(
            [question(image), question(A), question(image, "who?")], max_tokens=NEW_TOKENS
        )
        expected = [oracle(folder, q)[0] for q in (question(image), question(A), question(image, "who?"))]
        assert [a.tokens for a in answers] == expected
        served.assert_clean()


def test_pictures_of_many_requests_share_encoder_batches(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_work = EncoderPool.has_work

    def has_two_or_more(pool: EncoderPool) -> bool:
        """At first: an encoder faster than what brings it pictures would take them one by one."""
        stats = pool.stats()
        begun = stats["encoder_items_total"] > 0 or stats["encoder_waiting_items"] > 1
        return begun and has_work(pool)

    monkeypatch.setattr(EncoderPool, "has_work", has_two_or_more)
    conversations = [question(picture(100 + i)) for i in range(32)]
    with Served(folder, "thinker.kv_memory=16MiB") as served:
        served.ask_all(conversations, max_tokens=2)
        stats = served.stats("vision")
        assert stats["encoder_items_total"] == 32
        assert stats["encoder_batches_total"] < 32
        served.assert_clean()


def test_many_pictures_in_one_request(folder: Path) -> None:
    parts = [picture(200 + i, 56, 56) for i in range(70)]
    settings = ("thinker.kv_memory=8MiB", "limits.max_items_per_request=70", "vision.max_batch_items=16")
    with Served(folder, *settings) as served:
        answer = served.ask([("user", [*parts, "how many?"])], max_tokens=3)
        assert answer.media_tokens["image"] == 70 * 4
        assert served.stats("vision")["encoder_batches_total"] >= 5
        with pytest.raises(BadRequest, match="at most 70 media items per request, got 71"):
            served.ask([("user", [*parts, A])], max_tokens=3)
        served.assert_clean()


def test_the_largest_legal_picture_right_after_the_start(folder: Path) -> None:
    with Served(folder) as served:
        image = picture(7, 3000, 1600)
        assert served.ask(question(image), max_tokens=NEW_TOKENS).tokens == oracle(folder, question(image))[0]


def test_an_encoder_that_gives_way_changes_no_answer(folder: Path) -> None:
    pictures = [picture(300 + i) for i in range(6)]
    conversations = [question(p) for p in pictures] + [[("user", [*pictures[:3], "how many?"])]]
    settings = ("vision.max_tokens_ahead=0", "vision.max_batch_items=1", "thinker.kv_memory=16MiB")
    with Served(folder, *settings) as served:
        answers = served.ask_all(conversations, max_tokens=NEW_TOKENS)
        for conversation, answer in zip(conversations, answers, strict=True):
            assert answer.tokens == oracle(folder, conversation)[0]
        assert served.stats("vision")["encoder_held_seconds_total"] > 0
        served.assert_clean()
