"""CUDA graphs of a streaming decoder's forward: one for each batch of so many rows and frames.

Shapes: B rows, T frames, Q code groups, S values that a stream carries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from contracts.capture import capture
from vocoder.streaming import StateLayout, StreamBatch

ROW_SIZES = (1, 2, 4, 8, 16, 32)
FRAME_SIZES = (1, 2, 4, 8, 16)
MAX_FRAMES = 256  # of a batch

Results = tuple[Tensor, ...]
Replay = Callable[[], None]
Record = Callable[[Callable[[], Results]], tuple[Replay, Results]]


class Network(Protocol):
    layout: StateLayout

    def __call__(self, codes_BTQ: Tensor, streams: StreamBatch) -> Tensor: ...


@dataclass(frozen=True)
class _Captured:
    states_BS: Tensor
    num_frames_B: Tensor
    codes_BTQ: Tensor
    replay: Replay
    results: Results


class ForwardGraphs:
    """Forwards at fixed addresses. Those of a stream's first frames, which blank its void steps, are captured
    for single frames only: a stream's first chunk is one. One thread, one stream."""

    def __init__(
        self,
        network: Network,
        num_groups: int,
        num_void_frames: int,
        like: Tensor,
        record: Record | None = None,
    ) -> None:
        """`num_void_frames`: of a stream, that have void steps. `like`: a tensor of the states' dtype and
        device."""
        self._network = network
        self._num_groups, self._num_void_frames = num_groups, num_void_frames
        self._like = like
        self._record = record or _CudaRecorder(like.device)
        self._captured: dict[tuple[int, int, bool], _Captured] = {}

    def takes(self, num_rows: int, num_frames: int, youngest: int) -> bool:
        if num_rows > ROW_SIZES[-1] or num_frames not in FRAME_SIZES:
            return False
        is_young = youngest < self._num_void_frames
        return _rows_of(num_rows) * num_frames <= MAX_FRAMES and (num_frames == 1 or not is_young)

    def run(
        self, states: Sequence[Tensor], num_frames: Sequence[int], codes_BTQ: Tensor
    ) -> tuple[Tensor, Tensor]:
        """PCM float32 [B, samples] and the new states [B, S], both valid until the next call. The codes are
        on
        the host."""
        used, length = codes_BTQ.shape[:2]
        key = (_rows_of(used), length, min(num_frames) < self._num_void_frames)
        captured = self._captured.get(key) or self._capture(key)
        torch.stack(list(states), out=captured.states_BS[:used])
        padding = [max(num_frames)] * (key[0] - used)
        _write(captured.num_frames_B, torch.tensor([*num_frames, *padding]))
        _write(captured.codes_BTQ[:used], codes_BTQ)
        captured.replay()
        pcm_BT, new_BS = captured.results
        return pcm_BT[:used], new_BS[:used]

    def capture_all(self) -> int:
        for num_rows in reversed(ROW_SIZES):
            for length in reversed(FRAME_SIZES):
                for is_young in (False, True):
                    key = (num_rows, length, is_young)
                    youngest = 0 if is_young else self._num_void_frames
                    if self.takes(num_rows, length, youngest) and key not in self._captured:
                        self._capture(key)
        return len(self._captured)

    @torch.inference_mode()
    def _capture(self, key: tuple[int, int, bool]) -> _Captured:
        (num_rows, length, is_young), like, layout = key, self._like, self._network.layout
        states_BS = like.new_zeros(num_rows, layout.size)
        num_frames_B = torch.zeros(num_rows, dtype=torch.int64, device=like.device)
        codes_BTQ = num_frames_B.new_zeros(num_rows, length, self._num_groups)

        def run() -> Results:
            youngest = 0 if is_young else self._num_void_frames
            streams = StreamBatch(layout, states_BS, num_frames_B, youngest)
            return self._network(codes_BTQ, streams).float(), streams.new_BS

        replay, results = self._record(run)
        captured = self._captured[key] = _Captured(states_BS, num_frames_B, codes_BTQ, replay, results)
        return captured


class _CudaRecorder:
    """Its graphs share one pool of memory: results are valid until the next replay."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], Results]) -> tuple[Replay, Results]:
        run()  # lets the library choose its algorithms
        graph, results = capture(run, self._device, self._pool)
        return graph.replay, results


def _rows_of(num_rows: int) -> int:
    return next(size for size in ROW_SIZES if size >= num_rows)


def _write(target: Tensor, source: Tensor) -> None:
    if target.device.type == "cuda":
        source = source.pin_memory()
    target.copy_(source, non_blocking=True)
