"""Tokens to text of one sample: end tokens, min_tokens, log-probabilities of exactly what is shown."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.sample_text import SampleText, TextDelta, TextOptions
from contracts.errors import EngineError
from contracts.messages import SampleDelta
from tests.api.fakes import END, ToyTokenizer, pieces, plain_logprobs

SPLIT_STOP = ToyTokenizer(b"a", b",b", b",c", b"!", b"\xf0\x9f", b"\x91", b"\x8d")
A, COMMA_B, COMMA_C, BANG, EMOJI_1, EMOJI_2, EMOJI_3 = pieces(7)


def run(
    tokens: list[int], options: TextOptions, *, per_step: int = 1, finish: str = "length", end: bool = False
) -> list[TextDelta]:
    sample = SampleText(SPLIT_STOP, options)
    deltas: list[TextDelta] = []
    for start in range(0, len(tokens), per_step):
        chunk = tuple(tokens[start : start + per_step])
        last = start + per_step >= len(tokens)
        deltas.append(
            sample.push(
                SampleDelta(
                    sample=0,
                    token_ids=chunk,
                    logprobs=tuple(plain_logprobs(t, start + i) for i, t in enumerate(chunk)),
                    finish_reason=finish if last else None,
                    stop_token_id=chunk[-1] if last and end else None,
                )
            )
        )
        if deltas[-1].finish:
            break
    return deltas


def text(deltas: list[TextDelta]) -> str:
    return "".join(d.text for d in deltas)


def test_stop_string_over_token_borders() -> None:
    deltas = run([A, COMMA_B, COMMA_C, BANG], TextOptions(stops=("b,c",)))
    assert text(deltas) == "a,"
    assert (deltas[-1].finish, deltas[-1].stop_reason) == ("stop", "b,c")
    assert sum(d.num_tokens for d in deltas) == 3


def test_included_stop_string() -> None:
    assert (
        text(run([A, COMMA_B, COMMA_C, BANG], TextOptions(stops=(",b",), include_stop_in_output=True)))
        == "a,b"
    )


def test_held_back_tail_is_flushed_at_the_end() -> None:
    deltas = run([A, COMMA_B], TextOptions(stops=("b,c",)))
    assert [d.text for d in deltas] == ["a", ",b"]
    assert deltas[-1].finish == "length"


def test_end_token_is_hidden_unless_asked_for() -> None:
    assert text(run([A, END], TextOptions(), finish="stop", end=True)) == "a"
    assert text(run([A, END], TextOptions(skip_special_tokens=False), finish="stop", end=True)) == "a"
    shown = TextOptions(skip_special_tokens=False, include_stop_in_output=True)
    assert text(run([A, END], shown, finish="stop", end=True)) == "a<|end|>"


def test_clients_stop_token_is_the_stop_reason() -> None:
    own = run([A, BANG], TextOptions(stop_token_ids=frozenset({BANG})), finish="stop", end=True)
    assert (text(own), own[-1].stop_reason) == ("a", BANG)
    assert run([A, END], TextOptions(), finish="stop", end=True)[-1].stop_reason is None


def test_stop_strings_wait_for_min_tokens() -> None:
    tokens = [A, BANG, A, BANG, A]
    assert text(run(tokens, TextOptions(stops=("!",), min_tokens=2))) == "a!a"


@given(st.integers(1, 6), st.sampled_from([(), ("b,c",), ("!",), ("👍",)]), st.integers(0, 3))
def test_tokens_per_step_change_nothing(per_step: int, stops: tuple[str, ...], min_tokens: int) -> None:
    tokens = [A, COMMA_B, EMOJI_1, EMOJI_2, EMOJI_3, COMMA_C, BANG, A]
    options = TextOptions(stops=stops, min_tokens=min_tokens, logprobs=1)
    one, many = run(tokens, options), run(tokens, options, per_step=per_step)
    assert text(one) == text(many)
    assert [t for d in one for t in d.tokens] == [t for d in many for t in d.tokens]
    assert one[-1].finish == many[-1].finish


def test_logprobs_cover_exactly_the_text() -> None:
    deltas = run([A, EMOJI_1, EMOJI_2, EMOJI_3, BANG, END], TextOptions(logprobs=0), finish="stop", end=True)
    scored = [t for d in deltas for t in d.tokens]
    assert [t.token_id for t in scored] == [A, EMOJI_1, EMOJI_2, EMOJI_3, BANG]
    assert [t.offset for t in scored] == [0, 1, 1, 1, 2]
    assert b"".join(SPLIT_STOP.token_bytes(t.token_id) for t in scored).decode() == text(deltas)
    for delta in deltas:  # released together with their text
        assert bool(delta.tokens) == bool(delta.text)


def test_logprobs_of_cut_text_are_dropped() -> None:
    deltas = run([A, COMMA_B, COMMA_C, BANG], TextOptions(stops=(",b,c",), logprobs=0))
    assert [t.token_id for d in deltas for t in d.tokens] == [A]


def test_server_side_abort_is_an_error() -> None:
    with pytest.raises(EngineError):
        run([A], TextOptions(), finish="abort")
