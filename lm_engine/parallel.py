"""Tensor parallelism: how the ranks of one decoder add up, and which part of every weight a rank holds.

Queries, keys, values, gate and up are cut by outputs; the projections back to the residual stream by inputs,
so each rank gives a part of a sum: two sums a layer. Embeddings, norms and the head are replicated: cut by
vocabulary, the head would need the ranks' logits gathered in every step before anything is drawn, and the
embeddings a third kind of sum. Every rank draws for itself, the same token from the same bits.

Shapes: T tokens, H hidden, D head size, O outputs and I inputs of a linear.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol, cast

import torch
from torch import Tensor, distributed

from contracts.errors import EngineError
from lm_engine.devices import enter_device
from lm_engine.layers.kernels import DecoderLayer, Linear, Mlp
from lm_engine.model import DecoderConfig

logger = logging.getLogger(__name__)

START_LIMIT = timedelta(minutes=10)
CLOSE_LIMIT_S = 10.0
_NCCL_ENVIRONMENT = {
    "NCCL_NVLS_ENABLE": "0",  # multicast needs rights that containers lack
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # a thread that would look into the file of the meeting for ever
}


class WeightSource(Protocol):
    """See `lm_engine.decoder.WeightSource`."""

    device: torch.device
    dtype: torch.dtype

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor: ...


class TensorParallel(Protocol):
    """One rank's view of the others. All ranks make the same calls in the same order."""

    rank: int
    size: int

    def add_up(self, part: Tensor) -> Tensor:
        """The sum of all ranks' parts, the same bits on every rank; spends `part`."""
        ...

    def share(self, tensor: Tensor) -> None:
        """Rank 0's values into every rank's tensor."""
        ...

    def smallest(self, value: int) -> int: ...

    def apart(self) -> AbstractContextManager[None]:
        """Within it this rank adds nothing up: for steps whose results nobody wants. From one thread; the
        steps may run on any."""
        ...

    def close(self) -> None:
        """Leaves the others, who need not be there any more. Graphs that hold sums must be gone: NCCL waits
        for them. Nothing is added up afterwards. Idempotent."""
        ...


class OneRank:
    """Rank 0 of so many, without the others: sums are its own parts. For what a rank launches."""

    def __init__(self, size: int) -> None:
        self.rank, self.size = 0, size

    def add_up(self, part: Tensor) -> Tensor:
        return part

    def share(self, tensor: Tensor) -> None:
        pass

    def smallest(self, value: int) -> int:
        return value

    def apart(self) -> AbstractContextManager[None]:
        return nullcontext()

    def close(self) -> None:
        pass


class _Work(Protocol):
    def wait(self) -> object: ...


class _Group(Protocol):
    """What is used of torch's process groups, which torch does not type."""

    def allreduce(self, tensors: list[Tensor], options: object) -> _Work | None: ...
    def broadcast(self, tensors: list[Tensor], options: object) -> _Work | None: ...


class RankGroup:
    """NCCL between GPUs, gloo between CPUs. They meet in a file of no name that rank 0's process has made
    and the others inherited; none of them needs it any more when all are made."""

    def __init__(self, rank: int, size: int, meeting_fd: int, device: torch.device) -> None:
        self.rank, self.size, self._device = rank, size, device
        self._is_apart = False
        store = distributed.FileStore(f"/proc/self/fd/{meeting_fd}", size)  # type: ignore[attr-defined]
        if device.type == "cuda":
            for name, value in _NCCL_ENVIRONMENT.items():
                os.environ.setdefault(name, value)
            enter_device(device)
            nccl = distributed.ProcessGroupNCCL.Options()
            nccl._timeout = START_LIMIT
            group = cast(_Group, distributed.ProcessGroupNCCL(store, rank, size, nccl))
        else:
            gloo = distributed.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            gloo._timeout = START_LIMIT
            gloo._devices = [distributed.ProcessGroupGloo.create_device(interface="lo")]
            group = cast(_Group, distributed.ProcessGroupGloo(store, rank, size, gloo))
        self._group: _Group | None = group
        self.smallest(0)  # NCCL meets in the first call

    def add_up(self, part: Tensor) -> Tensor:
        part = part.contiguous()
        if not self._is_apart:
            _wait(self._made().allreduce([part], _allreduce_options()))
        return part

    def share(self, tensor: Tensor) -> None:
        options = distributed.BroadcastOptions()
        options.rootRank = 0
        options.asyncOp = False
        _wait(self._made().broadcast([tensor], options))

    def smallest(self, value: int) -> int:
        options = _allreduce_options()
        options.reduceOp = distributed.ReduceOp.MIN  # type: ignore[assignment]
        found = torch.tensor([value], device=self._device)
        _wait(self._made().allreduce([found], options))
        return int(found.item())

    @contextmanager
    def apart(self) -> Iterator[None]:
        self._is_apart = True
        try:
            yield
        finally:
            self._is_apart = False

    def close(self) -> None:
        """Torch aborts what NCCL holds: to take leave, it would wait for the others. The end waits for
        graphs: on a thread of its own, so that one which is left somewhere costs `CLOSE_LIMIT_S`, no more."""
        parting = [self._group]
        self._group = None
        thread = threading.Thread(target=parting.clear, name="ranks-part", daemon=True)
        thread.start()
        thread.join(CLOSE_LIMIT_S)
        if thread.is_alive():
            logger.warning(
                "tensor parallel: NCCL has not ended within %g s; it is left behind", CLOSE_LIMIT_S
            )

    def _made(self) -> _Group:
        assert self._group is not None, "the ranks have parted"
        return self._group


