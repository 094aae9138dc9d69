"""Token ids to text, one token at a time, never cutting a character in two."""

from __future__ import annotations

import codecs
from typing import Protocol

_utf8 = codecs.getincrementaldecoder("utf-8")


class TokenTable(Protocol):
    """What detokenizing needs of a ChatTokenizer."""

    def token_bytes(self, token_id: int) -> bytes: ...

    def is_special(self, token_id: int) -> bool: ...


class Detokenizer:
    """The text of a growing token sequence, in O(bytes of the new token) per token.

    Bytes of an unfinished character wait for the next token; bytes that can never become a character turn
    into U+FFFD, as in a decode of the whole sequence. Relies on `token_bytes` being context free: the
    sequence's text is the decode of the joined bytes (true of byte-level vocabularies).
    """

    def __init__(self, table: TokenTable, *, skip_special_tokens: bool) -> None:
        self._table = table
        self._skip_special_tokens = skip_special_tokens
        self._decoder = _utf8("replace")

    def bytes_of(self, token_id: int) -> bytes:
        """The token's share of the text: empty for a special token that is skipped."""
        if self._skip_special_tokens and self._table.is_special(token_id):
            return b""
        return self._table.token_bytes(token_id)

    def push(self, data: bytes) -> str:
        return self._decoder.decode(data)

    def finish(self) -> str:
        """What was waiting for bytes that will not come."""
        return self._decoder.decode(b"", final=True)
