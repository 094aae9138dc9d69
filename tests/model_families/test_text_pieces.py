"""Ids piece by piece equal the ids of the whole, and what is kept is bounded."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from model_families.text_pieces import PieceEncoder, safe_cuts
from model_families.user_text import UserText
from tests.tiny_models import SPECIAL_TOKENS, build_tokenizer

WORDS = ("a", "The cat", " ", "\n", "  x", "é", "e\u0301", "ﬁ", "0", "<|", "|>", "user", "▁", "日本")


def metaspace(scheme: str) -> Tokenizer:
    alphabet = [chr(c) for c in range(0x20, 0x7F)] + ["▁", "<unk>"]
    core = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, [], unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    core.decoder = decoders.Metaspace(prepend_scheme=scheme)
    return core


def prepending() -> Tokenizer:
    core = metaspace("never")
    core.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Prepend("▁")])
    return core


def byte_level() -> Tokenizer:
    return build_tokenizer().backend_tokenizer


MAKERS = {
    "byte_level": byte_level,
    "metaspace_first": lambda: metaspace("first"),
    "metaspace_always": lambda: metaspace("always"),
    "prepend": prepending,
}


@pytest.fixture(scope="module", params=MAKERS)
def user_text(request):
    core = MAKERS[request.param]()
    core.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in SPECIAL_TOKENS])
    # One that reaches over spaces to both sides, and one that is found after normalisation.
    core.add_tokens([AddedToken("<tool>", lstrip=True, rstrip=True, normalized=False)])
    core.add_tokens([AddedToken("the cat", normalized=True)])
    return UserText(core, {name: core.token_to_id(name) for name in SPECIAL_TOKENS})


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    parts=st.lists(
        st.one_of(st.sampled_from(SPECIAL_TOKENS), st.sampled_from((*WORDS, "<tool>", "the cat")))
        | st.tuples(st.sampled_from(SPECIAL_TOKENS), st.sampled_from(WORDS)),
        max_size=12,
    )
)
def test_pieces_give_the_ids_of_the_whole(user_text, parts):
    """A tuple is what a client has written: never the token itself."""
    marked = "".join(part if isinstance(part, str) else user_text.mark("".join(part)) for part in parts)
    whole = user_text._encode_once(user_text._without_idle_seams(marked))
    assert user_text.encode(marked) == whole
    assert user_text.encode(marked) == whole  # now of kept pieces


def special(content: str, **options: bool) -> AddedToken:
    return AddedToken(content, special=True, **({"normalized": False} | options))


@pytest.mark.parametrize(
    ("others", "cuts"),
    [
        ((), ["<end>"]),
        ((special("x<end>"),), ["x<end>"]),  # covers it
        ((special("<end>x"),), []),
        ((special("x<"),), ["x<"]),  # ends with its beginning
        ((special("<end>", lstrip=True),), []),
        ((special("<end>", rstrip=True),), []),
        ((special("<end>", normalized=True),), []),
        ((special("word", single_word=True),), []),
        ((special("<a>", lstrip=True),), ["<end>"]),
        ((AddedToken("role", normalized=False),), ["<end>"]),
        ((special("\n\n"),), ["<end>"]),
    ],
)
def test_a_cut_is_where_no_other_token_reaches(others, cuts):
    given = {token.content: token for token in (special("<end>"), *others)}
    assert safe_cuts(list(given.values())) == cuts


def test_what_repeats_its_own_beginning_is_no_cut():
    assert safe_cuts([special("<a><")]) == []


def counting(kept_bytes: int) -> tuple[PieceEncoder, list[str]]:
    asked: list[str] = []

    def encode(text: str) -> list[int]:
        asked.append(text)
        return [ord(c) for c in text]

    return PieceEncoder(["<e>"], encode, kept_bytes), asked


def test_a_later_turn_encodes_what_is_new():
    encode, asked = counting(1 << 20)
    assert encode("one<e>two<e>") == [ord(c) for c in "one<e>two<e>"]
    assert asked == ["one", "<e>two", "<e>"]
    encode("one<e>two<e>three")
    assert asked[3:] == ["<e>three"]


def test_what_is_kept_is_bounded_and_was_used_last():
    encode, asked = counting(41 * 8 * 4)
    for text in ("aaaa", "bbbb", "cccc", "dddd", "eeee", "ffff", "gggg", "hhhh", "aaaa"):
        encode(text)
    assert asked[8:] == []
    encode("iiii")  # "bbbb" makes room
    encode("aaaa")
    encode("bbbb")
    assert asked[8:] == ["iiii", "bbbb"]
    encode("x" * 5)  # more than its share: not kept
    encode("x" * 5)
    assert asked[10:] == ["xxxxx", "xxxxx"]


def test_no_cut_no_pieces():
    asked: list[str] = []
    encode = PieceEncoder([], lambda text: asked.append(text) or [1])
    assert encode("a<e>b") == encode("a<e>b") == [1]
    assert asked == ["a<e>b"] * 2
