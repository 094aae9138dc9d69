"""Sound and video over HTTP from a whole tiny omni model: every form of a part, its cost, and refusals."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch

from contracts.params import SamplingParams
from stages.launch import serve_service
from stages.omni_service import OmniService
from stages.options import ServeOptions
from stages.service import GenerationRequest, PromptReady
from tests.api.serving import running
from tests.omni_oracle import Heard, OmniTurn, Seen, served_turns, sound, wav_url
from tests.preprocess.films import film
from tests.preprocess.samples import data_url as url_of
from tests.served import conversation, data_url, picture

torch.set_num_threads(1)
MAX_TOKENS = 6
SOUND = wav_url(sound(1, 1.3))
SOUND_BYTES = SOUND.partition(",")[2]
FILM = film(
    [np.asarray(picture(10 + i, 64, 60)) for i in range(8)],
    fps=4,
    codec="mpeg4",
    sound=sound(5, 2.0)[None],
)
VIDEO = "data:video/mp4;base64," + base64.b64encode(FILM).decode()
HEARD, SEEN, TALKIE = Heard(sound(1, 1.3)), Seen(FILM), Seen(FILM, with_sound=True)
IMAGE = {"type": "image_url", "image_url": {"url": data_url(picture(1))}}
WITH_SOUND = {"mm_processor_kwargs": {"use_audio_in_video": True}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def video(**options: Any) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": VIDEO, **options}}


def audio(data: str = SOUND_BYTES) -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}


# the parts of the message, further fields, the same question to the graph itself, the media that it costs
QUESTIONS: dict[str, tuple[list[dict[str, Any]], dict[str, Any], OmniTurn, set[str]]] = {
    "input_audio": ([audio(), text("who?")], {}, ("user", [HEARD, "who?"]), {"audio"}),
    "audio_url": (
        [text("listen"), {"type": "audio_url", "audio_url": {"url": SOUND}}],
        {},
        ("user", ["listen", HEARD]),
        {"audio"},
    ),
    "a silent video": ([video(), text("what?")], {}, ("user", [SEEN, "what?"]), {"video"}),
    "a video with its sound": (
        [video(use_audio_in_video=True), text("what?")],
        {},
        ("user", [TALKIE, "what?"]),
        {"video", "audio"},
    ),
    "its sound by a field of the request": (
        [video(), text("what?")],
        WITH_SOUND,
        ("user", [TALKIE, "what?"]),
        {"video", "audio"},
    ),
    "more frames": (
        [video(fps=4.0), text("what?")],
        {},
        ("user", [Seen(FILM, fps=4.0), "what?"]),
        {"video"},
    ),
    "everything": (
        [IMAGE, text("and"), audio(), video(), text("well?")],
        WITH_SOUND,
        ("user", [picture(1), "and", HEARD, TALKIE, "well?"]),
        {"image", "video", "audio"},
    ),
}


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[tuple[OmniService, openai.AsyncOpenAI, httpx.AsyncClient]]:
    overrides = ("thinker.kv_memory=16MiB", "preprocess.workers=1")
    options = ServeOptions(
        model=folder, dtype="float32", overrides=overrides, served_model_name=("ears", "eyes")
    )
    async with serve_service(options) as service:
        async with (
            running(service) as server,
            openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as sdk,
            httpx.AsyncClient(base_url=server.url) as http,
        ):
            yield service, sdk, http
        await service.drained()
        reports = await service.check_integrity()
        while any(r.busy for r in reports):
            reports = await service.check_integrity()
        assert [r.problem for r in reports if r.problem] == []


async def answered(service: OmniService, turn: OmniTurn) -> tuple[PromptReady, list[int]]:
    """By the graph itself, which is compared with `transformers` elsewhere."""
    request = GenerationRequest(
        input=conversation(served_turns([turn])),
        sampling=SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS),
    )
    prompt, tokens = None, []
    async for event in service.generate(request):
        if isinstance(event, PromptReady):
            prompt = event
        else:
            tokens += [token for delta in event.deltas for token in delta.token_ids]
    assert prompt is not None
    return prompt, tokens


def test_sound_and_video_reach_the_model(tiny_omni: Callable[..., Path]) -> None:
    async def run() -> None:
        async with serving(tiny_omni("qwen3_omni_moe")) as (service, sdk, _):
            assert [model.id async for model in sdk.models.list()] == ["ears", "eyes"]
            counted: dict[str, dict[str, int]] = {}
            for name, (parts, fields, turn, kinds) in QUESTIONS.items():
                messages: Any = [{"role": "user", "content": parts}]
                bounds: Any = {"model": "ears", "max_tokens": MAX_TOKENS, "temperature": 0}
                bounds |= {"messages": messages, "extra_body": fields}
                plain = await sdk.chat.completions.create(**bounds)
                stream = await sdk.chat.completions.create(
                    **bounds, stream=True, stream_options={"include_usage": True}
                )
                chunks = [chunk async for chunk in stream]
                prompt, tokens = await answered(service, turn)
                assert plain.usage.prompt_tokens == len(prompt.prompt_token_ids), name
                assert plain.usage.completion_tokens == len(tokens)
                streamed = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
                decoded = service.tokenizer.decode(tokens)
                assert plain.choices[0].message.content == streamed == decoded, name
                details = plain.usage.prompt_tokens_details.model_dump(exclude_none=True)
                again = chunks[-1].usage.prompt_tokens_details.model_dump(exclude_none=True)
                assert details | {"cached_tokens": 0} == again | {"cached_tokens": 0}, name
                counted[name] = {kind: n for kind, n in prompt.media_tokens.items() if n}
                assert set(counted[name]) == kinds, name
                assert {f"{kind}_tokens": n for kind, n in counted[name].items()}.items() <= details.items()
            assert counted["more frames"]["video"] == 2 * counted["a silent video"]["video"]
            assert counted["input_audio"] == counted["audio_url"]
            assert service.stats()["audio"]["encoder_items_total"] == 2, "one recording, one sound track"

    asyncio.run(run())


EMPTY = wav_url(sound(1, 0.0))
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    "no recording": (audio("AAAA" * 40), {}, "messages[0].content[1]", "not a readable audio file"),
    "an empty one": (audio(EMPTY), {}, "messages[0].content[1]", "audio is empty"),
    "no base64": (audio("*not base64*"), {}, "messages[0].content[1]", "base64"),
    "no film": (
        {"type": "video_url", "video_url": url_of(b"junk" * 64, "video/mp4")},
        {},
        "messages[0].content[1]",
        "video",
    ),
    "a picture as a film": (
        {"type": "video_url", "video_url": data_url(picture(1))},
        {},
        "messages[0].content[1]",
        "video",
    ),
    "a list of frames": (
        {"type": "video_url", "video_url": "data:video/jpeg;base64," + ",".join(["AAAA"] * 5000)},
        {},
        "messages[0].content[1]",
        "base64",
    ),
    "frames told twice": (
        video(fps=1, num_frames=4),
        {},
        "messages[0].content[1].video_url.num_frames",
        "excludes fps",
    ),
    "an option that nobody knows": (
        video(),
        {"mm_processor_kwargs": {"use_audio": True}},
        "mm_processor_kwargs.use_audio",
        "",
    ),
}


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_wrong_is_refused_and_harms_nobody(tiny_omni: Callable[..., Path], stream: bool) -> None:
    """AUD-09, AUD-10, VID-03, VID-10, VID-12: at once, beside a question that is answered."""

    async def run() -> None:
        async with serving(tiny_omni("qwen3_omni_moe")) as (service, _, http):

            async def ask(part: dict[str, Any], fields: dict[str, Any]) -> httpx.Response:
                messages = [{"role": "user", "content": [text("hear"), part]}]
                body = {"messages": messages, "max_tokens": 3, "temperature": 0, "stream": stream, **fields}
                return await http.post("/v1/chat/completions", json=body, timeout=None)

            *refusals, good = await asyncio.gather(
                *(ask(part, fields) for part, fields, _, _ in REFUSED.values()), ask(audio(), {})
            )
            for (name, (_, _, param, words)), response in zip(REFUSED.items(), refusals, strict=True):
                assert response.status_code == 400, name
                assert response.headers["content-type"] == "application/json", "before a stream begins"
                error = response.json()["error"]
                assert (error["type"], error["param"]) == ("invalid_request_error", param), name
                assert words in error["message"], name
                assert len(error["message"]) < 250
            assert good.status_code == 200
            health = await http.get("/health")
            assert health.status_code == 200
            assert {stage["state"] for stage in health.json()["stages"]} == {"ready"}
            assert service.stats()["preprocess"]["worker_deaths_total"] == 0

    asyncio.run(run())
