"""Errors survive the control plane as what they are, and carry what the API needs."""

from __future__ import annotations

import re

import msgspec
import pytest

from contracts import errors
from contracts.errors import MAX_MESSAGE_CHARS, BadRequest, ErrorInfo, OmnistageError, TooManyRequests


def leaves(cls=OmnistageError):
    return [cls, *(leaf for sub in cls.__subclasses__() for leaf in leaves(sub))]


@pytest.mark.parametrize("cls", leaves())
def test_an_error_crosses_the_wire(cls):
    sent = cls(
        "say what to do", request_id="r", stage="thinker", param="messages[0]", code="mine", retry_after_s=1.5
    )
    received = msgspec.msgpack.decode(msgspec.msgpack.encode(sent.info()), type=ErrorInfo).to_exception()
    assert type(received) is cls
    assert received.info() == sent.info()
    assert str(received) == "say what to do"


def test_a_code_is_the_classes_own_unless_given():
    assert BadRequest("x").code is None
    assert TooManyRequests("x").code == "queue_full"
    assert TooManyRequests("x", code="too_long").code == "too_long"


def test_long_messages_are_cut():
    cut = BadRequest("é" * (MAX_MESSAGE_CHARS + 1))
    assert len(cut.message) == MAX_MESSAGE_CHARS
    assert cut.message.endswith("…")
    assert BadRequest("é" * MAX_MESSAGE_CHARS).message == "é" * MAX_MESSAGE_CHARS


def test_the_drawn_tree_is_the_real_one():
    drawn = {}
    stack = []
    for line in errors.__doc__.splitlines():
        found = re.match(r"([│├└─ ]*)([A-Z]\w+)(?: \((\d+)\))?", line)
        if found and (found[1] or found[2] == "OmnistageError"):
            depth = len(found[1]) // 4
            stack[depth:] = [found[2]]
            drawn[found[2]] = (stack[depth - 1] if depth else None, found[3])
    real = {cls.__name__: cls for cls in leaves()}
    assert drawn.keys() == real.keys()
    for name, (parent, status) in drawn.items():
        assert parent is None or real[name].__base__.__name__ == parent
        assert status is None or real[name].status == int(status)
