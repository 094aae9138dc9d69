"""How a chunk lies in memory: its header as msgpack, then each tensor's bytes, all aligned to 64."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Mapping
from functools import lru_cache

import msgspec
import torch

from contracts.chunks import Chunk, ChunkHeader, TensorHeader, TensorHeaders

ALIGNMENT = 64
DTYPES = {str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype)}
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items() if not name.startswith("q")}  # quantized
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(ChunkHeader)
_headers_decoder = msgspec.msgpack.Decoder(TensorHeaders)
LAYOUTS_KEPT = 1024  # per process and direction
_Described = tuple[tuple[str, torch.dtype, torch.Size], ...]


def align(nbytes: int) -> int:
    return (nbytes + ALIGNMENT - 1) & -ALIGNMENT


class Part(msgspec.Struct, frozen=True):
    """A tensor, `offset` bytes behind the header's."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int
    offset: int


class Layout(msgspec.Struct, frozen=True):
    """Where the tensors of a chunk lie; the same object for the same tensors, while it is remembered. `size`
    has all padding, `nbytes` has not."""

    headers: msgspec.Raw
    parts: tuple[Part, ...]
    elsewhere: tuple[TensorHeader, ...]
    nbytes: int
    size: int


class Packed(msgspec.Struct, frozen=True):
    """A chunk ready to be written: `size` bytes with all padding, of which `nbytes` are the tensors'."""

    header: bytes
    tensors: tuple[torch.Tensor, ...]
    layout: Layout
    nbytes: int
    size: int


