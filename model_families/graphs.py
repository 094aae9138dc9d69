"""The graphs that several families share."""

from __future__ import annotations

from contracts.pipeline import Edge, Pipeline, StageSpec


def text_pipeline(name: str) -> Pipeline:
    return Pipeline(
        name=name,
        stages=(StageSpec("thinker", "lm"),),
        edges=(),
        entry="thinker",
        terminals=("thinker",),
    )


def vision_pipeline(name: str) -> Pipeline:
    """The thinker takes the prompt first: it asks only for the items that its prefix cache does not cover."""
    return Pipeline(
        name=name,
        stages=(
            StageSpec("preprocess", "preprocess"),
            StageSpec("vision", "encoder", ("image", "video")),
            StageSpec("thinker", "lm"),
        ),
        edges=(Edge("preprocess", "vision", "features"), Edge("vision", "thinker", "embeddings")),
        entry="thinker",
        terminals=("thinker",),
    )


def omni_pipeline(name: str, *, speaks: bool) -> Pipeline:
    """It hears and sees; `speaks`: the thinker's hidden states go on to a talker, whose frames become
    sound."""
    stages = [
        StageSpec("preprocess", "preprocess"),
        StageSpec("vision", "encoder", ("image", "video")),
        StageSpec("audio", "encoder", ("audio",)),
        StageSpec("thinker", "lm"),
    ]
    edges = [Edge("preprocess", encoder, "features") for encoder in ("vision", "audio")]
    edges += [Edge(encoder, "thinker", "embeddings") for encoder in ("vision", "audio")]
    if speaks:
        stages += [StageSpec("talker", "lm"), StageSpec("vocoder", "vocoder")]
        edges += [Edge("thinker", "talker", "hidden_states"), Edge("talker", "vocoder", "codec_frames")]
    return Pipeline(
        name=name,
        stages=tuple(stages),
        edges=tuple(edges),
        entry="thinker",
        terminals=("thinker", "vocoder") if speaks else ("thinker",),
    )
