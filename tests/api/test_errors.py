"""Every 4xx and 5xx has the OpenAI error body; payloads are bounded and never echoed (SEC-06)."""

from __future__ import annotations

import asyncio
import logging

import httpx
import pytest

from api.settings import ApiSettings
from contracts.errors import (
    ContextLengthExceeded,
    EngineError,
    MediaDecodeError,
    OmnistageError,
    RequestTimeout,
    ServiceUnavailable,
    TooManyRequests,
)
from tests.api.fakes import Script, ScriptedService
from tests.api.serving import client, events_of, post, user

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
KEY = ApiSettings(api_key="open sesame")


def check_body(response: httpx.Response, status: int) -> dict[str, str | None]:
    assert response.status_code == status
    assert response.headers["content-type"] == "application/json"
    error: dict[str, str | None] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert response.headers["x-request-id"]
    return error


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nowhere", 404),
        ("POST", "/v1/nowhere", 404),
        ("GET", "/v1/models/nobody", 404),
        ("GET", "/v1/chat/completions/", 404),
        ("GET", CHAT, 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/health", 405),
        ("PUT", "/cache/reset", 405),
    ],
)
def test_routing_errors(method: str, path: str, status: int) -> None:
    async def run() -> httpx.Response:
        async with client(ScriptedService()) as http:
            return await http.request(method, path)

    response = asyncio.run(run())
    check_body(response, status)
    if status == 405:
        assert response.headers["allow"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b"5",
        b"not json",
        b'{"model": "\xff"}',
        b'{"prompt": "a", "messages": [], "tokens": [], "x": ' + b"[" * 100_000,
        b'{"temperature": NaN}',
        b'{"messages": [{"role": "user", "content": "' + b"A" * 1_000_000,
    ],
)
def test_malformed_bodies(path: str, body: bytes) -> None:
    response = post(ScriptedService(), path, body)
    error = check_body(response, 400)
    assert error["type"] == "invalid_request_error"
    assert len(response.content) < 300


def test_error_of_a_huge_payload_is_short_and_logs_nothing_of_it(caplog: pytest.LogCaptureFixture) -> None:
    url = "data:image/png;base64," + "QUJD" * 1_000_000
    part = {"type": "image_url", "image_url": {"url": url, "detail": url}}
    with caplog.at_level(logging.DEBUG):
        response = post(ScriptedService(), CHAT, user([part]))
    check_body(response, 400)
    assert len(response.content) < 300
    assert "QUJDQUJD" not in response.text
    assert "QUJDQUJD" not in caplog.text


@pytest.mark.parametrize("declared", [True, False])
def test_body_over_the_limit(declared: bool) -> None:
    async def chunks():  # type: ignore[no-untyped-def]
        for _ in range(8):
            yield b" " * 1000

    async def run() -> httpx.Response:
        async with client(ScriptedService(), ApiSettings(max_body_bytes=4000)) as http:
            return await http.post(CHAT, content=b" " * 8000 if declared else chunks())

    error = check_body(asyncio.run(run()), 413)
    assert error["code"] == "request_too_large"


