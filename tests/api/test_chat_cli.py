"""The terminal chat against a real server: history, pictures, errors that take the turn back."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from api.chat_cli import ChatOptions, run
from api.settings import ApiSettings
from contracts.errors import EngineError, MediaDecodeError
from tests.api.fakes import Script, ScriptedService, shown
from tests.api.serving import running


def converse(service: ScriptedService, *lines: str, **options: Any) -> str:
    """What the terminal shows. The client blocks, so it runs beside the server in a thread of the pool."""
    written: list[str] = []
    typed: Iterator[str] = iter(lines)

    def read_line(prompt: str) -> str:
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    async def main() -> int:
        async with running(service, ApiSettings(api_key=options.get("api_key"))) as server:
            chat = ChatOptions(url=server.url, **options)
            return await asyncio.to_thread(run, chat, read_line, written.append)

    assert asyncio.run(main()) == 0
    return "".join(written)


def history(service: ScriptedService) -> list[list[list[str]]]:
    return [shown(flow.request.input) for flow in service.flows.values()]  # type: ignore[arg-type]


def test_history_goes_along(tmp_path: Path) -> None:
    service = ScriptedService(Script([tuple(b"one")]), Script([tuple(b"two")]))
    output = converse(
        service, "first", "", "second", "/reset", "third", "/quit", system="be brief", api_key="k"
    )
    assert "one\ntwo\ntwo\n" in output
    assert history(service) == [
        [["be brief"], ["first"]],
        [["be brief"], ["first"], ["one"], ["second"]],
        [["be brief"], ["third"]],
    ]


def test_pictures_go_with_the_next_message(tmp_path: Path) -> None:
    first, second = tmp_path / "a.png", tmp_path / "b.jpg"
    first.write_bytes(b"PNG")
    second.write_bytes(b"JPG")
    service = ScriptedService()
    output = converse(service, f"/image {second}", "look", "and now?", images=(first,), max_tokens=3)
    png = "data:image/png;base64," + base64.b64encode(b"PNG").decode()
    jpg = "data:image/jpeg;base64," + base64.b64encode(b"JPG").decode()
    assert "2 picture(s)" in output
    assert history(service)[1] == [[png, jpg, "look"], ["Hel"], ["and now?"]]


def test_refused_turn_is_taken_back(tmp_path: Path) -> None:
    picture = tmp_path / "a.png"
    picture.write_bytes(b"PNG")
    service = ScriptedService(
        Script(refusal=MediaDecodeError("not an image")),
        Script(fail_at_step=2, error=EngineError("no luck")),
        Script(),
    )
    output = converse(service, f"/image {picture}", "a", "b", "c")
    assert "! not an image (HTTP 400)" in output
    assert "1 picture(s) dropped" in output
    assert "! no luck" in output
    assert history(service)[1:] == [[["b"]], [["c"]]]
    assert [len(turns) for turns in history(service)] == [1, 1, 1]


def test_a_picture_outlives_a_failure_of_the_server(tmp_path: Path) -> None:
    picture = tmp_path / "a.png"
    picture.write_bytes(b"PNG")
    service = ScriptedService(Script(fail_at_step=1, error=EngineError("no luck")), Script())
    output = converse(service, f"/image {picture}", "a", "b")
    assert "dropped" not in output
    assert [len(turns[0]) for turns in history(service)] == [2, 2]


def test_an_unknown_command_is_refused() -> None:
    service = ScriptedService()
    assert "! there is no /imgae" in converse(service, "/imgae a.png")
    assert history(service) == []


def test_missing_picture_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    says = f"cannot read image {tmp_path / 'none.png'}: no such file\n"
    assert f"! {says}" in converse(ScriptedService(), f"/image {tmp_path / 'none.png'}")
    assert run(ChatOptions("http://127.0.0.1:1", images=(tmp_path / "none.png",))) == 1
    assert capsys.readouterr().err == f"omnistage: {says}"
    assert run(ChatOptions("http://127.0.0.1:1", images=(tmp_path,))) == 1
    assert capsys.readouterr().err == f"omnistage: cannot read image {tmp_path}: it is a folder\n"


def never_asked(prompt: str) -> str:
    raise AssertionError("nobody would answer")


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        (httpx.ConnectError("refused"), "no answer from http://127.0.0.1:1: refused"),
        (httpx.ConnectTimeout(""), "no answer from http://127.0.0.1:1: it takes too long"),
        (
            httpx.Response(503, json={"error": {"message": "starting: thinker"}}),
            "starting: thinker (HTTP 503)",
        ),
        (httpx.Response(401, text="no"), "http://127.0.0.1:1 refuses: HTTP 401"),
    ],
)
def test_a_server_that_answers_nobody_is_told_at_the_start(
    reply: httpx.Response | httpx.HTTPError, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    written: list[str] = []
    client = httpx.Client(transport=httpx.MockTransport(answering(reply)))
    assert run(ChatOptions("http://127.0.0.1:1"), never_asked, written.append, client) == 1
    assert says in capsys.readouterr().err
    assert written == []


def test_a_dead_url_ends_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    for url in ("http://127.0.0.1:1", "nonsense"):
        assert run(ChatOptions(url), never_asked) == 1
        assert capsys.readouterr().err.startswith(f"omnistage: no answer from {url}: ")


def answering(
    *replies: httpx.Response | httpx.HTTPError,
) -> Callable[[httpx.Request], httpx.Response]:
    """One after another, the last one for ever."""
    left = list(replies)

    def handle(request: httpx.Request) -> httpx.Response:
        reply = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(reply, httpx.Response):
            return reply
        raise reply

    return handle


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        (httpx.Response(502, text="<html>"), "HTTP 502"),
        (httpx.Response(200, text='data: {"choices":[]}\n\n'), "before it was complete"),
        (httpx.ConnectError("refused"), "no answer from http://127.0.0.1:1: refused"),
    ],
)
def test_other_failures(reply: httpx.Response | httpx.HTTPError, says: str) -> None:
    written: list[str] = []
    lines = iter(["hi", "/quit"])
    client = httpx.Client(transport=httpx.MockTransport(answering(httpx.Response(200), reply)))
    assert run(ChatOptions("http://127.0.0.1:1"), lambda _: next(lines), written.append, client) == 1
    assert says in "".join(written)
