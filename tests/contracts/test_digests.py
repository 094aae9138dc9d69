"""Digests: equal for equal content, different for any difference that a cache must see."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.digests import DIGEST_BYTES, Digester

SECRET = b"s" * 16


@pytest.fixture(params=["xxh3", "sha256"])
def digester(request):
    return Digester(SECRET, request.param)


def test_equal_content_equal_digest(digester):
    pixels = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
    assert digester.of_array(pixels) == digester.of_array(pixels.copy(order="F"))
    assert digester.of_bytes(b"abc", "x") == digester.of_bytes(bytearray(b"abc"), "x")
    assert digester.of_bytes(b"abc") == digester.of_bytes(memoryview(b"zabc")[1:])
    assert len(digester.of_bytes(b"")) == DIGEST_BYTES


def test_every_difference_shows(digester):
    pixels = np.arange(24, dtype=np.uint8)
    last_changed = pixels.copy()
    last_changed[-1] += 1
    variants = [
        digester.of_array(pixels),
        digester.of_array(pixels.reshape(2, 12)),  # CAC-03: the same bytes in another shape
        digester.of_array(pixels.reshape(12, 2)),
        digester.of_array(pixels.astype(np.uint16)),
        digester.of_array(pixels.view(np.int8)),
        digester.of_array(last_changed),
        digester.of_array(pixels[:0]),
        digester.of_bytes(pixels.tobytes()),  # another domain than arrays
        digester.of_bytes(pixels.tobytes(), "detail=low"),
        Digester(b"t" * 16, digester.algorithm).of_array(pixels),
    ]
    assert len(set(variants)) == len(variants)


def test_a_late_byte_of_large_content_counts(digester):
    """CAC-05, CAC-08: no prefix, no sample."""
    content = bytearray(3 << 20)
    first = digester.of_bytes(content)
    content[-1] = 1
    second = digester.of_bytes(content)
    content[len(content) // 2] = 1
    assert len({first, second, digester.of_bytes(content)}) == 3


@given(st.text(max_size=6), st.binary(max_size=6), st.text(max_size=6), st.binary(max_size=6))
def test_fields_do_not_run_into_each_other(options, data, other_options, other_data):
    digester = Digester(SECRET)
    same = (options, data) == (other_options, other_data)
    assert (digester.of_bytes(data, options) == digester.of_bytes(other_data, other_options)) == same


def test_fields_are_framed(digester):
    """CAC-07: "ab" + "c" is not "a" + "bc"."""
    cuts = [digester.of_bytes(b"abcd"[i:], "abcd"[:i]) for i in range(5)]
    assert len(set(cuts)) == len(cuts)


def test_secrets_are_random():
    makers = [Digester.random() for _ in range(8)]
    assert all(a.of_bytes(b"x") != b.of_bytes(b"x") for a, b in itertools.combinations(makers, 2))