def _wait(work: _Work | None) -> None:
    """NCCL has none for what it does in the order of the current stream (torch 2.11)."""
    if work is not None:
        work.wait()


def _allreduce_options() -> distributed.AllreduceOptions:
    options = distributed.AllreduceOptions()
    options.asyncOp = False  # NCCL then computes in the order of the current stream, not on one beside it
    return options


# --- what a rank holds --------------------------------------------------------------------------------------
def shard_config(config: DecoderConfig, size: int) -> DecoderConfig:
    """The decoder as one rank computes it. Raises EngineError when it cannot be divided."""
    if size == 1:
        return config
    _check_divides("attention heads", config.num_heads, size)
    if size % config.num_kv_heads:  # else each KV head is held by several ranks
        _check_divides("KV heads", config.num_kv_heads, size)
    _check_divides("MLP columns", config.intermediate_size, size)
    moe = config.moe
    if moe is not None:
        shared = moe.shared_intermediate_size
        _check_divides("columns of an expert", moe.intermediate_size, size)
        _check_divides("columns of the shared expert", shared or 0, size)
        moe = dataclasses.replace(
            moe,
            intermediate_size=moe.intermediate_size // size,
            shared_intermediate_size=None if shared is None else shared // size,
        )
    return dataclasses.replace(
        config,
        num_heads=config.num_heads // size,
        num_kv_heads=max(1, config.num_kv_heads // size),
        intermediate_size=config.intermediate_size // size,
        moe=moe,
    )


def _check_divides(what: str, count: int, size: int) -> None:
    if count % size:
        raise EngineError(
            f"tensor_parallel = {size}: the model's {count} {what} cannot be divided by {size}",
            code="bad_deployment",
        )


class ShardedWeights:
    """A rank's part of each weight, out of a source of whole ones. Asked for the shapes of the rank."""

    def __init__(self, source: WeightSource, whole: DecoderConfig, rank: int, size: int) -> None:
        self.device, self.dtype = source.device, source.dtype
        self._source, self._rank, self._size = source, rank, size
        self._num_kv_heads, self._head_dim = whole.num_kv_heads, whole.head_dim

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        part, kind = name.rsplit(".", 2)[-2:] if name.count(".") > 1 else ("", "")
        rank, size = self._rank, self._size
        if kind == ("lora_b" if part in ("o", "down") else "lora_a"):  # the side that is not cut
            return self._source.take(name, shape)
        if part in ("k", "v"):
            return self._rows(name, shape, self._num_kv_heads * self._head_dim, self._first_kv_row())
        if part in ("q", "gate", "up"):
            return self._rows(name, shape, size * shape[0], rank * shape[0])
        if part in ("o", "down"):
            if kind == "bias":  # a sum has it once
                bias_O = self._source.take(name, shape)
                return bias_O if rank == 0 else torch.zeros_like(bias_O)
            num_inputs = shape[1]
            whole_OI = self._source.take(name, (shape[0], size * num_inputs))
            return whole_OI[:, rank * num_inputs : (rank + 1) * num_inputs].contiguous()
        return self._source.take(name, shape)

    def _first_kv_row(self) -> int:
        return self._rank * self._num_kv_heads // self._size * self._head_dim

    def _rows(self, name: str, shape: tuple[int, ...], num_rows: int, first: int) -> Tensor:
        return self._source.take(name, (num_rows, *shape[1:]))[first : first + shape[0]].contiguous()


# --- the sums -----------------------------------------------------------------------------------------------
@dataclass
class _SummedLinear:
    linear: Linear
    parallel: TensorParallel

    def __post_init__(self) -> None:
        self.in_features, self.out_features = self.linear.in_features, self.linear.out_features

    def __call__(self, x_TI: Tensor) -> Tensor:
        return self.parallel.add_up(self.linear(x_TI))


@dataclass(frozen=True)
class _SummedMlp:
    mlp: Mlp
    parallel: TensorParallel

    def __call__(self, x_TH: Tensor) -> Tensor:
        return self.parallel.add_up(self.mlp(x_TH))


def with_sums(layer: DecoderLayer, parallel: TensorParallel) -> DecoderLayer:
    return dataclasses.replace(
        layer, output=_SummedLinear(layer.output, parallel), mlp=_SummedMlp(layer.mlp, parallel)
    )
