"""The exact bytes of each token of a vocabulary: byte-level BPE, byte-fallback and plain-text ones."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Literal

from tokenizers import Tokenizer

Spelling = Literal["byte_level", "byte_fallback", "plain"]

NUM_KNOWN = 1 << 15
_SPACE = "▁"  # SentencePiece's word boundary
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")


class TokenBytes:
    """Bytes by token id; an id without a token (padding rows of the embedding) has none."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = {i: token.content for i, token in tokenizer.get_added_tokens_decoder().items()}
        self._spelling = _spelling(tokenizer)
        self._known = lru_cache(NUM_KNOWN)(self._look_up)  # each token of every answer is asked for

    def __getitem__(self, token_id: int) -> bytes:
        return self._known(token_id)

    def _look_up(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._spelling == "byte_level":
            return _from_byte_level(token)
        if self._spelling == "byte_fallback":
            piece = _BYTE_PIECE.match(token)
            return bytes.fromhex(piece[1]) if piece else token.replace(_SPACE, " ").encode()
        return str(self._tokenizer.decode([token_id], skip_special_tokens=False)).encode()


def _spelling(tokenizer: Tokenizer) -> Spelling:
    decoder = json.loads(tokenizer.to_str())["decoder"]
    if decoder is None:
        return "plain"
    kinds = {decoder["type"], *(part["type"] for part in decoder.get("decoders", ()))}
    if "ByteLevel" in kinds:
        return "byte_level"
    return "byte_fallback" if kinds & {"ByteFallback", "Metaspace"} else "plain"


def _byte_of_character() -> dict[str, int]:
    """GPT-2's printable stand-ins: bytes that print stand for themselves, the others start at U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


_BYTE_OF_CHARACTER = _byte_of_character()


def _from_byte_level(token: str) -> bytes:
    try:
        return bytes(map(_BYTE_OF_CHARACTER.__getitem__, token))
    except KeyError:  # a token that was written as text into a byte-level vocabulary
        return token.encode()
