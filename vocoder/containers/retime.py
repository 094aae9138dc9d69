"""Changes speed (pitch kept) and sample rate of a stream of samples, to an exact total."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import av
import numpy as np
import numpy.typing as npt

Samples = npt.NDArray[np.float32]

MIN_SPEED, MAX_SPEED = 0.25, 4.0
# What one atempo filter does well: beyond a factor of two it drops samples instead of blending them.
MIN_TEMPO, MAX_TEMPO = 0.5, 2.0
FLUSH_S = 0.5  # longer than what a chain of filters keeps back, at any speed


def tempo_factors(speed: float) -> list[float]:
    """Factors within [MIN_TEMPO, MAX_TEMPO] whose product is `speed`."""
    factors = []
    while speed > MAX_TEMPO:
        factors.append(MAX_TEMPO)
        speed /= MAX_TEMPO
    while speed < MIN_TEMPO:
        factors.append(MIN_TEMPO)
        speed /= MIN_TEMPO
    return [*factors, speed]


class Retimer:
    """Feeds a filter graph. In all it gives round(n * to_rate / (from_rate * speed)) samples for n taken.

    The filters alone would stop up to a window short of that, so silence follows the last sample until all
    have come
    through, and the rest is cut.
    """

    def __init__(self, from_rate: int, to_rate: int, speed: float) -> None:
        assert MIN_SPEED <= speed <= MAX_SPEED
        self._from_rate = from_rate
        self._factor = to_rate / (from_rate * speed)
        self._num_taken = self._num_pushed = self._num_given = 0
        self._graph = None if from_rate == to_rate and speed == 1.0 else _build(from_rate, to_rate, speed)

    def target(self) -> int:
        return round(self._num_taken * self._factor)

    def push(self, samples: Samples) -> Samples:
        self._num_taken += len(samples)
        if self._graph is None or not len(samples):
            return samples
        self._push(self._graph, samples)
        return self._take(self._graph)

    def finish(self) -> Samples:
        """The rest. Nothing may be pushed after it."""
        if self._graph is None or not self._num_taken:
            return np.empty(0, np.float32)
        self._push(self._graph, np.zeros(round(self._from_rate * FLUSH_S), np.float32))
        self._graph.push(None)
        rest = self._take(self._graph)
        assert self._num_given == self.target(), (self._num_given, self.target())
        return rest

    def _push(self, graph: av.filter.Graph, samples: Samples) -> None:
        frame = av.AudioFrame.from_ndarray(samples[None], format="flt", layout="mono")
        frame.sample_rate = self._from_rate
        frame.time_base = Fraction(1, self._from_rate)
        frame.pts = self._num_pushed
        self._num_pushed += len(samples)
        graph.push(frame)

    def _take(self, graph: av.filter.Graph) -> Samples:
        parts = []
        while True:
            try:
                parts.append(graph.pull().to_ndarray().reshape(-1))
            except (BlockingIOError, EOFError):
                break
        got: Samples = np.concatenate(parts) if parts else np.empty(0, np.float32)
        got = got[: self.target() - self._num_given]
        self._num_given += len(got)
        return got


def _build(from_rate: int, to_rate: int, speed: float) -> av.filter.Graph:
    graph = av.filter.Graph()
    chain = [
        graph.add_abuffer(
            format="flt", sample_rate=from_rate, layout="mono", time_base=Fraction(1, from_rate)
        )
    ]
    chain += [graph.add("atempo", f"{factor!r}") for factor in tempo_factors(speed) if factor != 1.0]
    if from_rate != to_rate:
        chain += [graph.add("aresample", f"{to_rate}"), graph.add("aformat", "sample_fmts=flt")]
    chain.append(graph.add("abuffersink"))
    for source, target in pairwise(chain):
        source.link_to(target)
    graph.configure()
    return graph
