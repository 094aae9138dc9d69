"""Pipeline.validate: what is wrong with a graph is said before any weight loads."""

from __future__ import annotations

import dataclasses

import pytest

from contracts.pipeline import Edge, Pipeline, PipelineError, StageSpec

SPEAKING = Pipeline(
    name="speaking",
    stages=(
        StageSpec("media", "preprocess"),
        StageSpec("vision", "encoder", ("image", "video")),
        StageSpec("thinker", "lm"),
        StageSpec("talker", "lm"),
        StageSpec("voice", "vocoder"),
    ),
    edges=(
        Edge("media", "vision", "features"),
        Edge("vision", "thinker", "embeddings"),
        Edge("thinker", "talker", "hidden_states"),
        Edge("talker", "voice", "codec_frames"),
    ),
    entry="thinker",
    terminals=("thinker", "voice"),
)


def edited(**changes):
    return dataclasses.replace(SPEAKING, **changes)


def test_a_good_graph_passes():
    SPEAKING.validate()
    assert [spec.name for spec in SPEAKING.of_kind("lm")] == ["thinker", "talker"]
    assert SPEAKING.stage("voice").kind == "vocoder"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (edited(stages=(*SPEAKING.stages, StageSpec("vision", "encoder"))), "duplicate stage names"),
        (edited(entry="nobody"), "no stage 'nobody'"),
        (edited(terminals=("thinker", "nobody")), "no stage 'nobody'"),
        (edited(edges=(*SPEAKING.edges, Edge("thinker", "nobody", "tokens"))), "no stage 'nobody'"),
        (edited(edges=(Edge("vision", "thinker", "features"), *SPEAKING.edges)), "a encoder stage gives no"),
        (edited(edges=(Edge("media", "thinker", "features"), *SPEAKING.edges)), "a lm stage takes no"),
        (edited(edges=(*SPEAKING.edges, Edge("talker", "thinker", "hidden_states"))), "form a cycle"),
        (edited(edges=(*SPEAKING.edges, Edge("thinker", "thinker", "hidden_states"))), "form a cycle"),
        (edited(terminals=("thinker",)), r"nothing of \['talker', 'voice'\] reaches"),
        (
            edited(stages=(*SPEAKING.stages, StageSpec("idle", "encoder", ("audio",)))),
            r"nothing of \['idle'\] reaches",
        ),
    ],
)
def test_a_wrong_graph_is_named(wrong, message):
    with pytest.raises(PipelineError, match=message):
        wrong.validate()
