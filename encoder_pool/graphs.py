"""CUDA graphs of a tower's forward: one for each layout of a batch that comes again."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from math import prod
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from contracts.capture import GraphPool, release_unused
from encoder_pool.model import GraphBounds

logger = logging.getLogger(__name__)

K = TypeVar("K", bound=Hashable)  # a layout: batches of one differ in their values alone
Forward = Callable[[Tensor], Tensor]
Run = Callable[[], None]
Write = Callable[[Tensor], None]

KEPT_GRAPHS = 32
KEPT_BATCHES = 8  # of the largest size: what graphs read stays on the device with them
MET_LAYOUTS = 256  # whose second batch is recognised
BATCHES_PER_CAPTURE = 16  # at least, once every new graph puts out another one
LARGEST_SHARE = 0.9  # of the bytes: other batches find room in the largest one's memory, but for gaps
LEAST_ROWS_SHARE = 1 / 64  # of the bound: with room for fewer there are no graphs


class Recorder(Protocol):
    """Of graphs that share memory: one runs at a time."""

    def record(self, run: Run) -> Run:
        """Runs it, and returns what runs it again. Raises RuntimeError where it cannot be captured."""
        ...

    @property
    def held_bytes(self) -> int:
        """Of what is allocated inside of the runs."""
        ...


@dataclass(frozen=True, eq=False)
class _Captured:
    """`forward` keeps what the graph reads beside its input."""

    inputs: Tensor
    results_TW: Tensor
    replay: Run
    forward: Forward


@dataclass(frozen=True, eq=False)
class _Memory:
    """What all graphs of a tower have in common: where they find their input and leave their results, as the
    largest one needs it, and by `recorder` what lies between. A recorder's memory lasts as long as one of its
    graphs: `largest` is kept."""

    inputs: Tensor
    results: Tensor
    recorder: Recorder
    largest: _Captured

    @property
    def held_bytes(self) -> int:
        return self.recorder.held_bytes + self.inputs.nbytes + self.results.nbytes


class GraphedTower(ABC, Generic[K]):
    """An `EncoderModel` whose forwards can be captured: computes batches by graph where it has been allowed
    to, else launch by launch. Used by one thread, on one stream."""

    embedding_width: int
    dtype: torch.dtype
    device: torch.device
    graphs: TowerGraphs[K] | None = None

    @abstractmethod
    def max_rows(self, bounds: GraphBounds) -> int:
        """Of the input of a batch within the bounds."""

    @abstractmethod
    def input_shape(self, key: K) -> tuple[int, ...]:
        """Rows come first."""

    @abstractmethod
    def num_tokens(self, key: K) -> int: ...

    @abstractmethod
    def prepared(self, key: K) -> Forward:
        """The input → [num_tokens, embedding_width]. Whatever else it reads is on the device; the second run
        neither asks the host for anything nor waits for it."""

    @abstractmethod
    def largest(self, num_rows: int) -> K:
        """The layout of at most so many rows that takes the most memory."""

    def allow_graphs(self, bounds: GraphBounds, *, ahead: bool) -> None:
        self.graphs = TowerGraphs(self, bounds.num_bytes, self.max_rows(bounds))
        if ahead:
            self.graphs.reserve()

    @property
    def num_replays(self) -> int:
        return 0 if self.graphs is None else self.graphs.num_replays

    def drop_graphs(self) -> None:
        if self.graphs is not None:
            self.graphs.drop()

    @torch.inference_mode()
    def compute(self, key: K, num_tokens: list[int], write: Write) -> list[Tensor]:
        """Embeddings of each item, the caller's own. `write` fills the input."""
        results_TW = None if self.graphs is None else self.graphs.run(key, write)
        if results_TW is not None:
            return [part.clone() for part in torch.split(results_TW, num_tokens)]
        inputs = torch.empty(self.input_shape(key), dtype=self.dtype, device=self.device)
        write(inputs)
        return list(torch.split(self.prepared(key)(inputs), num_tokens))


