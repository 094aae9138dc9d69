"""CUDA graphs of a streaming decoder's forward: one for each batch of so many rows and frames.

Shapes: B rows, T frames, Q code groups, S values that a stream carries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from contracts.capture import GraphPool
from vocoder.streaming import StateLayout, StreamBatch

ROW_SIZES = (1, 2, 4, 8, 16, 32)
FRAME_SIZES = (1, 2, 4, 8, 16)
MAX_FRAMES = 256  # of a batch

Replay = Callable[[], None]
Record = Callable[[Callable[[], Tensor]], tuple[Replay, Tensor]]


class Network(Protocol):
    layout: StateLayout

    def __call__(self, codes_BTQ: Tensor, streams: StreamBatch) -> Tensor: ...


@dataclass(frozen=True)
class _Batch:
    states_BS: Tensor
    new_BS: Tensor
    num_frames_B: Tensor
    codes_BTQ: Tensor


class _Buffers:
    """Where forwards find their inputs and leave the new states: the same memory for batches of all sizes."""

    def __init__(self, like: Tensor, state_size: int, num_groups: int) -> None:
        """`like`: a tensor of the states' dtype and device."""
        self._states_BS = like.new_zeros(ROW_SIZES[-1], state_size)
        self._new_BS = torch.zeros_like(self._states_BS)
        self._num_frames_B = torch.zeros(ROW_SIZES[-1], dtype=torch.int64, device=like.device)
        self._codes_XQ = self._num_frames_B.new_zeros(MAX_FRAMES, num_groups)

    def batch(self, num_rows: int, length: int) -> _Batch:
        return _Batch(
            self._states_BS[:num_rows],
            self._new_BS[:num_rows],
            self._num_frames_B[:num_rows],
            self._codes_XQ[: num_rows * length].view(num_rows, length, -1),
        )


@dataclass(frozen=True)
class _Captured:
    buffers: _Batch
    replay: Replay
    pcm_BT: Tensor


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
        self._num_void_frames = num_void_frames
        self._record = record or _CudaRecorder(like.device)
        self._buffers = _Buffers(like, network.layout.size, num_groups)
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
        on the host."""
        used, length = codes_BTQ.shape[:2]
        key = (_rows_of(used), length, min(num_frames) < self._num_void_frames)
        captured = self._captured.get(key) or self._capture(key)
        buffers = captured.buffers
        torch.stack(list(states), out=buffers.states_BS[:used])
        padding = [max(num_frames)] * (key[0] - used)
        _write(buffers.num_frames_B, torch.tensor([*num_frames, *padding]))
        _write(buffers.codes_BTQ[:used], codes_BTQ)
        captured.replay()
        return captured.pcm_BT[:used], buffers.new_BS[:used]

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
        (num_rows, length, is_young), layout = key, self._network.layout
        buffers = self._buffers.batch(num_rows, length)

        def run() -> Tensor:
            youngest = 0 if is_young else self._num_void_frames
            streams = StreamBatch(
                layout, buffers.states_BS, buffers.num_frames_B, youngest, new_BS=buffers.new_BS
            )
            return self._network(buffers.codes_BTQ, streams).float()

        replay, pcm_BT = self._record(run)
        captured = self._captured[key] = _Captured(buffers, replay, pcm_BT)
        return captured


class _CudaRecorder:
    """Its graphs share memory: results are valid until the next replay."""

    def __init__(self, device: torch.device) -> None:
        self._pool = GraphPool(device)

    def __call__(self, run: Callable[[], Tensor]) -> tuple[Replay, Tensor]:
        run()  # lets the library choose its algorithms
        graph, pcm_BT = self._pool.capture(run)
        return graph.replay, pcm_BT


def _rows_of(num_rows: int) -> int:
    return next(size for size in ROW_SIZES if size >= num_rows)


def _write(target: Tensor, source: Tensor) -> None:
    if target.device.type == "cuda":
        source = source.pin_memory()
    target.copy_(source, non_blocking=True)
