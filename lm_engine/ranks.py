"""The runners of a tensor-parallel engine: rank 0 hands every plan on before it runs it, the others follow.

A plan crosses a socket as msgpack; its tensors follow from GPU to GPU. Each rank answers with a digest of
what it drew: ranks that differ would serve garbage from then on, so that is as fatal as a rank's death.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import socket
import struct
import threading
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import msgspec
import numpy as np
import torch
from torch import Tensor

from contracts.chunks import TensorHeader
from lm_engine.graphs import DecodeGraphs
from lm_engine.logits_rule import LogitsRule
from lm_engine.model import DecoderModel, PagedKV
from lm_engine.parallel import TensorParallel
from lm_engine.plan import StepPlan, StepResult
from lm_engine.runner import LaunchedStep, Runner, collect

logger = logging.getLogger(__name__)

_LENGTH = struct.Struct("<Q")
_ANSWER = struct.Struct("<qq")  # step, digest
FAILED = -1


# --- plans on the wire --------------------------------------------------------------------------------------
class _Array(msgspec.Struct, frozen=True, array_like=True):
    dtype: str
    shape: tuple[int, ...]
    data: bytes


def _encode_other(value: object) -> _Array | TensorHeader:
    if isinstance(value, np.ndarray):
        return _Array(value.dtype.str, value.shape, np.ascontiguousarray(value).tobytes())
    assert isinstance(value, Tensor), f"a plan holds a {type(value).__name__}"
    return TensorHeader("", str(value.dtype).removeprefix("torch."), tuple(value.shape))


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_other)


def encode_plan(plan: StepPlan) -> bytes:
    """Without the values of its tensors."""
    return _encoder.encode(plan)


class PlanDecoder:
    """Plans as they were encoded, their tensors' values not yet there."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._decoder = msgspec.msgpack.Decoder(StepPlan, dec_hook=self._decode_other)

    def decode(self, frame: bytes) -> StepPlan:
        return self._decoder.decode(frame)

    def _decode_other(self, kind: type, value: object) -> np.ndarray | Tensor:
        if kind is np.ndarray:
            array = msgspec.convert(value, _Array)
            return np.frombuffer(array.data, dtype=array.dtype).reshape(array.shape).copy()
        assert kind is Tensor, f"a plan holds a {kind.__name__}"
        header = msgspec.convert(value, TensorHeader)
        return torch.empty(header.shape, dtype=getattr(torch, header.dtype), device=self._device)


def _with_rows_alone(plan: StepPlan, device: torch.device) -> StepPlan:
    """The same step, its pieces holding no more rows than it uses, on the model's device."""
    pieces = []
    for piece in plan.span_pieces:
        rows = piece.embeddings[piece.source_start : piece.source_start + piece.length]
        rows = rows.to(device, non_blocking=True).contiguous()
        pieces.append(dataclasses.replace(piece, embeddings=rows, source_start=0))
    return dataclasses.replace(plan, span_pieces=tuple(pieces))


def digest(result: StepResult) -> int:
    drawn = [(token.slot, token.token_id) for token in result.sampled]
    drawn += [(slot, FAILED) for slot in result.failed_slots]
    return zlib.crc32(np.array(drawn, dtype=np.int64).tobytes())


# --- rank 0 -------------------------------------------------------------------------------------------------
class Followers:
    """The other ranks as rank 0 sees them. `lost(reason)` is called, once, from a thread of its own when one
    of them is gone or has drawn something else; `reap` at last, when they have been told to end."""

    def __init__(
        self,
        channels: Sequence[socket.socket],
        lost: Callable[[str], None],
        reap: Callable[[], None] = lambda: None,
    ) -> None:
        self._channels = channels
        self._lost = lost
        self._reap = reap
        self._lock = threading.Lock()
        self._expected: dict[tuple[int, int], int] = {}  # (rank, step) → digest, whoever came first
        self._closing = False
        self._threads = [
            threading.Thread(target=self._listen, args=(rank, channel), name=f"rank {rank}", daemon=True)
            for rank, channel in enumerate(channels, start=1)
        ]
        for thread in self._threads:
            thread.start()

    def tell(self, frame: bytes) -> None:
        for channel in self._channels:
            channel.sendall(_LENGTH.pack(len(frame)) + frame)

    def ran(self, step_id: int, found: int) -> None:
        """What rank 0 drew."""
        for rank in range(1, len(self._channels) + 1):
            self._compare(rank, step_id, found)

    def close(self) -> None:
        """The ranks end by themselves, after what they were told."""
        with self._lock:
            self._closing = True
        for channel in self._channels:
            with contextlib.suppress(OSError):  # it is gone already
                channel.shutdown(socket.SHUT_WR)
        for thread in self._threads:
            thread.join()
        for channel in self._channels:
            channel.close()
        self._reap()

    def _listen(self, rank: int, channel: socket.socket) -> None:
        while True:
            answer = _receive(channel, _ANSWER.size)
            if answer is None:
                self._fail(f"rank {rank} is gone")
                return
            self._compare(rank, *_ANSWER.unpack(answer))

    def _compare(self, rank: int, step_id: int, found: int) -> None:
        with self._lock:
            expected = self._expected.pop((rank, step_id), None)
            if expected is None:
                self._expected[rank, step_id] = found
                return
        if expected != found:
            self._fail(f"rank {rank} and rank 0 differ in step {step_id}")

    def _fail(self, reason: str) -> None:
        with self._lock:
            if self._closing:
                return
            self._closing = True
        logger.critical("tensor parallel: %s", reason)
        self._lost(reason)


