"""Whisper: a recording's mel frames through the audio encoder into the decoder's cross-attention."""

from __future__ import annotations

from contracts.pipeline import Edge, Pipeline, StageSpec

PIPELINE = Pipeline(
    name="whisper",
    stages=(
        StageSpec("preprocess", "preprocess"),
        StageSpec("audio", "encoder", ("audio",)),
        StageSpec("thinker", "lm"),
    ),
    edges=(Edge("preprocess", "audio", "features"), Edge("audio", "thinker", "embeddings")),
    entry="thinker",
    terminals=("thinker",),
)
