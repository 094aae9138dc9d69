"""Pipeline: the stages of a model and the declared edges between them. Frozen; knows no devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from contracts.media import Modality

StageKind = Literal["preprocess", "encoder", "lm", "vocoder"]
Payload = Literal["features", "embeddings", "tokens", "hidden_states", "codec_frames", "pcm"]

# What each kind of stage takes and gives; `Pipeline.validate` checks edges against it.
CONSUMES: dict[StageKind, frozenset[Payload]] = {
    "preprocess": frozenset(),
    "encoder": frozenset({"features"}),
    "lm": frozenset({"embeddings", "hidden_states"}),
    "vocoder": frozenset({"codec_frames"}),
}
PRODUCES: dict[StageKind, frozenset[Payload]] = {
    "preprocess": frozenset({"features"}),
    "encoder": frozenset({"embeddings"}),
    "lm": frozenset({"tokens", "hidden_states", "codec_frames"}),
    "vocoder": frozenset({"pcm"}),
}


@dataclass(frozen=True)
class StageSpec:
    """`modalities`: of an encoder, the items it takes."""

    name: str
    kind: StageKind
    modalities: tuple[Modality, ...] = ()


@dataclass(frozen=True)
class Edge:
    source: str
    target: str
    payload: Payload


class PipelineError(ValueError):
    """The graph itself is wrong; raised before any weight loads."""


@dataclass(frozen=True)
class Pipeline:
    """`entry` takes the request's prompt; `terminals` answer the client."""

    name: str
    stages: tuple[StageSpec, ...]
    edges: tuple[Edge, ...]
    entry: str
    terminals: tuple[str, ...]

    def stage(self, name: str) -> StageSpec:
        for spec in self.stages:
            if spec.name == name:
                return spec
        raise PipelineError(f"pipeline {self.name!r} has no stage {name!r}")

    def of_kind(self, kind: StageKind) -> tuple[StageSpec, ...]:
        return tuple(spec for spec in self.stages if spec.kind == kind)

    def encoder_of(self, modality: Modality) -> str | None:
        """The stage that encodes such items for the entry stage; None: there is none."""
        for spec in self.of_kind("encoder"):
            if modality in spec.modalities:
                return spec.name
        return None

    def validate(self) -> None:
        """Rejects unknown or duplicate stages, payload mismatches, cycles and dead ends."""
        names = [spec.name for spec in self.stages]
        if len(set(names)) != len(names):
            raise PipelineError(f"pipeline {self.name!r}: duplicate stage names in {names}")
        for edge in self.edges:
            self._validate_edge(edge)
        self._validate_encoders()
        for name in (self.entry, *self.terminals):
            self.stage(name)
        self._reject_cycles()
        self._reject_dead_ends()

    def _validate_encoders(self) -> None:
        takers: dict[Modality, str] = {}
        for spec in self.of_kind("encoder"):
            if not spec.modalities:
                raise PipelineError(f"encoder stage {spec.name!r} takes no modality")
            for modality in spec.modalities:
                other = takers.setdefault(modality, spec.name)
                if other != spec.name:
                    raise PipelineError(f"stages {other!r} and {spec.name!r} both encode {modality}")

    def _validate_edge(self, edge: Edge) -> None:
        source, target = self.stage(edge.source), self.stage(edge.target)
        if edge.payload not in PRODUCES[source.kind]:
            raise PipelineError(
                f"edge {edge.source}->{edge.target}: a {source.kind} stage gives no {edge.payload}"
            )
        if edge.payload not in CONSUMES[target.kind]:
            raise PipelineError(
                f"edge {edge.source}->{edge.target}: a {target.kind} stage takes no {edge.payload}"
            )

    def _reject_cycles(self) -> None:
        indegree = {spec.name: 0 for spec in self.stages}
        for edge in self.edges:
            indegree[edge.target] += 1
        ready = [name for name, degree in indegree.items() if degree == 0]
        seen = 0
        while ready:
            name = ready.pop()
            seen += 1
            for edge in self.edges:
                if edge.source == name:
                    indegree[edge.target] -= 1
                    if indegree[edge.target] == 0:
                        ready.append(edge.target)
        if seen != len(self.stages):
            raise PipelineError(f"pipeline {self.name!r}: the edges form a cycle")

    def _reject_dead_ends(self) -> None:
        useful = set(self.terminals)
        while True:
            more = {e.source for e in self.edges if e.target in useful} - useful
            if not more:
                break
            useful |= more
        dead = [spec.name for spec in self.stages if spec.name not in useful]
        if dead:
            raise PipelineError(f"pipeline {self.name!r}: nothing of {dead} reaches a terminal stage")
