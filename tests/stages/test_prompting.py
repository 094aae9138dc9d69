"""A request that does not fit names what its client should change."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from contracts.conversation import Conversation, Message, TextPart
from contracts.errors import BadRequest, ContextLengthExceeded
from contracts.media import Prompt
from contracts.params import SamplingParams
from model_families.family import Family
from stages.prompting import INLINE_TOKENIZE_CHARS, EarlyTokens, PromptDesk, naming_the_prompt
from stages.service import UNLIMITED, GenerationRequest, SpeechOptions
from tests.api.fakes import ToyTokenizer

CONTEXT = 100


def desk() -> PromptDesk:
    family = SimpleNamespace(
        tokenizer=ToyTokenizer(),
        layout=lambda ids, items: Prompt(ids),
        decoder_config=SimpleNamespace(vocab_size=300),
    )
    return PromptDesk(cast(Family, family), CONTEXT)


def chat(text: str) -> Conversation:
    return Conversation(messages=(Message(role="user", parts=(TextPart(text),)),))


def refused(given: Any, max_tokens: int, verbatim: str | None = None, **fields: str) -> ContextLengthExceeded:
    """The error of `OmniService`'s way through the desk."""
    request = GenerationRequest(
        input=given,
        sampling=SamplingParams(max_tokens=max_tokens),
        speech=None if verbatim is None else SpeechOptions(verbatim=verbatim),
        **fields,  # type: ignore[arg-type]
    )
    with pytest.raises(ContextLengthExceeded) as caught, naming_the_prompt(request):
        complete(request)
    return caught.value


def complete(request: GenerationRequest) -> SamplingParams:
    prompts = desk()
    prompt = asyncio.run(prompts.build(request.input, []))
    forced = None if request.speech is None else prompts.forced(request.speech)
    return prompts.complete(prompt, request, forced)


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_too_much_output_names_its_bound(name: str) -> None:
    error = refused(chat("hi"), CONTEXT, max_tokens_param=name)
    assert error.param == name
    assert "at most 92 of output fit" in error.message  # <start>user, "hi", <end>: 8 tokens
    assert refused("hi", CONTEXT).param == "max_tokens"


@pytest.mark.parametrize("max_tokens", [1, UNLIMITED])
@pytest.mark.parametrize("length", [CONTEXT, CONTEXT * 100])  # counted, and refused before it is tokenised
def test_too_long_a_prompt_names_the_prompt(length: int, max_tokens: int) -> None:
    text = "x" * length
    assert refused(chat(text), max_tokens, max_tokens_param="max_completion_tokens").param == "messages"
    assert refused(text, max_tokens).param == "prompt"
    assert refused((65,) * length, max_tokens).param == "prompt"
    assert refused(chat("read"), UNLIMITED, verbatim=text).param == "input"


def test_what_fits_is_taken() -> None:
    request = GenerationRequest(input=(65, 66), sampling=SamplingParams(max_tokens=UNLIMITED))
    assert complete(request).max_tokens == CONTEXT - 2


def test_stages_need_not_know_what_the_prompt_was_sent_as() -> None:
    request = GenerationRequest(input="hi", sampling=SamplingParams())
    for given, named in (("messages", "prompt"), ("messages[0].content[1]", "messages[0].content[1]")):
        with pytest.raises(BadRequest) as caught, naming_the_prompt(request):
            raise BadRequest("too long", param=given)
        assert caught.value.param == named


class Refusing(ToyTokenizer):
    def encode_conversation(self, conversation: Conversation) -> list[int]:
        raise BadRequest("no, thanks", param="messages")


def test_tokens_are_made_while_media_are_awaited() -> None:
    async def scenario() -> None:
        tokenizer, made = ToyTokenizer(), asyncio.Event()

        def encode() -> list[int]:
            made.set()
            return tokenizer.encode_conversation(chat("hello"))

        with EarlyTokens(encode, after_s=0.0) as early:
            async with asyncio.timeout(20):
                await made.wait()  # as for a picture
        assert early.ids == tokenizer.encode_conversation(chat("hello"))
        prompts = desk()
        late = await prompts.build(chat("hello"), [])
        assert (await prompts.build(chat("hello"), [], early.ids)).token_ids == late.token_ids

    asyncio.run(scenario())


def test_a_short_wait_makes_no_tokens_early() -> None:
    async def scenario() -> None:
        made: list[str] = []
        with EarlyTokens(lambda: made.append("tokens") or [1], after_s=0.0) as early:
            pass
        for _ in range(5):
            await asyncio.sleep(0)
        assert early.ids is None
        assert not made

    asyncio.run(scenario())


def test_a_refusal_is_left_to_who_builds_the_prompt() -> None:
    async def scenario() -> None:
        asked, unexpected = asyncio.Event(), []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: unexpected.append(context))

        def encode() -> list[int]:
            asked.set()
            return Refusing().encode_conversation(chat("hello"))

        with EarlyTokens(encode, after_s=0.0) as early:
            async with asyncio.timeout(20):
                await asked.wait()
        assert early.ids is None
        assert not unexpected

    asyncio.run(scenario())


def test_what_is_no_short_conversation_is_not_tokenised_early() -> None:
    prompts = desk()
    long = chat("x" * (INLINE_TOKENIZE_CHARS + 1))
    assert all(prompts.early(given)._encode is None for given in (long, "text", (1, 2)))
    encode = prompts.early(chat("hello"))._encode
    assert encode is not None
    assert encode() == ToyTokenizer().encode_conversation(chat("hello"))
