"""Routes: a pipeline as the coordinator asks it: where a request enters, who encodes, who speaks."""

from __future__ import annotations

from collections.abc import Mapping

from contracts.media import MediaItem, Prompt
from contracts.pipeline import Payload, Pipeline


class Routes:
    """`replicas`: stage → the names under which it runs; a stage that is not in it runs once, under its
    own."""

    def __init__(self, pipeline: Pipeline, replicas: Mapping[str, tuple[str, ...]] | None = None) -> None:
        self._pipeline = pipeline
        self._replicas = dict(replicas or {})
        self.entry = pipeline.entry
        talker = self._target(self.entry, "hidden_states")
        vocoder = None if talker is None else self._target(talker, "codec_frames")
        self._speech_path = None if talker is None or vocoder is None else (self.entry, talker, vocoder)

    def _target(self, source: str, payload: Payload) -> str | None:
        targets = [e.target for e in self._pipeline.edges if (e.source, e.payload) == (source, payload)]
        assert len(targets) <= 1, f"pipeline {self._pipeline.name!r}: {source} has several {payload} edges"
        return targets[0] if targets else None

    def replicas(self, stage: str) -> tuple[str, ...]:
        return self._replicas.get(stage, (stage,))

    @property
    def running(self) -> tuple[str, ...]:
        """All that run but preprocessing, by name."""
        stages = (s.name for s in self._pipeline.stages if s.kind != "preprocess")
        return tuple(name for stage in stages for name in self.replicas(stage))

    @property
    def encoders(self) -> tuple[str, ...]:
        return tuple(s.name for s in self._pipeline.of_kind("encoder"))

    @property
    def speaks(self) -> bool:
        return self._speech_path is not None

    @property
    def speech_path(self) -> tuple[str, str, str]:
        """Entry, talker and vocoder, in the order of their edges."""
        assert self._speech_path is not None, f"pipeline {self._pipeline.name!r} does not speak"
        return self._speech_path

    def encoder_of(self, item: MediaItem) -> str:
        encoder = self._pipeline.encoder_of(item.modality)
        assert encoder is not None, f"pipeline {self._pipeline.name!r} takes no {item.modality}"
        return encoder

    def encoders_of(self, prompt: Prompt) -> tuple[str, ...]:
        """The encoders of a prompt's items, each once."""
        return tuple(dict.fromkeys(self.encoder_of(item) for item in prompt.items))
