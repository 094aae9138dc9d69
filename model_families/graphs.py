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
            StageSpec("vision", "encoder"),
            StageSpec("thinker", "lm"),
        ),
        edges=(Edge("preprocess", "vision", "features"), Edge("vision", "thinker", "embeddings")),
        entry="thinker",
        terminals=("thinker",),
    )
