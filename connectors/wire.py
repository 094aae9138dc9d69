"""How a chunk lies in memory: its header as msgpack, then each tensor's bytes, all aligned to 64."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
import torch

from contracts.chunks import Chunk, ChunkHeader, TensorHeader

ALIGNMENT = 64
DTYPES = {str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype)}
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(ChunkHeader)


def align(nbytes: int) -> int:
    return (nbytes + ALIGNMENT - 1) & -ALIGNMENT


@dataclass(frozen=True)
class Packed:
    """A chunk ready to be written: `size` bytes with all padding, of which `nbytes` are the tensors'."""

    header: bytes
    tensors: tuple[torch.Tensor, ...]
    nbytes: int
    size: int


class Memory:
    """A writable mapping as torch and Python see it, the same bytes for both."""

    def __init__(self, pages: memoryview) -> None:
        self.pages = pages
        self.data = torch.frombuffer(pages, dtype=torch.uint8)
        self.address = self.data.data_ptr()
        self.pinned = False

    def pin(self) -> None:
        """Registers the pages with CUDA, so that copies from and to a GPU run at full speed. Idempotent."""
        if not self.pinned:
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            torch.cuda.check_error(int(runtime.cudaHostRegister(self.address, len(self.pages), 0)))
            self.pinned = True

    def unpin(self) -> None:
        if self.pinned:
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            torch.cuda.check_error(int(runtime.cudaHostUnregister(self.address)))
            self.pinned = False


def pack(chunk: Chunk, on_device: Mapping[str, torch.Tensor] | None = None) -> Packed:
    """`on_device`: further tensors, which are described and left to the caller."""
    nbytes = sum(tensor.nbytes for tensor in chunk.tensors.values())
    size = sum(align(tensor.nbytes) for tensor in chunk.tensors.values())
    header = _encoder.encode(
        ChunkHeader(
            request_id=chunk.request_id,
            stream=chunk.stream,
            seq=chunk.seq,
            last=chunk.last,
            tensors=_headers(chunk.tensors),
            device_tensors=_headers(on_device or {}),
            meta=chunk.meta,
        )
    )
    return Packed(header, tuple(chunk.tensors.values()), nbytes, align(len(header)) + size)


def _headers(tensors: Mapping[str, torch.Tensor]) -> tuple[TensorHeader, ...]:
    for name, tensor in tensors.items():
        assert tensor.layout is torch.strided, f"{name}: only strided tensors cross an edge"
        assert not tensor.is_quantized, f"{name}: only plain tensors cross an edge"
    return tuple(
        TensorHeader(name, _DTYPE_NAMES[tensor.dtype], tuple(tensor.shape))
        for name, tensor in tensors.items()
    )


def write(memory: Memory, offset: int, packed: Packed) -> None:
    """Copies everything to `offset`; complete, GPU copies included, on return."""
    assert offset % ALIGNMENT == 0
    memory.pages[offset : offset + len(packed.header)] = packed.header
    offset += align(len(packed.header))
    for tensor in packed.tensors:
        if tensor.nbytes:
            _write_tensor(memory, offset, tensor.detach())
        offset += align(tensor.nbytes)
    if memory.pinned:
        for device in {tensor.device for tensor in packed.tensors if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()


def _write_tensor(memory: Memory, offset: int, tensor: torch.Tensor) -> None:
    plain = not tensor.is_conj() and not tensor.is_neg()
    if tensor.device.type == "cpu" and plain and tensor.is_contiguous():
        # The C library's copy streams past the cache for large sizes; torch's does not.
        ctypes.memmove(memory.address + offset, tensor.data_ptr(), tensor.nbytes)
        return
    if tensor.is_cuda:
        memory.pin()
    view = _view(memory, offset, tensor.nbytes, tensor.dtype, tuple(tensor.shape))
    view.copy_(tensor, non_blocking=memory.pinned and tensor.is_cuda)


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
        dtype = DTYPES[described.dtype]
        nbytes = nbytes_of(described)
        tensors[described.name] = _view(memory, offset, nbytes, dtype, described.shape)
        offset += align(nbytes)
    return Chunk(header.request_id, header.stream, header.seq, header.last, tensors, header.meta)


def _view(
    memory: Memory, offset: int, nbytes: int, dtype: torch.dtype, shape: tuple[int, ...]
) -> torch.Tensor:
    assert offset + nbytes <= len(memory.pages), f"{nbytes} bytes at {offset} of {len(memory.pages)}"
    if nbytes == 0:
        return memory.data[:0].view(dtype).view(shape)
    count = nbytes // dtype.itemsize
    return torch.frombuffer(memory.pages, dtype=dtype, count=count, offset=offset).view(shape)
