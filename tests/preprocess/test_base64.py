"""What is decoded in C is what `binascii` makes of it, and refused where that refuses it."""

from __future__ import annotations

import base64
import binascii
import ctypes
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from preprocess import base64 as ours
from preprocess.native import BASE64
from tests.preprocess.test_resampling import MACHINE_FLAGS


@pytest.fixture(params=MACHINE_FLAGS)
def decode(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., bytearray | None]:
    native = ctypes.CDLL(str(BASE64.build(tmp_path, MACHINE_FLAGS[request.param]))).decode_base64
    native.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]
    monkeypatch.setattr(ours, "_native", lambda: native)
    return ours.decode_plain


def strictly(text: str) -> bytes | None:
    try:
        return binascii.a2b_base64(text, strict_mode=True)
    except ValueError:
        return None


def test_any_length_is_decoded(decode: Callable[..., bytearray | None]) -> None:
    rng = random.Random(1)
    for length in [*range(140), 1000, 4097]:
        data = rng.randbytes(length)
        text = base64.b64encode(data).decode()
        assert decode(text) == data
        assert decode("data:,+/" + text, 8) == data


def test_every_character_is_taken_or_refused_as_by_binascii(decode: Callable[..., bytearray | None]) -> None:
    text = base64.b64encode(bytes(range(192))).decode()
    for place in (0, 1, 33, 34, 35, 96, 130, 250, 255):
        for code in range(256):
            changed = text[:place] + chr(code) + text[place + 1 :]
            assert decode(changed) == strictly(changed)


def test_what_is_cut_or_padded_is_refused_as_by_binascii(decode: Callable[..., bytearray | None]) -> None:
    text = base64.b64encode(bytes(range(200))).decode()
    for changed in (
        text[:-1],
        text[:-2],
        text + "=",
        text[:100] + "=" + text[100:],
        text + "AAAA",
        "\u0100" * 64,
    ):
        assert strictly(changed) is None
        assert decode(changed) is None


def test_without_a_compiler_the_interpreter_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours, "_native", lambda: None)
    assert ours.decode_plain("AAAA" + base64.b64encode(b"x" * 100).decode(), 4) == b"x" * 100
    assert ours.decode_plain("A" * 99) is None