class RankRunner(Runner):
    """A rank's part of a runner: its steps add up with the other ranks' inside, and so do its graphs, which
    all
    ranks capture and replay in the same order."""

    def __init__(
        self,
        model: DecoderModel,
        kv: PagedKV,
        parallel: TensorParallel,
        *,
        max_sequences: int,
        max_length: int,
        cuda_graphs: bool = True,
        rule: LogitsRule | None = None,
    ) -> None:
        super().__init__(
            model,
            model.attention,
            kv,
            max_sequences=max_sequences,
            max_length=max_length,
            cuda_graphs=cuda_graphs,
            rule=rule,
        )
        self._parallel = parallel

    def capture_between_steps(self) -> bool:
        raise AssertionError("ranks capture in the same order")

    def _compile(self, graphs: DecodeGraphs) -> None:
        """Its steps run in any order, and for their kernels alone."""
        with self._parallel.apart():
            super()._compile(graphs)


class LeadingRunner(RankRunner):
    """Rank 0's."""

    def __init__(
        self,
        model: DecoderModel,
        kv: PagedKV,
        parallel: TensorParallel,
        followers: Followers,
        *,
        max_sequences: int,
        max_length: int,
        cuda_graphs: bool = True,
        rule: LogitsRule | None = None,
    ) -> None:
        super().__init__(
            model,
            kv,
            parallel,
            max_sequences=max_sequences,
            max_length=max_length,
            cuda_graphs=cuda_graphs,
            rule=rule,
        )
        self._followers = followers

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        future = super().submit(plan)
        future.add_done_callback(lambda done: self._followers.ran(plan.step_id, _digest_of(done)))
        return future

    def _launch(self, plan: StepPlan) -> LaunchedStep:
        with torch.inference_mode():
            plan = _with_rows_alone(plan, self.model.device)
            self._followers.tell(encode_plan(plan))
            for piece in plan.span_pieces:
                self._parallel.share(piece.embeddings)
        return super()._launch(plan)

    def close(self) -> None:
        super().close()
        self._followers.close()
        # First, and those in cycles too, of other runners of the model as well: NCCL's end waits for every
        # graph that holds its sums.
        self._graphs = self._passes = None
        gc.collect()
        self._parallel.close()


def _digest_of(done: Future[StepResult]) -> int:
    return FAILED if done.cancelled() or done.exception() is not None else digest(done.result())


# --- the other ranks ----------------------------------------------------------------------------------------
class FollowingRunner(RankRunner):
    """Runs what rank 0 runs."""

    def __init__(
        self,
        model: DecoderModel,
        kv: PagedKV,
        parallel: TensorParallel,
        channel: socket.socket,
        *,
        max_sequences: int,
        max_length: int,
        cuda_graphs: bool = True,
        rule: LogitsRule | None = None,
    ) -> None:
        super().__init__(
            model,
            kv,
            parallel,
            max_sequences=max_sequences,
            max_length=max_length,
            cuda_graphs=cuda_graphs,
            rule=rule,
        )
        self._channel = channel
        self._plans = PlanDecoder(model.device)

    def follow(self) -> None:
        """Returns when rank 0 has closed the channel."""
        while (length := _receive(self._channel, _LENGTH.size)) is not None:
            frame = _receive(self._channel, _LENGTH.unpack(length)[0])
            if frame is None:
                break
            plan = self._plans.decode(frame)
            launched = self._launcher.submit(self._launch, plan)
            self._collector.submit(self._answer, plan.step_id, launched)
        self.close()
        self._channel.close()

    def _launch(self, plan: StepPlan) -> LaunchedStep:
        with torch.inference_mode():
            for piece in plan.span_pieces:
                self._parallel.share(piece.embeddings)
        return super()._launch(plan)

    def _answer(self, step_id: int, launched: Future[LaunchedStep]) -> None:
        error = launched.exception()
        if error is not None:
            logger.error("step %d failed", step_id, exc_info=error)
        found = FAILED if error is not None else digest(collect(launched.result()))
        self._channel.sendall(_ANSWER.pack(step_id, found))


def _receive(channel: socket.socket, nbytes: int) -> bytes | None:
    """None when the other end has closed, or has died."""
    received = bytearray()
    while len(received) < nbytes:
        try:
            data = channel.recv(nbytes - len(received))
        except ConnectionError:
            return None
        if not data:
            return None
        received += data
    return bytes(received)