class TowerGraphs(Generic[K]):
    """A layout is captured when it comes for the second time, and the graphs used last are kept."""

    def __init__(
        self,
        tower: GraphedTower[K],
        num_bytes: int,
        max_rows: int,
        make_recorder: Callable[[], Recorder] | None = None,
    ) -> None:
        """`num_bytes`: of the memory that all graphs share; `max_rows`: of the input of a batch."""
        self._tower = tower
        self._num_bytes = num_bytes
        self._least_rows = max(1, int(max_rows * LEAST_ROWS_SHARE))
        self._make_recorder = make_recorder or _CudaRecorders(tower.device)
        self._max_rows = max_rows
        self._memory: _Memory | None = None
        self._kept: OrderedDict[K, _Captured] = OrderedDict()  # the one used last at the end
        self._kept_rows = 0
        self._met: OrderedDict[K, bool] = OrderedDict()  # whether it may be captured; as above
        self._since_capture = BATCHES_PER_CAPTURE
        self._has_failed = self._has_dropped = False
        self.num_replays = 0

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def max_rows(self) -> int:
        """Of a batch that is captured."""
        return self._max_rows

    @property
    def held_bytes(self) -> int:
        return 0 if self._memory is None else self._memory.held_bytes

    def run(self, key: K, write: Write) -> Tensor | None:
        """[tokens, width], valid until the next call; None: to be computed plainly. `write` fills the input
        on the current stream."""
        self._since_capture += 1
        found = self._kept.get(key)
        if found is None:
            return self._capture(key, write) if self._comes_again(key) else None
        self._kept.move_to_end(key)
        write(found.inputs)
        found.replay()
        self.num_replays += 1
        return found.results_TW

    def reserve(self) -> bool:
        """Captures the largest batch for which there is room, if that is not done, whose memory all others
        share. False: there is room for none."""
        if self._memory is None:
            try:
                self._memory = self._reserved()
            except RuntimeError as error:
                self._max_rows = 0
                self._tell(error)
        return self._memory is not None

    def drop(self) -> None:
        """Of all graphs; what they held is given back before others are captured."""
        self._has_dropped = self._has_dropped or self._memory is not None
        self._kept.clear()
        self._kept_rows = 0
        self._met.clear()
        self._memory = None

    # --- inside -------------------------------------------------------------------------------------------
    def _comes_again(self, key: K) -> bool:
        """Whether it is to be captured now."""
        rows = self._rows(key)
        if rows > self._max_rows:
            return False
        may_capture = self._met.get(key)
        if may_capture is None:
            self._meet(key)
            return False
        self._met.move_to_end(key)
        has_room = len(self._kept) < KEPT_GRAPHS and self._kept_rows + rows <= KEPT_BATCHES * self._max_rows
        return may_capture and (has_room or self._since_capture >= BATCHES_PER_CAPTURE)

    def _meet(self, key: K, *, may_capture: bool = True) -> None:
        self._met[key] = may_capture
        if len(self._met) > MET_LAYOUTS:
            self._met.popitem(last=False)

    @torch.inference_mode()
    def _capture(self, key: K, write: Write) -> Tensor | None:
        self._since_capture = 0
        if not self.reserve() or not self._fits(key):
            return None
        memory = self._memory
        assert memory is not None
        try:
            captured = _record(self._tower, key, memory.inputs, memory.results, memory.recorder, write)
        except RuntimeError as error:
            self._meet(key, may_capture=False)
            self._tell(error)
            return None
        if memory.held_bytes > self._num_bytes:
            del captured, memory
            self.drop()
            self._meet(key, may_capture=False)
            return None
        self._keep(key, captured)
        return captured.results_TW

    def _keep(self, key: K, captured: _Captured) -> None:
        """Nothing of what goes is running: a capture has waited for the device."""
        self._kept[key] = captured
        self._kept_rows += self._rows(key)
        while len(self._kept) > KEPT_GRAPHS or self._kept_rows > KEPT_BATCHES * self._max_rows:
            oldest, _ = self._kept.popitem(last=False)
            self._kept_rows -= self._rows(oldest)
        assert self._kept_rows == sum(map(self._rows, self._kept))
        logger.info("captured a forward of %d rows; %d graphs", self._rows(key), len(self._kept))

    @torch.inference_mode()
    def _reserved(self) -> _Memory | None:
        """None, and no rows any more: there is no room."""
        room = int(self._num_bytes * LARGEST_SHARE)
        if self._has_dropped:
            self._give_back()
        while self._max_rows >= self._least_rows:
            largest = self._tower.largest(self._max_rows)
            rows = self._rows(largest)
            if not self._least_rows <= rows <= self._max_rows:  # it has no smaller one
                break
            self._max_rows = rows
            try:
                memory = _allocate(self._tower, largest, self._make_recorder())
            except torch.OutOfMemoryError:
                self._max_rows = rows // 2
            else:
                held = memory.held_bytes
                if held <= room:
                    return memory
                del memory
                self._max_rows = min(rows * 3 // 4, rows * room // held)
            self._give_back()  # before the next one is captured
        self._max_rows = 0
        return None

    def _give_back(self) -> None:
        if self._tower.device.type == "cuda":
            release_unused()
        self._has_dropped = False

    def _fits(self, key: K) -> bool:
        """Many short sounds have more tokens than a long one of as many rows."""
        assert self._memory is not None
        num_values = self._tower.num_tokens(key) * self._tower.embedding_width
        return self._rows(key) <= self._max_rows and num_values <= self._memory.results.numel()

    def _rows(self, key: K) -> int:
        return self._tower.input_shape(key)[0]

    def _tell(self, error: RuntimeError) -> None:
        if not self._has_failed:
            logger.warning("a forward could not be captured, and is launched as before: %s", error)
        self._has_failed = True


def _allocate(tower: GraphedTower[K], key: K, recorder: Recorder) -> _Memory:
    inputs = torch.zeros(prod(tower.input_shape(key)), dtype=tower.dtype, device=tower.device)
    results = inputs.new_zeros(tower.num_tokens(key) * tower.embedding_width)
    return _Memory(inputs, results, recorder, _record(tower, key, inputs, results, recorder))


def _record(
    tower: GraphedTower[K],
    key: K,
    inputs: Tensor,
    results: Tensor,
    recorder: Recorder,
    write: Write | None = None,
) -> _Captured:
    """Its results are those of what `write` has written."""
    shape, num_tokens = tower.input_shape(key), tower.num_tokens(key)
    own_inputs = inputs[: prod(shape)].view(shape)
    results_TW = results[: num_tokens * tower.embedding_width].view(num_tokens, -1)
    forward = tower.prepared(key)

    def run() -> None:
        results_TW.copy_(forward(own_inputs))

    if write is not None:
        write(own_inputs)
    return _Captured(own_inputs, results_TW, recorder.record(run), forward)


class _CudaRecorders:
    """Makes one after the other, of a tower."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last: GraphPool | None = None

    def __call__(self) -> Recorder:
        self._last = GraphPool(self._device, after=self._last)
        return _CudaRecorder(self._last)


class _CudaRecorder:
    def __init__(self, pool: GraphPool) -> None:
        self._pool = pool

    def record(self, run: Run) -> Run:
        run()  # what is new is compiled, and lies on the device, before the capture
        graph, _ = self._pool.capture(run)
        replay: Run = graph.replay
        return replay

    @property
    def held_bytes(self) -> int:
        return self._pool.held_bytes
