"""Sound and video in messages: every form is taken, options reach the item, and what is wrong is named."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from api.conversation import conversation_of
from api.schemas import ChatRequest, parse
from contracts.errors import BadRequest
from contracts.media import MediaOptions, MediaSource

ALL = ("text", "image", "audio", "video")
FILM = "https://example.com/film.mp4"
WAV = "data:audio/wav;base64,AAAA"
_decoder = msgspec.json.Decoder(ChatRequest)


def source_of(
    part: dict[str, Any], modalities: tuple[str, ...] = ALL, role: str = "user", **fields: Any
) -> MediaSource:
    messages = [{"role": role, "content": [{"type": "text", "text": "a"}, part]}]
    body = parse(_decoder, msgspec.json.encode({"messages": messages, **fields}))
    conversation = conversation_of(
        body.messages,
        tools=body.tools,
        add_generation_prompt=None,
        continue_final_message=None,
        input_modalities=modalities,
        media_kwargs=body.mm_processor_kwargs,
    )
    (source,) = conversation.media()
    return source


def video(url: Any = FILM, **more: Any) -> dict[str, Any]:
    return {"type": "video_url", "video_url": url, **more}


@pytest.mark.parametrize(
    ("part", "url"),
    [
        ({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}, WAV),
        ({"type": "input_audio", "input_audio": {"data": "AAAA"}}, WAV),
        ({"type": "input_audio", "input_audio": {"data": WAV, "format": "mp3"}}, WAV),
        ({"type": "audio_url", "audio_url": WAV}, WAV),
        ({"type": "audio_url", "audio_url": {"url": f" {WAV}\n"}}, WAV),
    ],
)
def test_all_forms_of_sound(part: dict[str, Any], url: str) -> None:
    assert source_of(part) == MediaSource("audio", url, MediaOptions(), "messages[0].content[1]")


@pytest.mark.parametrize(
    ("part", "options"),
    [
        (video(), MediaOptions()),
        (video({"url": FILM}), MediaOptions()),
        (video({"url": FILM, "fps": 1}), MediaOptions(fps=1.0)),
        (video(fps=0.5), MediaOptions(fps=0.5)),
        (video({"url": FILM, "num_frames": 8}), MediaOptions(num_frames=8)),
        (video({"url": FILM, "max_frames": 8, "max_pixels": 99}), MediaOptions(max_frames=8, max_pixels=99)),
        (video({"url": FILM, "use_audio_in_video": True}), MediaOptions(with_audio=True)),
        (video(use_audio_in_video=False), MediaOptions()),
    ],
)
def test_options_of_a_video(part: dict[str, Any], options: MediaOptions) -> None:
    assert source_of(part) == MediaSource("video", FILM, options, "messages[0].content[1]")


def test_options_of_the_request_are_for_parts_that_say_nothing() -> None:
    kwargs = {"use_audio_in_video": True, "fps": 1.0, "max_frames": 16, "max_pixels": 5000}
    said = {"url": FILM, "use_audio_in_video": False, "num_frames": 4, "max_frames": 8, "max_pixels": 900}
    assert source_of(video(), mm_processor_kwargs=kwargs).options == MediaOptions(
        fps=1.0, max_frames=16, max_pixels=5000, with_audio=True
    )
    assert source_of(video(said), mm_processor_kwargs=kwargs).options == MediaOptions(
        num_frames=4, max_frames=8, max_pixels=900
    )
    image = {"type": "image_url", "image_url": "data:,"}
    assert source_of(image, mm_processor_kwargs=kwargs).options == MediaOptions(max_pixels=5000)


@pytest.mark.parametrize(
    ("part", "param", "says"),
    [
        ({"type": "input_audio"}, "input_audio", "required"),
        ({"type": "input_audio", "input_audio": "AAAA"}, "input_audio", "Expected"),
        ({"type": "input_audio", "input_audio": {"format": "wav"}}, "input_audio.data", "base64"),
        ({"type": "input_audio", "input_audio": {"data": " "}}, "input_audio.data", "base64"),
        (
            {"type": "input_audio", "input_audio": {"data": "A", "format": "x" * 99}},
            "input_audio.format",
            "name",
        ),
        (
            {"type": "input_audio", "input_audio": {"data": "A", "format": "a,b"}},
            "input_audio.format",
            "name",
        ),
        ({"type": "audio_url"}, "audio_url", "required"),
        ({"type": "audio_url", "audio_url": {"url": ""}}, "audio_url.url", "URL"),
        ({"type": "video_url"}, "video_url", "required"),
        (video({}), "video_url.url", "URL"),
        (video({"url": FILM, "fps": 0}), "video_url.fps", "above 0"),
        (video({"url": FILM, "fps": "2"}), "video_url.fps", "Expected"),
        (video({"url": FILM, "num_frames": 0}), "video_url.num_frames", "from 1"),
        (video({"url": FILM, "max_frames": -1}), "video_url.max_frames", "from 1"),
        (video({"url": FILM, "fps": 1, "num_frames": 2}), "video_url.num_frames", "excludes fps"),
        (video({"url": FILM, "fps": 1}, fps=2), "video_url.fps", "twice"),
        (video({"url": FILM, "min_pixels": 9, "max_pixels": 8}), "video_url.min_pixels", "above max_pixels"),
    ],
)
def test_bad_parts_are_refused_by_name(part: dict[str, Any], param: str, says: str) -> None:
    with pytest.raises(BadRequest) as caught:
        source_of(part)
    assert caught.value.param == f"messages[0].content[1].{param}"
    assert says in caught.value.message


@pytest.mark.parametrize(
    ("kwargs", "param"),
    [
        ({"fps": -1}, "mm_processor_kwargs.fps"),
        ({"num_frames": 0}, "mm_processor_kwargs.num_frames"),
        ({"fps": 1, "num_frames": 2}, "mm_processor_kwargs.num_frames"),
        ({"use_audio_in_video": "yes"}, "mm_processor_kwargs.use_audio_in_video"),
        ({"use_audio": True}, "mm_processor_kwargs.use_audio"),
        (5, "mm_processor_kwargs"),
    ],
)
def test_bad_options_of_the_request_are_refused_by_name(kwargs: Any, param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        source_of(video(), mm_processor_kwargs=kwargs)
    assert caught.value.param == param


def test_what_the_model_does_not_take_is_refused() -> None:
    with pytest.raises(BadRequest, match="needs a model that takes audio") as caught:
        source_of(video(use_audio_in_video=True), modalities=("text", "video"))
    assert caught.value.param == "messages[0].content[1].video_url.use_audio_in_video"
    for part in (video(), {"type": "audio_url", "audio_url": WAV}):
        with pytest.raises(BadRequest, match="put it into a user message"):
            source_of(part, role="assistant")
        with pytest.raises(BadRequest, match="it takes text, image"):
            source_of(part, modalities=("text", "image"))
