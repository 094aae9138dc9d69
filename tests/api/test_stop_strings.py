"""Stop strings across piece borders: whatever the cutting, the same text, and never a letter of the stop."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from api.stop_strings import StopStrings

LETTERS = st.text("abc,é👍", max_size=24)


def feed(stops: tuple[str, ...], pieces: list[str], *, include: bool = False) -> tuple[list[str], str | None]:
    matcher = StopStrings(stops, include_in_output=include)
    out: list[str] = []
    for piece in pieces:
        text, hit = matcher.push(piece)
        out.append(text)
        if hit is not None:
            return out, hit
    return [*out, matcher.flush()], None


def expected(stops: tuple[str, ...], text: str, *, include: bool = False) -> tuple[str, str | None]:
    """By definition: the first prefix of the text that ends in a stop, cut before the longest such stop."""
    for end in range(1, len(text) + 1):
        hits = [s for s in stops if text[:end].endswith(s)]
        if hits:
            hit = max(hits, key=len)
            return (text[:end] if include else text[: end - len(hit)]), hit
    return text, None


@given(
    st.lists(st.text("abc,", min_size=1, max_size=5), max_size=4),
    st.lists(LETTERS, max_size=8),
    st.booleans(),
)
def test_any_cutting_gives_the_same_text(stops: list[str], pieces: list[str], include: bool) -> None:
    wanted = tuple(dict.fromkeys(stops))
    out, hit = feed(wanted, pieces, include=include)
    assert ("".join(out), hit) == expected(wanted, "".join(pieces), include=include)


@given(st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3), st.text("abx", max_size=20))
def test_holds_back_no_more_than_what_may_become_a_stop(stops: list[str], text: str) -> None:
    matcher = StopStrings(tuple(dict.fromkeys(stops)), include_in_output=False)
    sent = ""
    for i, letter in enumerate(text):
        piece, hit = matcher.push(letter)
        sent += piece
        if hit:
            return
        seen = text[: i + 1]
        longest = max(k for s in stops for k in range(len(s)) if seen.endswith(s[:k]))
        assert sent == seen[: len(seen) - longest]


def test_stop_over_three_tokens_never_leaks() -> None:
    assert feed(("b,c",), ["a", "b", ",", "c", "d"]) == (["a", "", "", ""], "b,c")


def test_tail_that_was_no_stop_after_all_is_sent() -> None:
    assert feed(("stop!",), ["to st", "op"]) == (["to ", "", "stop"], None)


def test_multibyte_stop() -> None:
    assert feed(("👍🏽",), ["ok 👍", "🏽 more"]) == (["ok ", ""], "👍🏽")


def test_bypassed_text_starts_no_match() -> None:
    matcher = StopStrings(("ab",), include_in_output=False)
    assert matcher.bypass("a") == "a"
    assert matcher.push("b") == ("b", None)
    assert matcher.push("xa") == ("x", None)
    assert matcher.bypass("b") == "ab"


def test_longest_of_the_stops_that_complete_together() -> None:
    for stops in (("b", "ab"), ("ab", "b")):
        assert feed(stops, ["xa", "b"]) == (["x", ""], "ab")
