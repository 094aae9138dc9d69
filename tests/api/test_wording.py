"""What clients are told of a bad field reads as a sentence: "`field` must be ...", whoever says it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from api import errors
from tests.api.fakes import ScriptedService
from tests.api.serving import post

API = Path(errors.__file__).parent
BEGINNINGS = ("must", "may", "is", "cannot", "needs", "holds", "excludes", "asks", "times", "of", "together")


def problems() -> Iterator[tuple[str, str]]:
    """Where and how each literal problem of `invalid` and `unsupported` begins."""
    for file in sorted(API.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                continue
            if node.func.id not in ("invalid", "unsupported") or len(node.args) < 2:
                continue
            problem = node.args[1]
            first = problem.values[0] if isinstance(problem, ast.JoinedStr) else problem
            if isinstance(first, ast.Constant):
                yield f"{file.name}:{node.lineno}", str(first.value)


def test_every_problem_is_said_of_its_field() -> None:
    found = list(problems())
    assert len(found) > 40
    wrong = [f"{where}: {text}" for where, text in found if text.split()[0].rstrip(",:") not in BEGINNINGS]
    assert wrong == []


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("/v1/responses", "POST to /v1/chat/completions"),
        ("/chat/completions", "POST to /v1/chat/completions"),
        ("/v1/chat/completions/", "POST to /v1/chat/completions"),
        ("/v1/messages", "POST to /v1/chat/completions"),
        ("/v1/embeddings", "embeddings are not made here"),
        ("/v1/files", "as parts of messages"),
        ("/v1/images/generations", "pictures are only taken"),
        ("/audio/transcriptions", "/v1/audio/speech, transcriptions"),
        ("/healthz", "/ready"),
        ("/nowhere", "/v1/models"),
    ],
)
def test_an_unknown_route_tells_of_the_nearest(path: str, says: str) -> None:
    response = post(ScriptedService(), path, {})
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (404, "route_not_found")
    assert says in error["message"]
    assert len(error["message"]) < 160
