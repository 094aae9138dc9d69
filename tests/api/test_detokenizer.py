"""Detokenizing one token at a time equals decoding all at once (SSE-01)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from api.detokenizer import Detokenizer
from tests.api.fakes import END, START, ToyTokenizer


def stream(table: ToyTokenizer, ids: list[int], *, skip: bool = True) -> list[str]:
    detokenizer = Detokenizer(table, skip_special_tokens=skip)
    return [detokenizer.push(detokenizer.bytes_of(i)) for i in ids] + [detokenizer.finish()]


@pytest.mark.parametrize("text", ["naïve", "日本語", "👩‍👩‍👧‍👦!", "🇨🇭", "e\u0301", "plain"])
def test_deltas_never_cut_a_character(text: str) -> None:
    deltas = stream(ToyTokenizer(), list(text.encode()))
    assert "".join(deltas) == text
    assert not any("\ufffd" in delta for delta in deltas)
    assert all(delta == "" or len(delta) == 1 for delta in deltas)


def test_unfinished_character_shows_at_the_end_only() -> None:
    assert stream(ToyTokenizer(), list("a👍".encode()[:-1])) == ["a", "", "", "", "\ufffd"]


def test_special_tokens_are_skipped_or_kept() -> None:
    ids = [START, 65, END, 66]
    assert "".join(stream(ToyTokenizer(), ids)) == "AB"
    assert "".join(stream(ToyTokenizer(), ids, skip=False)) == "<|start|>A<|end|>B"


class ByteLevel:
    """A byte-level vocabulary of the tokenizers library, as the checkpoints have."""

    def __init__(self) -> None:
        self.alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        self.tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(self.alphabet)}, []))
        self.tokenizer.decoder = decoders.ByteLevel()
        pre = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self.bytes_by_letter = {}
        for code in (*range(0x80), *range(0xA0, 0x180)):
            text = chr(code)
            letters = "".join(piece for piece, _ in pre.pre_tokenize_str(text))
            self.bytes_by_letter.update(zip(letters, text.encode(), strict=True))

    def id_of(self, byte: int) -> int:
        letter = next((k for k, v in self.bytes_by_letter.items() if v == byte), None)
        return -1 if letter is None else self.alphabet.index(letter)


BYTE_LEVEL = ByteLevel()
IDS = {byte: BYTE_LEVEL.id_of(byte) for byte in range(256)}
KNOWN = [byte for byte, token in IDS.items() if token >= 0]


@given(st.lists(st.sampled_from(KNOWN), max_size=40))
def test_equals_the_tokenizers_library_on_any_bytes(data: list[int]) -> None:
    """Also where the bytes are no UTF-8: as many U+FFFD at the same places."""
    whole = BYTE_LEVEL.tokenizer.decode([IDS[b] for b in data])
    assert "".join(stream(ToyTokenizer(), data)) == whole


def test_the_comparison_covers_every_kind_of_byte() -> None:
    assert len(KNOWN) > 150
    assert {0x80, 0xBF, 0xC3, 0x41} <= set(KNOWN)