@pytest.mark.parametrize(
    ("path", "header", "status"),
    [
        (CHAT, None, 401),
        (CHAT, "Bearer wrong", 401),
        (CHAT, "Bearer ", 401),
        (CHAT, "open sesame", 401),
        (CHAT, "Basic open sesame", 401),
        (CHAT, "Bearer öffne".encode(), 401),
        (CHAT, "Bearer open sesame", 405),
        (CHAT, "bearer open sesame", 405),
        ("/v1/models", None, 401),
        ("/v1/models", "Bearer open sesame", 200),
        ("/tokenize", None, 401),
        ("/cache/reset", None, 401),
        ("/health", None, 200),
        ("/ready", None, 200),
        ("/metrics", None, 200),
        ("/", None, 200),
    ],
)
def test_api_key(path: str, header: str | bytes | None, status: int) -> None:
    async def run() -> httpx.Response:
        async with client(ScriptedService(), KEY) as http:
            return await http.get(path, headers={"authorization": header} if header else {})

    response = asyncio.run(run())
    assert response.status_code == status
    if status == 401:
        assert check_body(response, 401)["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer"


FAILURES: list[tuple[OmnistageError, int, str | None]] = [
    (MediaDecodeError("truncated image", param="messages[0].content[0]"), 400, None),
    (ContextLengthExceeded("too long", param="messages"), 400, None),
    (TooManyRequests("queue full", retry_after_s=1.2), 429, "2"),
    (ServiceUnavailable("thinker is restarting", retry_after_s=0.01), 503, "1"),
    (RequestTimeout("too slow"), 504, None),
    (EngineError("out of luck"), 500, None),
]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("before_prompt", [False, True])
@pytest.mark.parametrize(("error", "status", "retry_after"), FAILURES, ids=lambda v: type(v).__name__)
def test_errors_before_the_first_token_keep_their_status(
    path: str, stream: bool, before_prompt: bool, error: OmnistageError, status: int, retry_after: str | None
) -> None:
    script = Script(refusal=error) if before_prompt else Script(fail_at_step=0, error=error)
    body = {**(user("a") if path == CHAT else {"prompt": "a"}), "stream": stream}
    response = post(ScriptedService(script), path, body)
    found = check_body(response, status)
    assert found == {"message": error.message, "type": error.type, "param": error.param, "code": error.code}
    assert response.headers.get("retry-after") == retry_after


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_error_in_mid_stream_is_one_event_and_the_end(path: str) -> None:
    service = ScriptedService(Script(fail_at_step=2, error=EngineError("out of luck")))
    body = {**(user("a") if path == CHAT else {"prompt": "a"}), "stream": True}
    response = post(service, path, {**body, "stream_options": {"include_usage": True}})
    assert response.status_code == 200
    *chunks, last = events_of(response)
    assert last == {
        "error": {"message": "out of luck", "type": "server_error", "param": None, "code": "engine_error"}
    }
    assert chunks
    assert not any(
        "error" in c or c == "[DONE]" or any(x["finish_reason"] for x in c["choices"]) for c in chunks
    )
    assert service.last.outcome == "failed"


@pytest.mark.parametrize("fail_at_step", [0, 2])
def test_a_bug_says_nothing_of_itself(fail_at_step: int, caplog: pytest.LogCaptureFixture) -> None:
    service = ScriptedService(Script(fail_at_step=fail_at_step, error=KeyError("private detail")))
    response = post(service, CHAT, {**user("a"), "stream": True})
    assert "private" not in response.text
    if fail_at_step == 0:
        assert check_body(response, 500)["code"] == "internal_error"
    else:
        assert events_of(response)[-1]["error"]["code"] == "internal_error"


def test_answer_that_ends_early_is_an_error() -> None:
    service = ScriptedService(Script(answers=[()], ends=False))
    assert check_body(post(service, CHAT, user("a")), 500)["code"] == "engine_error"


@pytest.mark.parametrize("given", ["abc-123", "x" * 128])
def test_request_id_is_echoed(given: str) -> None:
    service = ScriptedService()
    response = post(service, CHAT, user("a"), headers={"x-request-id": given})
    assert response.headers["x-request-id"] == given
    assert given not in response.json()["id"]


@pytest.mark.parametrize("given", ["x" * 129, "x" * 60_000, "tab\there"])
def test_oversized_or_odd_request_ids_are_replaced(given: str) -> None:
    response = post(ScriptedService(), CHAT, user("a"), headers={"x-request-id": given})
    assert response.headers["x-request-id"] != given
    assert len(response.headers["x-request-id"]) == 32


def test_equal_request_ids_do_not_collide() -> None:
    async def run() -> list[httpx.Response]:
        async with client(ScriptedService()) as http:
            same = {"x-request-id": "same"}
            posts = [http.post(CHAT, json=user("a"), headers=same) for _ in range(20)]
            return list(await asyncio.gather(*posts))

    responses = asyncio.run(run())
    assert len({r.json()["id"] for r in responses}) == 20
    assert {r.json()["choices"][0]["message"]["content"] for r in responses} == {"Hello!"}
