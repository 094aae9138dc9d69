"""The parameter matrix (API-18, API-10, API-11): status and body agree, `param` names the field."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from api.validation import MAX_STOP_CHARS
from contracts.params import SamplingDefaults, SamplingParams
from stages.service import UNLIMITED
from tests.api.fakes import ScriptedService
from tests.api.serving import post, user

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BOTH = (CHAT, COMPLETIONS)
HUGE = "secret" * 200_000
TOOL = {"type": "function", "function": {"name": "f"}}

# field, value, where: all of these are refused
COMMON_REFUSED: list[tuple[str, Any]] = [
    *[("temperature", v) for v in ("", "hot", -0.1, 2.1, True, [], {})],
    *[("top_p", v) for v in ("0.5", 0, -1, 1.01)],
    *[("min_p", v) for v in ("x", -0.1, 1.1)],
    *[("top_k", v) for v in ("x", -2, 1.5)],
    *[("presence_penalty", v) for v in ("x", -2.1, 2.1)],
    *[("frequency_penalty", v) for v in ("x", -2.1, 2.1)],
    *[("repetition_penalty", v) for v in ("x", 0, -1, 1e-45)],
    *[("n", v) for v in ("1", 0, -1, 129, 1.5, True)],
    *[("max_tokens", v) for v in ("5", 0, -1, 1.5, True)],
    *[("min_tokens", v) for v in ("5", -1)],
    *[("seed", v) for v in ("x", 1.5, 2**64)],
    *[("stop", v) for v in ("", 5, [""], [5], ["a", ""], ["a"] * 17, "x" * (MAX_STOP_CHARS + 1), {})],
    *[("stop_token_ids", v) for v in (5, [-1], [259], ["a"], [0] * 1025)],
    *[("logit_bias", v) for v in (5, [], {"a": 1}, {"": 1}, {"-1": 1}, {"259": 1}, {"1": 101}, {"1": "x"})],
    ("logit_bias", {"9" * 5000: 1}),
    ("logit_bias", {str(i): 1 for i in range(1025)}),
    *[("stream", v) for v in ("true", 1, [])],
    *[("stream_options", v) for v in ({}, {"include_usage": True}, 5)],
    *[("user", v) for v in (5, HUGE)],
    *[("cache_salt", v) for v in ("", 5, "x" * 257, HUGE)],
    *[("priority", v) for v in ("high", 1.5, 2**31)],
    *[("skip_special_tokens", v) for v in ("no", 0)],
    *[("ignore_eos", v) for v in ("no", 0)],
    *[
        ("response_format", v)
        for v in ({"type": "json_object"}, {"type": "json_schema"}, {"type": ""}, "text", {})
    ],
    *[("best_of", v) for v in (2, "x")],
    ("use_beam_search", True),
    ("prompt_logprobs", 1),
    ("guided_json", {}),
    ("guided_regex", "a"),
    ("guided_choice", ["a"]),
    ("guided_grammar", "a"),
    ("structured_outputs", {}),
    ("model", 5),
]
CHAT_REFUSED: list[tuple[str, Any]] = [
    *[("max_completion_tokens", v) for v in ("5", 0, -1, 1.5)],
    *[("logprobs", v) for v in (1, "true")],
    *[("top_logprobs", v) for v in (-1, 21, "5", 3)],  # 3: without logprobs
    *[
        ("modalities", v)
        for v in ([], ["video"], ["audio"], ["text", "text"], ["text", "audio"], "text", [5])
    ],
    *[("tool_choice", v) for v in ("", "required", "sometimes", {"type": "function"}, 5)],
    *[("messages", v) for v in ([], "hi", None, {}, 5)],
    *[("tools", v) for v in (5, "x", [5])],
    ("audio", {"voice": "a"}),
    ("functions", [TOOL]),
    ("function_call", "auto"),
    ("add_generation_prompt", "yes"),
    ("continue_final_message", "yes"),
]
COMPLETION_REFUSED: list[tuple[str, Any]] = [
    *[("prompt", v) for v in ("", [], None, 5, {}, [""], [[]], [1, "a"], ["a", 1], [[1], "a"], ["a", [1]])],
    *[("prompt", v) for v in ([-1], [259], [[5], [259]], [1.5], [True], ["a"] * 257)],
    *[("logprobs", v) for v in (-1, 21, "5", True)],
    ("suffix", "x"),
    ("suffix", ""),
]
REFUSED = [
    *[(path, *case) for path in BOTH for case in COMMON_REFUSED],
    *[(CHAT, *case) for case in CHAT_REFUSED],
    *[(COMPLETIONS, *case) for case in COMPLETION_REFUSED],
]


def body_for(path: str) -> dict[str, Any]:
    return user("hi") if path == CHAT else {"prompt": "hi"}


@pytest.mark.parametrize(("path", "field", "value"), REFUSED, ids=lambda v: repr(v)[:40])
def test_refused(path: str, field: str, value: Any) -> None:
    service = ScriptedService()
    response = post(service, path, {**body_for(path), field: value})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["param"].split("[")[0].split(".")[0] == field
    assert error["code"]
    assert len(response.content) < 500
    assert "secret" not in response.text
    assert not service.flows, "refused before it reached the service"


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"max_tokens": 9}, "max_tokens"),
        ({"max_completion_tokens": 9}, "max_completion_tokens"),
        ({"max_tokens": 9, "max_completion_tokens": 5}, "max_completion_tokens"),
        ({}, "max_tokens"),
    ],
)
def test_the_service_knows_what_the_bound_of_the_output_is_called(fields: dict[str, int], name: str) -> None:
    service = ScriptedService()
    assert post(service, CHAT, {**user("hi"), **fields}).status_code == 200
    assert service.last.request.max_tokens_param == name


ACCEPTED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (CHAT, {}, {"max_tokens": UNLIMITED, "temperature": 1.0, "top_k": 0, "n": 1}),
    (COMPLETIONS, {}, {"max_tokens": 16}),
    *[(path, {"temperature": v}, {"temperature": v}) for path in BOTH for v in (0, 2, 0.5)],
    *[(path, {"top_k": v}, {"top_k": k}) for path in BOTH for v, k in ((-1, 0), (0, 0), (40, 40))],
    *[(path, {"seed": v}, {"seed": s}) for path in BOTH for v, s in ((7, 7), (0, 0), (-1, 2**63 - 1))],
    (CHAT, {"max_tokens": 5}, {"max_tokens": 5}),
    (CHAT, {"max_completion_tokens": 5}, {"max_tokens": 5}),
    (CHAT, {"max_tokens": 9, "max_completion_tokens": 5}, {"max_tokens": 5}),
    (CHAT, {"max_tokens": 5, "max_completion_tokens": 9}, {"max_tokens": 9}),
    (CHAT, {"max_tokens": 10**12}, {"max_tokens": UNLIMITED}),
    (CHAT, {"logprobs": True}, {"logprobs": 0}),
    (CHAT, {"logprobs": True, "top_logprobs": 20}, {"logprobs": 20}),
    (CHAT, {"logprobs": False, "top_logprobs": 0}, {"logprobs": None}),
    (COMPLETIONS, {"logprobs": 5}, {"logprobs": 5}),
    (CHAT, {"logit_bias": {"65": -100, "66": 1.5}}, {"logit_bias": ((65, -100.0), (66, 1.5))}),
    (CHAT, {"stop_token_ids": [65], "ignore_eos": True}, {"stop_token_ids": (65,), "ignore_eos": True}),
    *[
        (path, fields, {name: float(value) for name, value in fields.items()})
        for path in BOTH
        for fields in (
            {"top_p": 0.3, "min_p": 0.1, "temperature": 0.7},
            {"presence_penalty": -2, "frequency_penalty": 2, "repetition_penalty": 1.1},
        )
    ],
    *[(path, {"min_tokens": 2}, {"min_tokens": 2}) for path in BOTH],
    *[(path, {"top_p": 1, "min_p": 0, "n": 128}, {"top_p": 1.0, "min_p": 0.0, "n": 128}) for path in BOTH],
    (CHAT, {"n": 2, "best_of": 2}, {"n": 2}),
    (CHAT, {"stop": [f"s{i}" for i in range(16)]}, {}),
    (CHAT, {"stop": []}, {}),
    (CHAT, {"response_format": {"type": "text"}, "modalities": ["text"]}, {}),
    (CHAT, {"tools": [TOOL], "tool_choice": "auto", "parallel_tool_calls": True}, {}),
    (CHAT, {"metadata": {"a": "b"}, "store": True, "user": "u", "service_tier": "auto"}, {}),
    (CHAT, {"anything_else": {"deep": [1, 2]}}, {}),
    (CHAT, {"cache_salt": "s" * 256, "priority": -3}, {}),
]


@pytest.mark.parametrize(("path", "fields", "sampling"), ACCEPTED, ids=lambda v: repr(v)[:40])
def test_accepted(path: str, fields: dict[str, Any], sampling: dict[str, Any]) -> None:
    service = ScriptedService()
    response = post(service, path, {**body_for(path), **fields})
    assert response.status_code == 200, response.text
    seen: SamplingParams = service.last.request.sampling
    assert {name: msgspec.structs.asdict(seen)[name] for name in sampling} == sampling


@pytest.mark.parametrize("path", BOTH)
def test_null_means_default(path: str) -> None:
    names = {field for where, field, _ in REFUSED if where == path} - {"messages", "prompt"}
    plain, nulls = ScriptedService(), ScriptedService()
    assert post(plain, path, body_for(path)).status_code == 200
    response = post(nulls, path, {**body_for(path), **dict.fromkeys(names)})
    assert response.status_code == 200, response.text
    assert nulls.last.request == plain.last.request


def test_salt_and_priority_reach_the_service() -> None:
    service = ScriptedService()
    post(service, CHAT, {**user("hi"), "cache_salt": "tenant", "priority": 3})
    assert (service.last.request.cache_salt, service.last.request.priority) == ("tenant", 3)


def test_tools_are_hidden_when_none_may_be_called() -> None:
    service = ScriptedService()
    for choice, expected in (("auto", True), ("none", False)):
        post(service, CHAT, {**user("hi"), "tools": [TOOL], "tool_choice": choice})
        given = service.last.request.input
        assert (given.tools_json is not None) is expected  # type: ignore[union-attr]


def test_supported_modalities_are_listed() -> None:
    error = post(ScriptedService(), CHAT, {**user("hi"), "modalities": ["video"]}).json()["error"]
    assert error["message"].endswith("supported: text")


@pytest.mark.parametrize("path", [*BOTH, "/tokenize", "/detokenize"])
@pytest.mark.parametrize("name", ["toy", "toy-alias", None])
def test_known_model_names(path: str, name: str | None) -> None:
    body = {"/detokenize": {"tokens": [65]}, "/tokenize": {"prompt": "a"}}.get(path) or body_for(path)
    response = post(ScriptedService(), path, {**body, "model": name} if name else body)
    assert response.status_code == 200
    if path in BOTH:
        assert response.json()["model"] == (name or "toy")


@pytest.mark.parametrize("path", [*BOTH, "/tokenize", "/detokenize"])
@pytest.mark.parametrize("name", ["", "gpt-9", HUGE])
def test_unknown_model_names(path: str, name: str) -> None:
    body = {"/detokenize": {"tokens": [65]}, "/tokenize": {"prompt": "a"}}.get(path) or body_for(path)
    response = post(ScriptedService(), path, {**body, "model": name})
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert len(response.content) < 400


def test_a_top_k_beyond_every_vocabulary_leaves_out_nothing() -> None:
    service = ScriptedService()
    assert post(service, CHAT, {**user("hi"), "top_k": 2**63}).status_code == 200
    assert service.last.request.sampling.top_k == service.tokenizer.vocab_size


@pytest.mark.parametrize("field", ["chat_template_kwargs", "allowed_token_ids", "truncate_prompt_tokens"])
def test_fields_that_would_change_the_answer_are_not_ignored(field: str) -> None:
    response = post(ScriptedService(), CHAT, {**user("hi"), field: {"a": 1}})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == field


def test_a_bound_is_said_in_full() -> None:
    body = user("hi") | {"seed": 2**64}
    message = post(ScriptedService(), CHAT, body).json()["error"]["message"]
    assert message == f"`seed` must be from {-(2**63)} to {2**64 - 1}"


@pytest.mark.parametrize("path", BOTH)
def test_what_is_left_out_is_the_checkpoint_s_own(path: str) -> None:
    service = ScriptedService()
    own = SamplingDefaults(temperature=0.2, top_p=0.9, top_k=20, min_p=0.1, repetition_penalty=1.05)
    service.card = msgspec.structs.replace(service.card, sampling=own)
    assert post(service, path, body_for(path)).status_code == 200
    drawn = service.last.request.sampling
    assert all(getattr(drawn, name) == getattr(own, name) for name in own.__struct_fields__)
    given = {"temperature": 0, "top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1}
    assert post(service, path, {**body_for(path), **given}).status_code == 200
    neutral = msgspec.structs.replace(SamplingDefaults(), temperature=0.0)
    drawn = service.last.request.sampling
    assert all(getattr(drawn, name) == getattr(neutral, name) for name in neutral.__struct_fields__)
