"""Wrong answers under 200: what mixes up pictures, loses one, or keeps something it should not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from contracts.params import SamplingParams
from stages.service import GenerationRequest, PromptReady
from tests.parity.test_matrix import A, B, C, D, oracle
from tests.served import Served, conversation, picture
from tests.tiny_models import VISION_FAMILIES, reference_tokenizer

NEW_TOKENS = 12
SETTINGS = ("thinker.kv_memory=8MiB",)


@pytest.fixture(params=VISION_FAMILIES)
def folder(request: pytest.FixtureRequest, tiny: Callable[[str], Path]) -> Path:
    return tiny(request.param)


@pytest.fixture
def served(folder: Path) -> Iterator[Served]:
    with Served(folder, *SETTINGS) as served:
        yield served
        served.assert_clean()


def test_same_prompt_two_pictures(served: Served, folder: Path) -> None:
    questions = [[("user", [image, "what is it?"])] for image in (A, D, A, D)]
    answers = served.ask_all(questions, max_tokens=NEW_TOKENS)
    expected = [oracle(folder, turns)[0] for turns in questions]
    assert expected[0] != expected[1], "the checkpoint must see the difference"
    assert [a.tokens for a in answers] == expected
    assert [served.ask(turns, max_tokens=NEW_TOKENS).tokens for turns in questions] == expected


def test_a_repeated_picture_is_not_decoded_encoded_or_prefilled_again(served: Served, folder: Path) -> None:
    question = [("user", [A, "what is it, in the end?"])]
    first = served.ask(question, max_tokens=NEW_TOKENS)
    jobs, items = served.stats("preprocess")["jobs_total"], served.stats("vision")["encoder_items_total"]
    assert (jobs, items) == (1, 1)
    again = served.ask(question, max_tokens=NEW_TOKENS)
    assert again.tokens == first.tokens
    assert served.stats("preprocess")["jobs_total"] == jobs
    assert served.stats("vision")["encoder_items_total"] == items
    assert again.num_cached_tokens is not None
    assert again.num_cached_tokens >= again.media_tokens["image"]


def test_same_picture_other_question_reuses_the_embedding(served: Served, folder: Path) -> None:
    served.ask([("user", [A, "what is it?"])], max_tokens=NEW_TOKENS)
    other = [("user", ["in this picture", A, "who is there?"])]
    answer = served.ask(other, max_tokens=NEW_TOKENS)
    assert answer.tokens == oracle(folder, other)[0]
    assert served.stats("vision")["encoder_items_total"] == 1
    assert served.stats("preprocess")["jobs_total"] == 1


def test_a_prefix_hit_may_end_inside_a_picture(served: Served, folder: Path) -> None:
    image = picture(9, 112, 112)
    served.ask([("user", [image, "one"])], max_tokens=2)
    second = [("user", [image, "zebra, two"])]
    answer = served.ask(second, max_tokens=NEW_TOKENS)
    start = answer.prompt_token_ids.index(reference_tokenizer(folder).convert_tokens_to_ids("<|image_pad|>"))
    assert answer.num_cached_tokens is not None
    assert start < answer.num_cached_tokens < start + answer.media_tokens["image"]
    assert answer.tokens == oracle(folder, second)[0]


def test_one_new_picture_in_two_requests_at_once_is_encoded_once(served: Served, folder: Path) -> None:
    questions = [[("user", [B, text])] for text in ("what is it?", "who is it?", "where?")]
    answers = served.ask_all(questions, max_tokens=NEW_TOKENS)
    assert [a.tokens for a in answers] == [oracle(folder, turns)[0] for turns in questions]
    assert served.stats("vision")["encoder_items_total"] == 1
    assert served.stats("preprocess")["jobs_total"] == 1


def test_order_of_pictures_matters(served: Served, folder: Path) -> None:
    questions = [[("user", [*pair, "compare"])] for pair in ((A, D), (D, A))]
    for turns in questions:
        assert served.ask(turns, max_tokens=NEW_TOKENS).tokens == oracle(folder, turns)[0]


@pytest.mark.parametrize("before", [True, False])
def test_a_typed_placeholder_binds_no_picture(served: Served, folder: Path, before: bool) -> None:
    text = "what does <|image_pad|> or <|vision_start|> mean?"
    parts = [text, A] if before else [A, text]
    answer = served.ask([("user", parts)], max_tokens=4)
    pad = reference_tokenizer(folder).convert_tokens_to_ids("<|image_pad|>")
    assert answer.prompt_token_ids.count(pad) == answer.media_tokens["image"]
    plain = served.ask([("user", [text])], max_tokens=4)
    assert pad not in plain.prompt_token_ids


def test_salts_separate_and_equal_salts_share(served: Served) -> None:
    question = [("user", [A, "what is it, once more?"])]
    runs = [served.ask(question, cache_salt=salt, max_tokens=4) for salt in ("a", "b", "a", None)]
    assert [bool(r.num_cached_tokens) for r in runs] == [False, False, True, False]
    assert served.stats("vision")["encoder_items_total"] == 3
    assert len({tuple(r.tokens) for r in runs}) == 1


def test_abort_at_every_point_leaves_nothing(served: Served, folder: Path) -> None:
    """The request is cut after each number of loop turns and after each event, beside one that must not
    change."""
    question = [("user", [A, B, "compare"])]
    bystander = [("user", [C, "what is it?"])]

    async def cut(turns: int) -> None:
        request = GenerationRequest(
            input=conversation(question), sampling=SamplingParams(temperature=0.0, max_tokens=30, n=2)
        )

        async def consume() -> None:
            async for event in served.service.generate(request):
                assert isinstance(event, PromptReady) or event.deltas

        task = asyncio.create_task(consume())
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def storm() -> None:
        await asyncio.gather(*(cut(turns) for turns in (0, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377)))

    expected = oracle(folder, bystander)[0]
    for _ in range(3):
        served.run(storm())
        assert served.ask(bystander, max_tokens=NEW_TOKENS).tokens == expected
    served.assert_clean()


def test_samples_share_the_prompt_and_seeds_repeat(served: Served) -> None:
    question = [("user", [A, "what is it?"])]
    first = served.ask(question, n=3, temperature=1.0, seed=7, max_tokens=8)
    served.reset_cache()
    again = served.ask(question, n=3, temperature=1.0, seed=7, max_tokens=8)
    assert first.token_ids == again.token_ids
    assert len({tuple(ids) for ids in first.token_ids.values()}) > 1
    alone = served.ask(question, n=1, temperature=1.0, seed=7, max_tokens=8)
    assert alone.tokens == first.token_ids[0]
    assert served.stats("vision")["encoder_items_total"] <= 2
