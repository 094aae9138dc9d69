"""The API over the real graph of a tiny checkpoint: text, pictures, stops, errors, and nothing left."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from PIL import Image

from model_families.text import HFChatTokenizer
from stages.launch import serve_service
from stages.options import ServeOptions
from tests.api.serving import TIMEOUT_S, running
from tests.preprocess.samples import data_url as url_of
from tests.preprocess.samples import encode
from tests.served import data_url, picture
from tests.tiny_models import build_tiny, reference_inputs

Tiny = Callable[..., Path]
PARTS = [
    {"type": "text", "text": "what is "},
    {"type": "image_url", "image_url": {"url": data_url(picture(1))}},
    {"type": "text", "text": "?"},
]

BAD_URLS = (
    *(
        "data:image/png;base64,AAAA",
        "data:image/png,abc",
        "data:,abc",
        "data:image/png;base64",
        "iVBORw0KGgo=",
    ),
    *("/etc/hostname", "file:/etc/hostname", "http://127.0.0.1:1/a"),
    url_of(encode(picture(1))[:-40]),
    url_of(encode(picture(1, 1093, 5))),  # longer than 200 times its height
    url_of(encode(picture(1, 5, 1093))),
    url_of(b"this is no picture"),
    url_of(b""),
    url_of(b"\0\0\0\x1cftypheic\0\0\0\0mif1heicmiaf" + bytes(64)),
    url_of(encode(Image.new("1", (12_000, 12_000)))),
)


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
        for url in BAD_URLS:
            part = {"type": "image_url", "image_url": {"url": url}}
            await refused(
                client, model, stream, [{"type": "text", "text": "a"}, part], "messages[0].content[1]"
            )
        await refused(client, model, stream, "a" * 100_000, "messages")

    with_model(tiny("qwen2_5_vl"), use)


def test_pictures_of_any_kind_and_size_are_counted(tiny: Tiny) -> None:
    """IMG-07, IMG-10, IMG-12, IMG-14, IMG-16: none vanishes; grey may stand beside colour, a dot beside a
    poster."""
    sizes = [(1, 1), (1, 1), (918, 1850), (257, 27), (500, 19), (1000, 5), (100, 1)]
    pictures = [picture(n, *size) for n, size in enumerate(sizes)]
    urls = [url_of(encode(image)) for image in pictures]
    for image, format_name, options in (
        (pictures[2].convert("L"), "JPEG", {}),
        (pictures[2], "JPEG", {}),
        (pictures[3], "WEBP", {"lossless": True}),
        (pictures[3], "WEBP", {}),
    ):
        pictures.append(image)
        urls.append(url_of(encode(image, format_name, **options), f"image/{format_name.lower()}"))

    async def use(client: openai.AsyncOpenAI, model: str) -> None:
        parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        messages: Any = [{"role": "user", "content": [*parts, {"type": "text", "text": "which?"}]}]
        answer = await client.chat.completions.create(model=model, messages=messages, max_tokens=2)
        shown = [{"role": "user", "content": [{"type": "image"}] * len(pictures)}]
        theirs = reference_inputs(tiny("qwen2_5_vl"), shown, [image.convert("RGB") for image in pictures])
        details = answer.usage.prompt_tokens_details
        assert details.image_tokens == int(theirs["mm_token_type_ids"].sum())

    with_model(tiny("qwen2_5_vl"), use)


def test_a_picture_costs_what_is_asked_for(tmp_path: Path) -> None:
    """IMG-26: `detail`, and `max_pixels` in the part or beside it; the streamed usage tells the same."""
    folder = build_tiny("qwen2_5_vl", tmp_path / "model")
    config = json.loads((folder / "preprocessor_config.json").read_text())
    (folder / "preprocessor_config.json").write_text(json.dumps(config | {"max_pixels": 1_000_000}))
    url = url_of(encode(picture(1, 700, 700)))

    async def use(client: openai.AsyncOpenAI, model: str) -> None:
        async def num_tokens(**part: Any) -> int:
            messages: Any = [{"role": "user", "content": [{"type": "image_url", **part}]}]
            fields: Any = {"model": model, "messages": messages, "max_tokens": 1}
            plain = await client.chat.completions.create(**fields)
            stream = await client.chat.completions.create(
                **fields, stream=True, stream_options={"include_usage": True}
            )
            (last,) = [chunk.usage async for chunk in stream if chunk.usage is not None]
            assert last.prompt_tokens == plain.usage.prompt_tokens
            counts = {u.prompt_tokens_details.image_tokens for u in (last, plain.usage)}
            assert len(counts) == 1
            return int(counts.pop())

        assert await num_tokens(image_url={"url": url}) == 25 * 25
        assert await num_tokens(image_url={"url": url, "detail": "high"}) == 25 * 25
        assert await num_tokens(image_url={"url": url, "detail": "low"}) == 16 * 16
        assert await num_tokens(image_url={"url": url, "max_pixels": 3600}) == 2 * 2
        assert await num_tokens(image_url={"url": url}, max_pixels=3600) == 2 * 2

    with_model(folder, use)


def test_parameters_beyond_openai_s_do_what_they_say(tiny: Tiny) -> None:
    """On the graph itself: who is stopped where, what is likely, what is cached and for whom."""
    tokenizer = HFChatTokenizer(tiny("qwen2_5_vl"))
    id_of = {tokenizer.token_bytes(i): i for i in reversed(range(tokenizer.vocab_size))}

    async def use(client: openai.AsyncOpenAI, model: str) -> None:
        async def ask(
            temperature: float = 0.0, seed: int | None = None, **extra: Any
        ) -> tuple[list[int], Any]:
            """The tokens that are told, and the answer."""
            answer = await client.chat.completions.create(
                model=model,
                messages=[{"role": "user", "content": "hello there"}],
                max_tokens=12,
                temperature=temperature,
                seed=seed,
                logprobs=True,
                extra_body={"ignore_eos": True, "skip_special_tokens": False, **extra},
            )
            told = answer.choices[0].logprobs.content
            return [id_of[bytes(token.bytes)] for token in told], answer

        plain, answer = await ask()
        assert (len(plain), answer.choices[0].finish_reason) == (12, "length")
        assert answer.usage.completion_tokens == 12
        assert (await ask(1.0, 5, top_k=1))[0] == plain
        assert (await ask(1.0, 6, min_p=1.0))[0] == plain
        assert (await ask(1.0, 7, top_p=1e-6))[0] == plain
        drawn = [(await ask(1.0, seed))[0] for seed in (1, 1, 2)]
        assert drawn[0] == drawn[1]
        assert drawn[0] != drawn[2]

        third, first_at = plain[2], plain.index(plain[2])
        _, stopped = await ask(stop_token_ids=[third])
        assert stopped.choices[0].finish_reason == "stop"
        assert stopped.usage.completion_tokens == first_at + 1
        _, later = await ask(stop_token_ids=[third], min_tokens=6)
        assert later.usage.completion_tokens >= 6
        assert third not in (await ask(logit_bias={str(third): -100}))[0]
        assert (await ask(logit_bias={str(third): 100}))[0] == [third] * 12
        assert (await ask(logit_bias={str(third): 100}, repetition_penalty=50.0))[0] != [third] * 12
        loud = {"logit_bias": {str(third): 3}}
        counts = [
            (await ask(presence_penalty=penalty, frequency_penalty=penalty, **loud))[0].count(third)
            for penalty in (-2.0, 0.0, 2.0)
        ]
        assert counts[0] >= counts[1] >= counts[2]
        assert counts[0] > counts[2]

        end = id_of[b"<|im_end|>"]
        _, ended = await ask(logit_bias={str(end): 100}, ignore_eos=False)
        assert (ended.usage.completion_tokens, ended.choices[0].finish_reason) == (1, "stop")
        for skip, text in ((True, ""), (False, "<|im_end|>" * 12)):
            _, special = await ask(logit_bias={str(end): 100}, skip_special_tokens=skip)
            assert special.choices[0].message.content == text

        prompt = "hello there, " * 12
        for salt, hit in ((None, False), (None, True), ("a", False), ("b", False), ("a", True)):
            extra = {} if salt is None else {"cache_salt": salt}
            done = await client.completions.create(model=model, prompt=prompt, max_tokens=1, extra_body=extra)
            assert (done.usage.prompt_tokens_details.cached_tokens > 0) == hit, salt
        many = await client.completions.create(model=model, prompt=[prompt, "hello"], n=2, max_tokens=3)
        assert [choice.index for choice in many.choices] == [0, 1, 2, 3]

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
