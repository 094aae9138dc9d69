"""OpenAI message shapes (API-01, API-05, API-06, API-08): what is accepted and what is refused, and how."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from api.conversation import conversation_of
from api.schemas import ChatRequest, parse
from contracts.conversation import Conversation, MediaPart, TextPart
from contracts.errors import BadRequest
from contracts.media import MediaOptions
from tests.api.fakes import shown

_decoder = msgspec.json.Decoder(ChatRequest)
PNG = "data:image/png;base64,AAAA"


def convert(
    *messages: dict[str, Any], modalities: tuple[str, ...] = ("text", "image"), **fields: Any
) -> Conversation:
    body = parse(_decoder, msgspec.json.encode({"messages": messages, **fields}))
    return conversation_of(
        body.messages,
        tools=body.tools,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        input_modalities=modalities,
    )


def refused(*messages: dict[str, Any], **fields: Any) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        convert(*messages, **fields)
    return caught.value


def image(url: Any = PNG, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": url, **more}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def test_part_order_is_kept() -> None:
    first, second = "https://example.com/1.png", "https://example.com/2.png"
    parts = [text("Explain image 1:"), image(first), text("Explain image 2:"), image({"url": second})]
    assert shown(convert(user(*parts))) == [["Explain image 1:", first, "Explain image 2:", second]]


def test_a_spoken_answer_known_by_its_id_alone_is_refused() -> None:
    error = refused({"role": "assistant", "audio": {"id": "audio-1"}})
    assert error.param == "messages[0].audio"
    assert "transcript" in error.message


def test_both_forms_of_image_url_are_the_same() -> None:
    assert convert(user(image(PNG))) == convert(user(image({"url": PNG})))


@pytest.mark.parametrize(
    ("part", "param", "says"),
    [
        (image(None), "image_url", "required"),
        ({"type": "image_url"}, "image_url", "required"),
        (image({}), "image_url.url", "URL"),
        (image(""), "image_url.url", "URL"),
        (image({"url": ""}), "image_url.url", "URL"),
        (image({"url": 5}), "image_url.url", "Expected str"),
        (image(5), "image_url", "Expected str"),
        (image({"url": PNG, "detail": "ultra"}), "image_url.detail", "auto, low, high"),
        (image({"url": PNG, "detail": ""}), "image_url.detail", "auto, low, high"),
        (image({"url": PNG, "max_pixels": 0}), "max_pixels", "from 1"),
        (image(PNG, min_pixels=-1), "min_pixels", "from 1"),
        (image(PNG, min_pixels="9"), "min_pixels", "Expected int"),
        (image(PNG, min_pixels=9, max_pixels=8), "min_pixels", "above max_pixels"),
        (image({"url": PNG, "max_pixels": 9}, max_pixels=8), "max_pixels", "twice"),
        ({"image_url": PNG}, "type", "required"),
        ({"type": "image", "image": PNG}, "type", "must be 'image_url' for an image"),
        ({"type": "hologram"}, "type", "'hologram'"),
        ({"type": "x" * 5000}, "type", "'" + "x" * 32 + "'"),
        (
            {"type": "input_audio"},
            "type",
            "is for audio input, which this model does not take; it takes text, image",
        ),
        (
            {"type": "video_url"},
            "type",
            "is for video input, which this model does not take; it takes text, image",
        ),
        ({"type": "text"}, "text", "required"),
        ({"type": "text", "text": 5}, "text", "Expected str"),
    ],
)
def test_bad_parts_are_refused_by_name(part: dict[str, Any], param: str, says: str) -> None:
    error = refused(user(text("before"), part))
    assert error.status == 400
    assert error.param == f"messages[0].content[1].{param}"
    assert says in error.message
    assert len(error.message) < 200


@pytest.mark.parametrize(
    ("part", "options"),
    [
        (image(), MediaOptions()),
        (image({"url": PNG, "detail": "low"}), MediaOptions(detail="low")),
        (image(PNG, max_pixels=3136), MediaOptions(max_pixels=3136)),
        (image({"url": PNG, "max_pixels": 3136}), MediaOptions(max_pixels=3136)),
        (image({"url": PNG, "min_pixels": 9}, max_pixels=99), MediaOptions(min_pixels=9, max_pixels=99)),
    ],
)
def test_media_options_are_honoured_in_both_places(part: dict[str, Any], options: MediaOptions) -> None:
    source = convert(user(text("a"), part)).media()[0]
    assert source.options == options
    assert source.param == "messages[0].content[1]"


CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
ASKED = {"role": "user", "content": "?"}


@pytest.mark.parametrize(
    ("message", "parts", "num_calls"),
    [
        ({"role": "assistant", "content": ""}, [""], 0),
        ({"role": "assistant", "content": None, "tool_calls": [CALL]}, [], 1),
        ({"role": "assistant", "tool_calls": [CALL]}, [], 1),
        ({"role": "assistant", "content": [], "tool_calls": [CALL]}, [], 1),
        ({"role": "assistant", "content": "yes", "tool_calls": [CALL, CALL]}, ["yes"], 2),
        ({"role": "assistant", "content": "yes", "tool_calls": []}, ["yes"], 0),
        ({"role": "assistant", "content": "yes", "tool_calls": None, "refusal": None}, ["yes"], 0),
        ({"role": "assistant", "content": None, "tool_calls": []}, [], 0),
        ({"role": "assistant", "content": None, "refusal": "no"}, ["no"], 0),
        ({"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}, ["no"], 0),
        ({"role": "assistant", "content": "yes", "audio": {"id": "audio-1"}}, ["yes"], 0),
        ({"role": "assistant", "content": None, "audio": {"id": "a", "transcript": "yes"}}, ["yes"], 0),
        ({"role": "user", "content": ""}, [""], 0),
        ({"role": "user", "content": "a", "name": "ann"}, ["a"], 0),
        ({"role": "developer", "content": "be brief"}, ["be brief"], 0),
        ({"role": "system", "content": [{"type": "text", "text": "s"}]}, ["s"], 0),
        ({"role": "tool", "tool_call_id": "c1", "content": "7"}, ["7"], 0),
        ({"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "7"}]}, ["7"], 0),
        ({"role": "tool", "tool_call_id": "c1", "content": ""}, [""], 0),
        ({"role": "tool", "tool_call_id": "c1", "content": "<|image|>"}, ["<|image|>"], 0),
    ],
)
def test_valid_shapes(message: dict[str, Any], parts: list[str], num_calls: int) -> None:
    conversation = convert(ASKED, message)
    assert shown(conversation)[1] == parts
    assert len(conversation.messages[1].tool_calls) == num_calls
    assert conversation.messages[1].role == message["role"]


@pytest.mark.parametrize(
    ("message", "param", "says"),
    [
        ({"role": "user", "content": []}, ".content", "non-empty"),
        ({"role": "user", "content": None}, ".content", "non-empty"),
        ({"role": "user"}, ".content", "non-empty"),
        ({"role": "user", "content": 5}, ".content", "Expected"),
        ({"role": "user", "content": ["text"]}, ".content[0]", "Expected object"),
        ({"role": "assistant", "content": None}, ".content", "non-empty"),
        ({"role": "tool", "content": "7"}, ".tool_call_id", "required"),
        ({"role": "tool", "content": "7", "tool_call_id": "x" * 300}, ".tool_call_id", "256"),
        ({"role": "wizard", "content": "a"}, ".role", "one of"),
        ({"role": "", "content": "a"}, ".role", "one of"),
        ({"content": "a"}, ".role", "required"),
        ({"role": "user", "content": "a", "name": ""}, ".name", "256"),
        ({"role": "user", "content": "a", "name": "n" * (1 << 20)}, ".name", "256"),
        (
            {"role": "user", "content": "a", "tool_calls": [CALL]},
            ".tool_calls",
            "is only allowed in an assistant message",
        ),
        ({"role": "assistant", "tool_calls": [{}]}, ".tool_calls[0].function", "required"),
        ({"role": "assistant", "tool_calls": [{**CALL, "type": "x"}]}, ".tool_calls[0].type", "function"),
    ],
)
def test_invalid_shapes(message: dict[str, Any], param: str, says: str) -> None:
    error = refused(ASKED, message)
    assert error.param == f"messages[1]{param}"
    assert says in error.message
    assert len(error.message) < 200


@pytest.mark.parametrize("role", ["tool", "system", "developer", "assistant"])
def test_only_user_messages_hold_images(role: str) -> None:
    error = refused(ASKED, {"role": role, "tool_call_id": "c1", "content": [text("seen:"), image()]})
    assert error.param == "messages[1].content[1]"
    assert f"a {role} message" in error.message
    assert PNG not in error.message


def test_model_without_images_says_so() -> None:
    assert (
        "is for image input, which this model does not take"
        in refused(user(image()), modalities=("text",)).message
    )


def test_tools_go_to_the_template_as_sent() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"b": 1, "a": [None, 1.5]}}}]
    assert convert(ASKED, tools=tools).tools_json == msgspec.json.encode(tools).decode()
    assert convert(ASKED, tools=[]).tools_json is None
    assert convert(ASKED, tools=None).tools_json is None


@pytest.mark.parametrize(
    "tools", [5, {}, ["f"], [{}], [{"type": "function"}], [{"type": "web", "function": {"name": "f"}}]]
)
def test_bad_tools(tools: Any) -> None:
    error = refused(ASKED, tools=tools)
    assert error.param is not None
    assert error.param.startswith("tools")


def test_continuing_the_last_message() -> None:
    begun = {"role": "assistant", "content": "Once"}
    assert convert(ASKED).add_generation_prompt
    conversation = convert(ASKED, begun, continue_final_message=True)
    assert (conversation.add_generation_prompt, conversation.continue_final_message) == (False, True)
    both = refused(ASKED, begun, continue_final_message=True, add_generation_prompt=True)
    assert both.param == "continue_final_message"
    assert refused(ASKED, {"role": "assistant", "content": ""}, continue_final_message=True).status == 400


def test_no_messages() -> None:
    assert refused().param == "messages"


def test_parts_are_of_the_neutral_types() -> None:
    message = convert(user(text("a"), image())).messages[0]
    assert [type(p) for p in message.parts] == [TextPart, MediaPart]
