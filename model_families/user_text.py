"""Keeps client text from forging special tokens: literals become marks before rendering, and text after it.

A mark is an unguessable string that the tokenizer copy knows as a token of its own. So the rendered
conversation is encoded in one pass, marks and all, and the id of each mark is then replaced by the ids of its
literal as ordinary characters. A literal cut in two by the client ("<|image", "_pad|>") meets a seam: a mark
that stands for nothing, put after every string that ends like the beginning of a literal.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence

from tokenizers import AddedToken, Tokenizer

from model_families.text_pieces import PieceEncoder, safe_cuts

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]

# Encoded in front of a literal so that a SentencePiece-like tokenizer adds its first-word space there.
_ANCHOR = "\n"


class UserText:
    """Marks client strings and encodes text that holds marks. Immutable after construction, thread-safe."""

    def __init__(self, tokenizer: Tokenizer, control_tokens: Mapping[str, int]) -> None:
        literals = sorted(control_tokens, key=len, reverse=True)
        nonce = secrets.token_hex(16)
        self._mark_of = {literal: f"M{nonce}x{i}x" for i, literal in enumerate(literals)}
        self._seam = f"M{nonce}xSx"
        self._literal_of = {mark: literal for literal, mark in self._mark_of.items()} | {self._seam: ""}
        self._literals = _alternation(literals)
        self._marks = re.compile(f"(M{nonce}x(?:\\d+|S)x)")
        self._cut_off = _ends_like_a_beginning(literals)
        self._longest = max(map(len, literals), default=0)
        self._spaces_first_words = _encode_inside(tokenizer, "a") != _ids(tokenizer, "a")
        state = json.loads(tokenizer.to_str())
        plain = Tokenizer.from_str(json.dumps(state | {"added_tokens": []}))
        self._tokenizer = _copy_with_marks(tokenizer, state, [*self._mark_of.values(), self._seam])
        self._ids_of_mark: dict[int, list[int]] = {_id_of(self._tokenizer, self._seam): []}
        for literal, mark in self._mark_of.items():
            ids = _encode_as_characters(plain, literal, control_tokens[literal])
            self._ids_of_mark[_id_of(self._tokenizer, mark)] = ids
        added = self._tokenizer.get_added_tokens_decoder()
        cuts = set(safe_cuts(list(added.values()))) - self._literal_of.keys()
        self._encode_pieces = PieceEncoder(sorted(cuts), self._encode_once)

    def mark(self, text: str) -> str:
        """`text` with every literal replaced by its mark; unchanged, usually."""
        marked = self._literals.sub(lambda found: self._mark_of[found[0]], text)
        return marked + self._seam if self._cut_off.search(marked[-self._longest :]) else marked

    def mark_json(self, value: Json) -> Json:
        """A copy with every string marked, keys too."""
        if isinstance(value, str):
            return self.mark(value)
        if isinstance(value, list):
            return [self.mark_json(item) for item in value]
        if isinstance(value, dict):
            return {self.mark(key): self.mark_json(item) for key, item in value.items()}
        return value

    def unmark(self, text: str) -> str:
        return self._marks.sub(lambda found: self._literal_of[found[0]], text)

    def encode(self, marked: str, *, add_special_tokens: bool = False) -> list[int]:
        """Ids of text whose marks stand for ordinary characters and whose literals are special tokens."""
        if self._seam in marked:
            marked = self._without_idle_seams(marked)
        if add_special_tokens:
            return self._without_marks(_ids(self._tokenizer, marked, add_special_tokens))
        return self._encode_pieces(marked)

    def _encode_once(self, marked: str) -> list[int]:
        """All of it, with nothing kept."""
        if self._spaces_first_words:
            first, *rest = self._marks.split(marked)
            ids = _ids(self._tokenizer, first)
            for mark, piece in zip(rest[::2], rest[1::2], strict=True):
                ids.append(_id_of(self._tokenizer, mark))
                ids += _encode_inside(self._tokenizer, piece)
        else:
            ids = _ids(self._tokenizer, marked)
        return self._without_marks(ids)

    def _without_marks(self, ids: list[int]) -> list[int]:
        if self._ids_of_mark.keys().isdisjoint(ids):
            return ids
        return [i for token_id in ids for i in self._ids_of_mark.get(token_id, (token_id,))]

    def _without_idle_seams(self, marked: str) -> str:
        """Drops the seams over which no literal would arise: they would only disturb the word boundaries."""
        reach = self._longest - 1
        first, *rest = marked.split(self._seam)
        kept, tail = [first], first[-reach:]
        for right in rest:
            around = tail + right[:reach]
            forged = any(m.start() < len(tail) < m.end() for m in self._literals.finditer(around))
            kept += [self._seam, right] if forged else [right]
            tail = (tail + right)[-reach:]
        return "".join(kept)


def _alternation(literals: Sequence[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, literals)) or "(?!)")


def _ends_like_a_beginning(literals: Sequence[str]) -> re.Pattern[str]:
    beginnings = {literal[:n] for literal in literals for n in range(1, len(literal))}
    ordered = sorted(beginnings, key=len, reverse=True)
    return re.compile(f"(?:{'|'.join(map(re.escape, ordered)) or '(?!)'})\\Z")


def _copy_with_marks(tokenizer: Tokenizer, state: dict[str, Json], marks: list[str]) -> Tokenizer:
    """A tokenizer that also knows the marks, and matches special tokens as written, before normalisation.

    Otherwise text that merely normalises to a literal (full-width brackets under NFKC) would become one.
    """
    added_tokens = state["added_tokens"]
    assert isinstance(added_tokens, list)
    for token in added_tokens:
        assert isinstance(token, dict)
        if token["special"] and _is_normal(tokenizer, token["content"]):
            token["normalized"] = False
    copy = Tokenizer.from_str(json.dumps(state))
    copy.no_truncation()
    copy.no_padding()
    copy.add_special_tokens([AddedToken(mark, normalized=False, special=True) for mark in marks])
    return copy


def _id_of(tokenizer: Tokenizer, token: str) -> int:
    token_id = tokenizer.token_to_id(token)
    assert token_id is not None
    return token_id


def _is_normal(tokenizer: Tokenizer, content: Json) -> bool:
    assert isinstance(content, str)
    return tokenizer.normalizer is None or tokenizer.normalizer.normalize_str(content) == content


def _encode_as_characters(plain: Tokenizer, literal: str, own_id: int) -> list[int]:
    """Ids of `literal` as it stands in the middle of other text; `plain` knows no added token."""
    for pieces in ([literal], list(literal)):  # some models have the literal as one piece of their vocabulary
        ids = [i for piece in pieces for i in _encode_inside(plain, piece)]
        if own_id not in ids:
            return ids
    raise ValueError(f"the tokenizer cannot write {literal!r} but as a special token")


def _encode_inside(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of `text` without the space that a SentencePiece-like tokenizer puts before a first word."""
    anchor, anchored = _ids(tokenizer, _ANCHOR), _ids(tokenizer, _ANCHOR + text)
    if anchored[: len(anchor)] == anchor:
        return anchored[len(anchor) :]
    return _ids(tokenizer, text)


def _ids(tokenizer: Tokenizer, text: str, add_special_tokens: bool = False) -> list[int]:
    # The batch call is the one that skips character offsets, which takes a fifth off the time.
    ids: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
    return ids
