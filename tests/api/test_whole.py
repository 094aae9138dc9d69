"""The API over the real graph of a tiny checkpoint: text, pictures, stops, errors, and nothing left."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from stages.launch import serve_service
from stages.options import ServeOptions
from tests.api.serving import TIMEOUT_S, running
from tests.served import data_url, picture

Tiny = Callable[..., Path]
PARTS = [
    {"type": "text", "text": "what is "},
    {"type": "image_url", "image_url": {"url": data_url(picture(1))}},
    {"type": "text", "text": "?"},
]


def with_model(folder: Path, use: Callable[[openai.AsyncOpenAI, str], Awaitable[Any]]) -> Any:
    """`use(client, model name)`; afterwards every stage must be idle and whole."""

    async def run() -> Any:
        options = ServeOptions(model=folder, dtype="float32", overrides=("preprocess.workers=1",))
        async with serve_service(options) as service:
            async with (
                running(service) as server,
                openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client,
            ):
                result = await use(client, service.card.names[0])
            await service.drained()
            async with asyncio.timeout(TIMEOUT_S):  # a step may be under way when its last request ends
                reports = await service.check_integrity()
                while any(r.busy for r in reports):
                    reports = await service.check_integrity()
            assert [f"{r.stage}: {r.problem}" for r in reports if r.problem] == []
            return result

    return asyncio.run(run())


def test_pictures_text_and_stops(tiny: Tiny) -> None:
    async def use(client: openai.AsyncOpenAI, model: str) -> None:
        fields: dict[str, Any] = {
            "model": model,
            "messages": [{"role": "user", "content": PARTS}],
            "max_tokens": 16,
            "temperature": 0,
        }
        create = client.chat.completions.create
        plain = await create(**fields, logprobs=True)
        text = plain.choices[0].message.content
        stream = await create(**fields, stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
        usage, again = plain.usage, chunks[-1].usage
        assert (usage.prompt_tokens, usage.completion_tokens) == (
            again.prompt_tokens,
            again.completion_tokens,
        )
        assert usage.prompt_tokens_details.image_tokens > 0
        data = bytes(b for token in plain.choices[0].logprobs.content for b in token.bytes)
        assert data.decode(errors="replace") == text

        stop = text[len(text) // 2 : len(text) // 2 + 2]
        stopped = await create(**fields, stop=[stop])
        assert stopped.choices[0].message.content == text[: text.index(stop)]
        assert stopped.choices[0].finish_reason == "stop"
        assert stopped.usage.completion_tokens < usage.completion_tokens

    with_model(tiny("qwen2_5_vl"), use)


@pytest.mark.parametrize("stream", [False, True])
def test_bad_pictures_and_lengths_are_refused(tiny: Tiny, stream: bool) -> None:
    async def use(client: openai.AsyncOpenAI, model: str) -> None:
        for url in (
            "data:image/png;base64,AAAA",
            "data:image/png,abc",
            "/etc/hostname",
            "http://127.0.0.1:1/a",
        ):
            part = {"type": "image_url", "image_url": {"url": url}}
            await refused(
                client, model, stream, [{"type": "text", "text": "a"}, part], "messages[0].content[1]"
            )
        await refused(client, model, stream, "a" * 100_000, "messages")

    with_model(tiny("qwen2_5_vl"), use)


async def refused(client: openai.AsyncOpenAI, model: str, stream: bool, content: Any, param: str) -> None:
    messages: Any = [{"role": "user", "content": content}]
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(model=model, messages=messages, stream=stream, max_tokens=4)
    assert caught.value.param == param


def test_leaving_in_mid_stream_empties_the_graph(tiny: Tiny) -> None:
    async def use(client: openai.AsyncOpenAI, model: str) -> None:
        messages: Any = [{"role": "user", "content": PARTS}]
        async with await client.chat.completions.create(
            model=model, messages=messages, stream=True, extra_body={"ignore_eos": True}
        ) as stream:
            async for chunk in stream:
                if chunk.choices[0].delta.content:
                    break

    with_model(tiny("qwen2_5_vl"), use)
