"""Chat completions through the official client and a real server: streamed equals plain, in every variant."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionChunk

from api.settings import ApiSettings
from contracts.errors import ContextLengthExceeded, EngineError
from contracts.messages import TokenLogprobs
from tests.api.fakes import IMAGE_TOKENS, Script, ScriptedService, ToyTokenizer, pieces, shown
from tests.api.serving import events_of, post, running, user

PNG = "data:image/png;base64,AAAA"
SPLIT = ToyTokenizer(b"Hello", b" wor", b"ld, ", b"\xf0\x9f\x91", b"\x8d\xf0\x9f", b"\x8f\xbd end")
FAMILY = list("👩‍👩‍👧‍👦 né".encode())
ASK: list[Any] = [{"role": "user", "content": "Hi"}]
IMAGES: list[Any] = [
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "Explain image 1:"},
            {"type": "image_url", "image_url": {"url": PNG, "detail": "low"}},
            {"type": "text", "text": "Explain image 2:"},
            {"type": "image_url", "image_url": {"url": PNG + "BBBB"}},
        ],
    }
]


def with_client(
    service: ScriptedService, use: Callable[[openai.AsyncOpenAI], Awaitable[Any]], **settings: Any
) -> Any:
    async def run() -> Any:
        key = settings.pop("client_key", "unused")
        async with (
            running(service, ApiSettings(**settings)) as server,
            openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) as client,
        ):
            return await use(client)

    return asyncio.run(run())


async def chunks_of(client: openai.AsyncOpenAI, **fields: Any) -> list[ChatCompletionChunk]:
    stream = await client.chat.completions.create(model="toy", stream=True, **fields)
    return [chunk async for chunk in stream]


def text_of(chunks: list[ChatCompletionChunk], index: int = 0) -> str:
    found = [c for chunk in chunks for c in chunk.choices if c.index == index]
    return "".join(c.delta.content or "" for c in found)


def finishes(chunks: list[ChatCompletionChunk]) -> dict[int, str]:
    return {c.index: c.finish_reason for chunk in chunks for c in chunk.choices if c.finish_reason}


VARIANTS: list[tuple[Script, ToyTokenizer, dict[str, Any], str, str]] = [
    (Script(), ToyTokenizer(), {}, "Hello!", "stop"),
    (Script(per_step=3), ToyTokenizer(), {"max_tokens": 5}, "Hello", "length"),
    (Script([pieces(6)]), SPLIT, {}, "Hello world, 👍🏽 end", "stop"),
    (Script([FAMILY]), ToyTokenizer(), {}, "👩‍👩‍👧‍👦 né", "stop"),
    (Script([FAMILY], per_step=3), ToyTokenizer(), {"stop": "👧"}, "👩‍👩‍", "stop"),
    (Script([pieces(6)]), SPLIT, {"stop": ["o wo", "never"]}, "Hell", "stop"),
    (Script([pieces(6)]), SPLIT, {"stop": "d, 👎"}, "Hello world, 👍🏽 end", "stop"),
    (Script([pieces(6)]), SPLIT, {"stop": "world", "max_tokens": 2}, "Hello wor", "length"),
    (
        Script([pieces(6)]),
        SPLIT,
        {"stop": "👍", "extra_body": {"include_stop_str_in_output": True}},
        "Hello world, 👍",
        "stop",
    ),
    (Script([pieces(6)]), SPLIT, {"max_tokens": 4}, "Hello world, \ufffd", "length"),
    (
        Script([(ord("a"), 256, ord("b"))]),
        ToyTokenizer(),
        {"extra_body": {"skip_special_tokens": False}},
        "a<|start|>b",
        "stop",
    ),
]


@pytest.mark.parametrize(("script", "tokenizer", "fields", "text", "finish"), VARIANTS)
def test_streamed_equals_plain(
    script: Script, tokenizer: ToyTokenizer, fields: dict[str, Any], text: str, finish: str
) -> None:
    service = ScriptedService(script, tokenizer=tokenizer)

    async def use(client: openai.AsyncOpenAI) -> tuple[Any, list[ChatCompletionChunk]]:
        plain = await client.chat.completions.create(model="toy", messages=ASK, **fields)
        streamed = await chunks_of(client, messages=ASK, stream_options={"include_usage": True}, **fields)
        return plain, streamed

    plain, streamed = with_client(service, use)
    assert plain.choices[0].message.content == text_of(streamed) == text
    assert {0: plain.choices[0].finish_reason} == finishes(streamed) == {0: finish}
    assert plain.usage == streamed[-1].usage
    if "\ufffd" not in text:
        assert not any("\ufffd" in (c.choices[0].delta.content or "") for c in streamed if c.choices)
    assert {flow.outcome for flow in service.flows.values()} == {"completed"}


def test_shape_of_a_stream() -> None:
    chunks = with_client(ScriptedService(), lambda c: chunks_of(c, messages=ASK))
    first, *middle, last = chunks
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    assert all(c.choices[0].delta.role is None and c.choices[0].finish_reason is None for c in middle)
    assert last.choices[0].finish_reason == "stop"
    assert len({(c.id, c.created, c.model, c.object) for c in chunks}) == 1
    assert all("usage" not in c.model_fields_set for c in chunks)


def test_wire_format_of_a_stream() -> None:
    response = post(ScriptedService(), "/v1/chat/completions", {**user("Hi"), "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, done = events_of(response)
    assert done == "[DONE]"
    assert set(chunks[0]["choices"][0]) == {"index", "delta", "logprobs", "finish_reason"}
    assert chunks[-1]["choices"][0]["delta"] == {}


def test_usage_of_a_prompt_with_images() -> None:
    """API-13, API-14: the same numbers streamed and not; placeholders are counted once."""
    service = ScriptedService(Script(num_cached=7))

    async def use(client: openai.AsyncOpenAI) -> tuple[Any, list[ChatCompletionChunk]]:
        plain = await client.chat.completions.create(model="toy", messages=IMAGES)
        options: Any = {"include_usage": True}
        return plain, await chunks_of(client, messages=IMAGES, stream_options=options)

    plain, streamed = with_client(service, use)
    num_prompt = len(service._prompt(service.last.request)[0])
    usage = plain.usage.model_dump(exclude_none=True)
    assert usage == {
        "prompt_tokens": num_prompt,
        "completion_tokens": 7,
        "total_tokens": num_prompt + 7,
        "prompt_tokens_details": {"cached_tokens": 7, "image_tokens": 2 * IMAGE_TOKENS},
    }
    assert streamed[-1].choices == []
    assert streamed[-1].usage == plain.usage
    assert all(c.usage is None and "usage" in c.model_fields_set for c in streamed[:-1])


def test_image_order_and_options_reach_the_service() -> None:
    service = ScriptedService()
    with_client(service, lambda c: c.chat.completions.create(model="toy", messages=IMAGES))
    given: Any = service.last.request.input
    assert shown(given) == [["Explain image 1:", PNG, "Explain image 2:", PNG + "BBBB"]]
    assert [s.options.detail for s in given.media()] == ["low", "auto"]


def test_continuous_usage() -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    chunks = with_client(ScriptedService(), lambda c: chunks_of(c, messages=ASK, stream_options=options))
    assert [c.usage.completion_tokens for c in chunks] == [1, 1, 2, 3, 4, 5, 6, 7, 7]


@pytest.mark.parametrize("stop", [None, "c"])
def test_several_samples(stop: str | None) -> None:
    """Each sample ends on its own; a stop string in one does not touch the others."""
    service = ScriptedService(Script([tuple(b"abc"), tuple(b"xyz!"), tuple(b"q")]))
    fields: dict[str, Any] = {"n": 3, "messages": ASK, **({"stop": stop} if stop else {})}

    async def use(client: openai.AsyncOpenAI) -> tuple[Any, list[ChatCompletionChunk]]:
        plain = await client.chat.completions.create(model="toy", **fields)
        return plain, await chunks_of(client, **fields)

    plain, streamed = with_client(service, use)
    expected = ["ab" if stop else "abc", "xyz!", "q"]
    assert [c.message.content for c in plain.choices] == expected
    assert [text_of(streamed, i) for i in range(3)] == expected
    assert finishes(streamed) == {i: c.finish_reason for i, c in enumerate(plain.choices)}
    assert plain.usage.completion_tokens == (3 if stop else 4) + 5 + 2
    assert {flow.outcome for flow in service.flows.values()} == {"completed"}


def test_stop_string_ends_the_sample_in_the_service() -> None:
    service = ScriptedService(Script([tuple(b"one two three")]))
    fields: Any = {"messages": ASK, "stop": " two"}
    answer = with_client(service, lambda c: c.chat.completions.create(model="toy", **fields))
    assert answer.choices[0].message.content == "one"
    assert answer.choices[0].stop_reason == " two"
    assert service.last.stopped == {0}
    assert service.last.num_steps == len("one two")


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_under_way_when_a_stop_matched_are_dropped(stream: bool) -> None:
    service = ScriptedService(Script([tuple(b"abcdef"), tuple(b"xyzxyz")], stop_lag_steps=2))
    body = {**user("a"), "n": 2, "stop": "b", "stream": stream, "stream_options": None}
    response = post(service, "/v1/chat/completions", body)
    if stream:
        *chunks, last = events_of(response)
        assert last == "[DONE]"
        found = [c for chunk in chunks for c in chunk["choices"] if c["index"] == 0]
        assert "".join(c["delta"].get("content") or "" for c in found) == "a"
        assert [c["finish_reason"] for c in found].count("stop") == 1
    else:
        assert [c["message"]["content"] for c in response.json()["choices"]] == ["a", "xyzxyz"]
        assert response.json()["usage"]["completion_tokens"] == 2 + 7


def test_tokens_after_a_stop_in_the_same_step_do_not_count() -> None:
    service = ScriptedService(Script([tuple(b"abcdef")], per_step=6))
    answer = with_client(service, lambda c: c.chat.completions.create(model="toy", messages=ASK, stop="b"))
    assert (answer.choices[0].message.content, answer.usage.completion_tokens) == ("a", 2)


def test_logprobs_streamed_equal_plain() -> None:
    service = ScriptedService(Script([FAMILY]))
    fields: Any = {"messages": ASK, "logprobs": True, "top_logprobs": 2}

    async def use(client: openai.AsyncOpenAI) -> tuple[Any, list[ChatCompletionChunk]]:
        plain = await client.chat.completions.create(model="toy", **fields)
        return plain, await chunks_of(client, **fields)

    plain, streamed = with_client(service, use)
    content = plain.choices[0].logprobs.content
    assert bytes(b for token in content for b in token.bytes).decode() == plain.choices[0].message.content
    assert all(len(token.top_logprobs) == 2 for token in content)
    assert content[-1].model_dump() == {
        "token": "\ufffd",
        "bytes": [FAMILY[-1]],
        "logprob": -0.5,
        "top_logprobs": [
            {"token": "\ufffd", "bytes": [FAMILY[-1]], "logprob": -0.5},
            {"token": "\ufffd", "bytes": [FAMILY[-1] + 1], "logprob": -1.5},
        ],
    }
    parts = [c.logprobs for chunk in streamed for c in chunk.choices if c.logprobs]
    assert [t for part in parts for t in part.content] == content


def test_impossible_tokens_have_finite_logprobs() -> None:
    """API-12."""
    script = Script(logprobs=lambda t, p: TokenLogprobs(float("-inf"), 1, ((65, float("-inf")),)))
    fields: Any = {"messages": ASK, "logprobs": True, "top_logprobs": 20}
    answer = with_client(ScriptedService(script), lambda c: c.chat.completions.create(model="toy", **fields))
    token = answer.choices[0].logprobs.content[0]
    assert (token.logprob, token.top_logprobs[0].logprob) == (-9999.0, -9999.0)


@pytest.mark.parametrize("stream", [False, True])
def test_nan_is_our_error(stream: bool) -> None:
    script = Script(logprobs=lambda t, p: TokenLogprobs(float("nan"), 1, ()))
    body = {**user("a"), "logprobs": True, "stream": stream}
    response = post(ScriptedService(script), "/v1/chat/completions", body)
    assert (response.status_code, response.json()["error"]["code"]) == (500, "engine_error")


def test_echo_repeats_the_message_it_continues() -> None:
    messages = [*ASK, {"role": "assistant", "content": "Well, "}]
    body = {"messages": messages, "continue_final_message": True, "echo": True}
    plain = post(ScriptedService(), "/v1/chat/completions", body).json()
    assert plain["choices"][0]["message"]["content"] == "Well, Hello!"
    *chunks, _ = events_of(post(ScriptedService(), "/v1/chat/completions", {**body, "stream": True}))
    assert "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks) == "Well, Hello!"


@pytest.mark.parametrize(
    ("script", "fields", "kind"),
    [
        (Script(), {"temperature": 9}, openai.BadRequestError),
        (Script(refusal=ContextLengthExceeded("too long")), {}, openai.BadRequestError),
        (Script(fail_at_step=0, error=EngineError("no luck")), {}, openai.InternalServerError),
        (Script(), {"model": "nobody"}, openai.NotFoundError),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_client_sees_typed_errors(script: Script, fields: Any, kind: type[Exception], stream: bool) -> None:
    body: Any = {"model": "toy", "messages": ASK, "stream": stream, **fields}
    with pytest.raises(kind):
        with_client(ScriptedService(script), lambda c: c.chat.completions.create(**body))


def test_client_sees_an_error_in_mid_stream() -> None:
    service = ScriptedService(Script(fail_at_step=3, error=EngineError("no luck")))
    with pytest.raises(openai.APIError, match="no luck"):
        with_client(service, lambda c: chunks_of(c, messages=ASK))


def test_client_with_an_api_key() -> None:
    def ask(client: openai.AsyncOpenAI) -> Awaitable[Any]:
        return client.chat.completions.create(model="toy", messages=ASK)

    assert with_client(ScriptedService(), ask, api_key="k", client_key="k").choices
    with pytest.raises(openai.AuthenticationError):
        with_client(ScriptedService(), ask, api_key="k", client_key="other")


def test_many_streams_at_once_do_not_mix() -> None:
    scripts = [Script([tuple(f"answer {i}".encode())], per_step=1 + i % 3) for i in range(16)]

    async def use(client: openai.AsyncOpenAI) -> list[str]:
        found = await asyncio.gather(*(chunks_of(client, messages=ASK) for _ in scripts))
        return sorted(text_of(chunks) for chunks in found)

    assert with_client(ScriptedService(*scripts), use) == sorted(f"answer {i}" for i in range(16))
