"""Which graph a mixed step goes to."""

from __future__ import annotations

from lm_engine.graphs import StepKind, graph_for, step_kinds
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


def test_steps_of_a_picture_adapter_have_graphs_of_their_own() -> None:
    shapes = pass_shapes(300, 8192, gated=True)
    assert [s for s in shapes if not s.gated] == pass_shapes(300, 8192)
    assert [s.num_tokens for s in shapes if s.gated] == [16, 32, 64, 96, 128, 192, 256]
    assert {s.max_length for s in shapes if s.gated} == {8192}
    assert PassShape(48, 64, True) in pass_shapes(60, 64, gated=True)  # as many tokens as any other


def test_a_decode_step_runs_as_the_smallest_graph_that_is_there() -> None:
    kinds = step_kinds(40, gated=True)
    assert [k.size for k in kinds if not k.gated] == [1, 2, 4, 8, 16, 24, 32, 40]
    assert [k.size for k in kinds if k.gated] == [1, 2, 4, 8, 16, 32, 40]
    assert step_kinds(3, gated=False) == [StepKind(1), StepKind(2), StepKind(3)]
    captured = [StepKind(16, True), StepKind(24), StepKind(40, True)]
    assert graph_for(StepKind(9), kinds, captured) == StepKind(16, True)  # which then changes no row
    assert graph_for(StepKind(20), kinds, captured) == StepKind(24)
    assert graph_for(StepKind(20, True), kinds, captured) == StepKind(40, True)
    assert graph_for(StepKind(9), kinds, []) == StepKind(16)
    assert graph_for(StepKind(17, True), kinds, [StepKind(40)]) == StepKind(32, True)
