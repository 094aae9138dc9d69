"""How a chunk lies in memory: its header as msgpack, then each tensor's bytes, all aligned to 64."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping

import msgspec
import torch

from contracts.chunks import Chunk, ChunkHeader, TensorHeader

ALIGNMENT = 64
DTYPES = {str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype)}
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items() if not name.startswith("q")}  # quantized
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(ChunkHeader)


def align(nbytes: int) -> int:
    return (nbytes + ALIGNMENT - 1) & -ALIGNMENT


class Packed(msgspec.Struct, frozen=True):
    """A chunk ready to be written: `size` bytes with all padding, of which `nbytes` are the tensors'."""

    header: bytes
    tensors: tuple[torch.Tensor, ...]
    tensor_nbytes: tuple[int, ...]
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
    tensors = tuple(chunk.tensors.values())
    header = _encoder.encode(
        ChunkHeader(
            request_id=chunk.request_id,
            stream=chunk.stream,
            seq=chunk.seq,
            last=chunk.last,
            tensors=_headers(chunk.tensors),
            device_tensors=_headers(on_device) if on_device else (),
            meta=chunk.meta,
        )
    )
    tensor_nbytes = tuple([tensor.nbytes for tensor in tensors])
    size = align(len(header)) + sum([align(nbytes) for nbytes in tensor_nbytes])
    return Packed(header, tensors, tensor_nbytes, sum(tensor_nbytes), size)


def _headers(tensors: Mapping[str, torch.Tensor]) -> tuple[TensorHeader, ...]:
    headers = []
    for name, tensor in tensors.items():
        assert tensor.layout is torch.strided, f"{name}: only strided tensors cross an edge"
        assert tensor.dtype in _DTYPE_NAMES, f"{name}: only plain tensors cross an edge"
        headers.append(TensorHeader(name, _DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)))
    return tuple(headers)


def write(memory: Memory, offset: int, packed: Packed) -> None:
    """Copies everything to `offset`; complete, GPU copies included, on return."""
    assert offset % ALIGNMENT == 0
    header = packed.header
    memory.pages[offset : offset + len(header)] = header
    offset += align(len(header))
    for tensor, nbytes in zip(packed.tensors, packed.tensor_nbytes, strict=True):
        if nbytes:
            _write_tensor(memory, offset, tensor, nbytes)
        offset += align(nbytes)
    if memory.pinned:
        for device in {tensor.device for tensor in packed.tensors if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()


def _write_tensor(memory: Memory, offset: int, tensor: torch.Tensor, nbytes: int) -> None:
    if tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        # The C library's copy streams past the cache for large sizes; torch's does not.
        ctypes.memmove(memory.address + offset, tensor.data_ptr(), nbytes)
        return
    if tensor.is_cuda:
        memory.pin()
    view = memory.view(offset, nbytes, tensor.dtype, tuple(tensor.shape))
    view.copy_(tensor.detach(), non_blocking=memory.pinned and tensor.is_cuda)


def read_header(memory: Memory, offset: int, header_nbytes: int) -> ChunkHeader:
    return _decoder.decode(memory.pages[offset : offset + header_nbytes])


def nbytes_of(described: TensorHeader) -> int:
    return math.prod(described.shape) * DTYPES[described.dtype].itemsize


def read(memory: Memory, offset: int, header_nbytes: int) -> Chunk:
    """The chunk at `offset`; its tensors are views of `memory`."""
    header = read_header(memory, offset, header_nbytes)
    offset += align(header_nbytes)
    tensors = {}
    for described in header.tensors:
        nbytes = nbytes_of(described)
        tensors[described.name] = memory.view(offset, nbytes, DTYPES[described.dtype], described.shape)
        offset += align(nbytes)
    return Chunk(header.request_id, header.stream, header.seq, header.last, tensors, header.meta)
