"""Plain completions through the official client: prompt shapes, echo, legacy logprobs, several prompts."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from contracts.errors import ContextLengthExceeded
from contracts.messages import TokenLogprobs
from tests.api.fakes import Script, ScriptedService, ToyTokenizer, pieces
from tests.api.serving import events_of, post
from tests.api.test_chat import with_client

PATH = "/v1/completions"


def both_ways(service: ScriptedService, **fields: Any) -> tuple[Any, list[Any]]:
    async def use(client: openai.AsyncOpenAI) -> tuple[Any, list[Any]]:
        plain = await client.completions.create(model="toy", **fields)
        stream = await client.completions.create(
            model="toy", stream=True, stream_options={"include_usage": True}, **fields
        )
        return plain, [chunk async for chunk in stream]

    found: tuple[Any, list[Any]] = with_client(service, use)
    return found


def streamed_texts(chunks: list[Any], count: int) -> list[str]:
    return ["".join(c.text for k in chunks for c in k.choices if c.index == i) for i in range(count)]


@pytest.mark.parametrize(
    ("prompt", "inputs"),
    [
        ("a", ["a"]),
        (["a", "bc"], ["a", "bc"]),
        ([65, 66], [(65, 66)]),
        ([[65], [66, 67]], [(65,), (66, 67)]),
    ],
)
@pytest.mark.parametrize("n", [1, 2])
def test_prompt_shapes(prompt: Any, inputs: list[Any], n: int) -> None:
    answers = [tuple(f"answer {i}".encode()) for i in range(n)]
    service = ScriptedService(Script(answers))
    plain, streamed = both_ways(service, prompt=prompt, n=n, max_tokens=50)
    seen = [flow.request.input for flow in service.flows.values()]
    assert seen == inputs * 2
    expected = [f"answer {i}" for i in range(n)] * len(inputs)
    assert [c.text for c in plain.choices] == expected
    assert [c.index for c in plain.choices] == list(range(len(expected)))
    assert streamed_texts(streamed, len(expected)) == expected
    assert streamed[-1].usage == plain.usage
    assert plain.usage.completion_tokens == len(expected) * 9
    assert {c.finish_reason for c in plain.choices} == {"stop"}
    assert {flow.outcome for flow in service.flows.values()} == {"completed"}


def test_default_is_sixteen_tokens() -> None:
    plain, _ = both_ways(ScriptedService(Script([tuple(b"x" * 40)])), prompt="a")
    assert (plain.choices[0].text, plain.choices[0].finish_reason) == ("x" * 16, "length")


@pytest.mark.parametrize(
    ("prompt", "echoes"), [("né", ["né"]), ([110, 233], ["n\ufffd"]), (["a", "b"], ["a", "b"])]
)
def test_echo(prompt: Any, echoes: list[str]) -> None:
    plain, streamed = both_ways(ScriptedService(), prompt=prompt, echo=True)
    expected = [f"{echo}Hello!" for echo in echoes]
    assert [c.text for c in plain.choices] == expected
    assert streamed_texts(streamed, len(expected)) == expected


def test_stop_strings_streamed_and_plain() -> None:
    tokenizer = ToyTokenizer(b"a", b",b", b",c", b"!")
    plain, streamed = both_ways(
        ScriptedService(Script([pieces(4)]), tokenizer=tokenizer), prompt="a", stop=["b,c"]
    )
    assert plain.choices[0].text == streamed_texts(streamed, 1)[0] == "a,"


def test_legacy_logprobs() -> None:
    service = ScriptedService(Script([tuple("aé".encode())]))
    plain, streamed = both_ways(service, prompt="p", logprobs=2)
    logprobs = plain.choices[0].logprobs
    assert logprobs.tokens == ["a", "bytes:\\xc3", "bytes:\\xa9"]
    assert logprobs.token_logprobs == [-0.5, -0.5, -0.5]
    assert logprobs.text_offset == [0, 1, 1]
    assert logprobs.top_logprobs[0] == {"a": -0.5, "b": -1.5}
    parts = [c.logprobs for k in streamed for c in k.choices if c.logprobs]
    for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
        assert [x for part in parts for x in getattr(part, name)] == getattr(logprobs, name)


def test_chosen_token_is_always_among_the_alternatives() -> None:
    service = ScriptedService(Script([(65,)], logprobs=lambda t, p: TokenLogprobs(-9.0, 9, ((66, -0.1),))))
    plain, _ = both_ways(service, prompt="p", logprobs=1)
    assert plain.choices[0].logprobs.top_logprobs == [{"B": -0.1, "A": -9.0}]


def test_refusal_of_one_prompt_refuses_the_request_and_ends_the_others() -> None:
    service = ScriptedService(Script(hold_at_step=1), Script(refusal=ContextLengthExceeded("too long")))
    response = post(service, PATH, {"prompt": ["a", "b"], "stream": True})
    assert response.status_code == 400
    assert [f.outcome for f in service.flows.values()] == ["aborted", "failed"]


def test_failure_of_one_prompt_ends_the_stream_of_all() -> None:
    broken = Script(fail_at_step=2, error=ContextLengthExceeded("out of room"))
    service = ScriptedService(Script(hold_at_step=5), broken)
    *chunks, last = events_of(post(service, PATH, {"prompt": ["a", "b"], "stream": True}))
    assert last["error"]["message"] == "out of room"
    assert "[DONE]" not in chunks
    assert [f.outcome for f in service.flows.values()] == ["aborted", "failed"]


def test_too_many_choices() -> None:
    response = post(ScriptedService(), PATH, {"prompt": ["a"] * 65, "n": 2})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "n")


def test_echo_with_logprobs_is_refused_by_name() -> None:
    response = post(ScriptedService(), PATH, {"prompt": "a", "echo": True, "logprobs": 1})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "echo")
