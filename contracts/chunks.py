"""What crosses an edge: a Chunk of named tensors, and the fixed header that describes each of them on a
wire."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from torch import Tensor

CONTROL_STREAM = ""


class TensorHeader(msgspec.Struct, frozen=True, array_like=True):
    """dtype is torch's name without prefix ("bfloat16"); the bytes follow in C order."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class TensorHeaders(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Of all tensors of a chunk, in order."""

    here: tuple[TensorHeader, ...] = ()
    elsewhere: tuple[TensorHeader, ...] = ()  # on a device


class ChunkHeader(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The serialisable part of a chunk: everything but the tensor bytes. `tensors` are encoded TensorHeaders,
    the same bytes for all chunks of the same tensors: neither end works them out twice."""

    request_id: str
    stream: str
    seq: int
    last: bool
    tensors: msgspec.Raw
    meta: dict[str, int | float | str] = msgspec.field(default_factory=dict)


class Chunk(msgspec.Struct, frozen=True):
    """One message of one stream of one request. `seq` counts from 0 without gaps; a gap is an error."""

    request_id: str
    stream: str
    seq: int
    last: bool
    tensors: dict[str, Tensor] = msgspec.field(default_factory=dict)
    meta: dict[str, int | float | str] = msgspec.field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        nbytes = 0
        for tensor in self.tensors.values():  # cheaper than a sum, and every send asks
            nbytes += tensor.nbytes
        return nbytes
