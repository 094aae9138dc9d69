"""Reads a Whisper model in CTranslate2's binary form (as faster-whisper publishes them): tensors by name.

u32 version, name, u32 revision, u32 count; per variable: name, u8 rank, u32 dimensions, u8 type,
u32 bytes, data; then u32 count of aliases: two names each. A name is u16 length (with its end), bytes, a
zero.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

BINARY_VERSION = 6
SPECIFICATION = "WhisperSpec"
_DTYPES: dict[int, np.dtype[Any]] = {0: np.dtype("<f4"), 4: np.dtype("<f2")}
_MAX_RANK = 4


class UnknownFormat(Exception):
    """The file is not what this reader knows; the message says what it found."""


def read_model(path: Path) -> dict[str, Tensor]:
    """Floating-point variables and their aliases, in their stored precision. Raises UnknownFormat."""
    reader = _Reader(path.read_bytes())
    version = reader.number("<I")
    if version != BINARY_VERSION:
        raise UnknownFormat(f"{path} is of binary version {version}, not {BINARY_VERSION}")
    specification = reader.name()
    if specification != SPECIFICATION:
        raise UnknownFormat(f"{path} holds a {specification}, not a {SPECIFICATION}")
    reader.number("<I")  # its revision
    tensors: dict[str, Tensor] = {}
    for _ in range(reader.number("<I")):
        name, tensor = reader.variable()
        if tensor is not None:
            tensors[name] = tensor
    for _ in range(reader.number("<I")):
        alias, target = reader.name(), reader.name()
        if target in tensors:
            tensors[alias] = tensors[target]
    return tensors


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._offset = 0

    def number(self, layout: str) -> int:
        (value,) = struct.unpack(layout, self._take(struct.calcsize(layout)))
        assert isinstance(value, int)
        return value

    def name(self) -> str:
        return self._take(self.number("<H")).rstrip(b"\0").decode()

    def variable(self) -> tuple[str, Tensor | None]:
        """None for scalars of the configuration and other integers."""
        name, rank = self.name(), self.number("<B")
        if rank > _MAX_RANK:
            raise UnknownFormat(f"variable {name!r} has {rank} dimensions")
        shape = [self.number("<I") for _ in range(rank)]
        kind, size = self.number("<B"), self.number("<I")
        data = self._take(size)
        if kind not in _DTYPES:
            if rank > 1:
                raise UnknownFormat(f"variable {name!r} is quantised; take a float16 or float32 model")
            return name, None
        array = np.frombuffer(data, _DTYPES[kind])
        if array.size != int(np.prod(shape, dtype=np.int64)):
            raise UnknownFormat(f"variable {name!r} has {array.size} elements, its shape is {shape}")
        return name, torch.from_numpy(array.reshape(shape).copy())

    def _take(self, size: int) -> bytes:
        end = self._offset + size
        if end > len(self._data):
            raise UnknownFormat("the file ends early")
        data, self._offset = self._data[self._offset : end], end
        return data