class Memory:
    """A writable mapping as torch and Python see it, the same bytes for both."""

    def __init__(self, pages: memoryview) -> None:
        self.pages = pages
        self.data = torch.frombuffer(pages, dtype=torch.uint8)
        self.address = self.data.data_ptr()
        self.pinned = False
        self._registered = False  # by us
        self._typed: dict[torch.dtype, torch.Tensor] = {}

    def view(self, offset: int, nbytes: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor at `offset`, in C order."""
        assert offset + nbytes <= len(self.pages), f"{nbytes} bytes at {offset} of {len(self.pages)}"
        if nbytes == 0:
            return self.data[:0].view(dtype).view(shape)
        if len(shape) == 1:  # the cheapest, most of all for a process that has just been woken
            return torch.frombuffer(self.pages, dtype=dtype, count=shape[0], offset=offset)
        whole = self._typed.get(dtype)
        if whole is None:
            whole = self.data[: len(self.pages) // dtype.itemsize * dtype.itemsize].view(dtype)
            self._typed[dtype] = whole
        # One call into torch, where slicing, reading as another type and reshaping are three.
        return whole.as_strided(shape, _strides(shape), offset // dtype.itemsize)

    def pin(self) -> None:
        """Registers the pages with CUDA, so that copies from and to a GPU run at full speed. Idempotent. UCX
        registers the memory of a NIXL edge itself, and takes it back itself."""
        if not self.pinned:
            if not self.data.is_pinned():
                runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
                torch.cuda.check_error(int(runtime.cudaHostRegister(self.address, len(self.pages), 0)))
                self._registered = True
            self.pinned = True

    def unpin(self) -> None:
        if self._registered:
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            torch.cuda.check_error(int(runtime.cudaHostUnregister(self.address)))
            self._registered = False
        self.pinned = False


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= length
    return tuple(reversed(strides))


def pack(chunk: Chunk, on_device: Mapping[str, torch.Tensor] | None = None) -> Packed:
    """`on_device`: further tensors, which are described and left to the caller."""
    layout = _layout(_describe(chunk.tensors), _describe(on_device) if on_device else ())
    header = _encoder.encode(
        ChunkHeader(
            request_id=chunk.request_id,
            stream=chunk.stream,
            seq=chunk.seq,
            last=chunk.last,
            tensors=layout.headers,
            meta=chunk.meta,
        )
    )
    return Packed(
        header, tuple(chunk.tensors.values()), layout, layout.nbytes, align(len(header)) + layout.size
    )


def _describe(tensors: Mapping[str, torch.Tensor]) -> _Described:
    described = []
    for name, tensor in tensors.items():
        assert tensor.layout is torch.strided, f"{name}: only strided tensors cross an edge"
        described.append((name, tensor.dtype, tensor.shape))
    return tuple(described)


@lru_cache(LAYOUTS_KEPT)
def _layout(here: _Described, elsewhere: _Described) -> Layout:
    headers = TensorHeaders(here=_headers(here), elsewhere=_headers(elsewhere))
    return _lay_out(headers, _encoder.encode(headers))


@lru_cache(LAYOUTS_KEPT)
def layout_of(encoded: bytes) -> Layout:
    """Of encoded TensorHeaders."""
    return _lay_out(_headers_decoder.decode(encoded), encoded)


def _lay_out(headers: TensorHeaders, encoded: bytes) -> Layout:
    parts, offset = [], 0
    for header in headers.here:
        nbytes = nbytes_of(header)
        parts.append(Part(header.name, DTYPES[header.dtype], header.shape, nbytes, offset))
        offset += align(nbytes)
    nbytes = sum(part.nbytes for part in parts)
    return Layout(msgspec.Raw(encoded), tuple(parts), headers.elsewhere, nbytes, offset)


def _headers(described: Iterable[tuple[str, torch.dtype, torch.Size]]) -> tuple[TensorHeader, ...]:
    headers = []
    for name, dtype, shape in described:
        assert dtype in _DTYPE_NAMES, f"{name}: only plain tensors cross an edge"
        headers.append(TensorHeader(name, _DTYPE_NAMES[dtype], tuple(shape)))
    return tuple(headers)


def write(memory: Memory, offset: int, packed: Packed) -> None:
    """Copies everything to `offset`; complete, GPU copies included, on return."""
    write_tensors(memory, write_header(memory, offset, packed), packed)


def write_header(memory: Memory, offset: int, packed: Packed) -> int:
    """Where the tensors belong."""
    assert offset % ALIGNMENT == 0
    end = offset + len(packed.header)
    memory.pages[offset:end] = packed.header
    return align(end)


def write_tensors(memory: Memory, offset: int, packed: Packed) -> None:
    on_cpu = True
    for tensor, part in zip(packed.tensors, packed.layout.parts, strict=True):
        if part.nbytes:
            on_cpu &= tensor.is_cpu
            _write_tensor(memory, offset + part.offset, tensor, part)
    if memory.pinned and not on_cpu:
        for device in {tensor.device for tensor in packed.tensors if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()


def _write_tensor(memory: Memory, offset: int, tensor: torch.Tensor, part: Part) -> None:
    if tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        # The C library's copy streams past the cache for large sizes; torch's does not.
        ctypes.memmove(memory.address + offset, tensor.data_ptr(), part.nbytes)
        return
    if tensor.is_cuda:
        memory.pin()
    view = memory.view(offset, part.nbytes, part.dtype, part.shape)
    view.copy_(tensor.detach(), non_blocking=memory.pinned and tensor.is_cuda)


def read_header(memory: Memory, offset: int, header_nbytes: int) -> tuple[ChunkHeader, Layout]:
    header = _decoder.decode(memory.pages[offset : offset + header_nbytes])
    return header, layout_of(bytes(header.tensors))


def nbytes_of(described: TensorHeader) -> int:
    return math.prod(described.shape) * DTYPES[described.dtype].itemsize


def read(memory: Memory, offset: int, header_nbytes: int) -> Chunk:
    """The chunk at `offset`; its tensors are views of `memory`."""
    header, layout = read_header(memory, offset, header_nbytes)
    return as_chunk(header, views(memory, offset + align(header_nbytes), layout))


def as_chunk(header: ChunkHeader, tensors: dict[str, torch.Tensor]) -> Chunk:
    return Chunk(header.request_id, header.stream, header.seq, header.last, tensors, header.meta)


def views(memory: Memory, offset: int, layout: Layout) -> dict[str, torch.Tensor]:
    return {
        part.name: memory.view(offset + part.offset, part.nbytes, part.dtype, part.shape)
        for part in layout.parts
    }
