"""Which graph a mixed step goes to."""

from __future__ import annotations

from lm_engine.passes import MAX_SPLIT_TOKENS, SHORT_LENGTH, TOKEN_SIZES, PassShape, pass_shapes


def test_steps_of_short_sequences_have_graphs_of_their_own_where_longer_ones_are_split() -> None:
    shapes = pass_shapes(TOKEN_SIZES[-1], 8192)
    assert shapes == sorted(shapes)
    assert {s.num_tokens for s in shapes} == set(TOKEN_SIZES)
    assert {s.num_tokens for s in shapes if s.max_length == 8192} == set(TOKEN_SIZES)
    assert all(s.max_length in (SHORT_LENGTH, 8192) for s in shapes)
    short = [s.num_tokens for s in shapes if s.max_length == SHORT_LENGTH]
    assert short == [size for size in TOKEN_SIZES if size <= MAX_SPLIT_TOKENS]


def test_where_no_sequence_is_long_there_is_one_graph_a_size() -> None:
    for length in (64, SHORT_LENGTH):
        assert pass_shapes(32, length) == [PassShape(16, length), PassShape(32, length)]
