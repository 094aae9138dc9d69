"""Reads a checkpoint folder: config.json as plain data and safetensors by name, memory-mapped, never
pickled."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Protocol, Self, TypeVar, cast

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from contracts.errors import EngineError

T = TypeVar("T")

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
CONFIG_FILE = "config.json"
COMBINED_PROCESSORS_FILE = "processor_config.json"

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class _TensorSlice(Protocol):
    def get_shape(self) -> list[int]: ...

    def get_dtype(self) -> str: ...

    def __getitem__(self, index: int) -> Tensor: ...


class _TensorFile(Protocol):
    """What safetensors' `safe_open` gives, which it does not type."""

    def keys(self) -> list[str]: ...

    def get_slice(self, name: str) -> _TensorSlice: ...

    def get_tensor(self, name: str) -> Tensor: ...


class _ShardIndex(msgspec.Struct):
    weight_map: dict[str, str]


def checkpoint_error(message: str) -> EngineError:
    return EngineError(message, code="bad_checkpoint")


def read_config(folder: Path, kind: type[T]) -> T:
    """config.json decoded into a msgspec struct; fields that it does not name are ignored."""
    return read_json(folder / CONFIG_FILE, kind)


class Checkpoint:
    """An opened folder. Tensors read on the CPU in their stored dtype are views of the mapped file, which
    must stay unchanged while they live; all others are copies. Close it when loading is done (views stay
    valid)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, _TensorFile] = {}
        self._file_of = self._locate()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._files.clear()
        self._file_of.clear()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._file_of)

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file(name).get_slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """As stored. Raises EngineError for one that no model here uses."""
        stored = self._file(name).get_slice(name).get_dtype()
        if stored not in _DTYPES:
            known = ", ".join(_DTYPES)
            raise checkpoint_error(f"tensor {name} is stored as {stored}; supported: {known}")
        return _DTYPES[stored]

    def tensor(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> Tensor:
        """The tensor `name`, cast to `dtype` on `device`. Raises EngineError when it is absent or shaped
        otherwise."""
        found = self.shape(name)
        if found != shape:
            raise checkpoint_error(f"tensor {name} has shape {list(found)}, config.json needs {list(shape)}")
        return self._file(name).get_tensor(name).to(device=device, dtype=dtype)

    def home(self, device: torch.device) -> torch.device:
        """Where tensors wanted on `device` are read without a copy."""
        return torch.device("cpu")

    def part(self, name: str, index: int, device: torch.device | None = None) -> Tensor:
        """`name`[index] on `device`, as stored; the rest of it is not read."""
        assert 0 <= index < self.shape(name)[0]
        part: Tensor = self._file(name).get_slice(name)[index]
        return part.to(device=device)

    def _locate(self) -> dict[str, str]:
        """Maps every tensor to its file and opens every file once, so that a missing shard shows at once."""
        index = self.folder / INDEX_FILE
        if index.exists():
            file_of = read_json(index, _ShardIndex).weight_map
        elif (self.folder / SINGLE_FILE).exists():
            file_of = dict.fromkeys(self._open(SINGLE_FILE).keys(), SINGLE_FILE)
        else:
            raise checkpoint_error(f"{self.folder} has neither {SINGLE_FILE} nor {INDEX_FILE}")
        held = {file: set(self._open(file).keys()) for file in sorted(set(file_of.values()))}
        for name, file in file_of.items():
            if name not in held[file]:
                raise checkpoint_error(f"{INDEX_FILE} places tensor {name} in {file}, which does not hold it")
        return file_of

    def _open(self, file: str) -> _TensorFile:
        if file not in self._files:
            path = self.folder / file
            if path.parent != self.folder or not path.exists():
                raise checkpoint_error(f"{self.folder} lacks the weight file {file}")
            try:
                self._files[file] = cast(_TensorFile, safe_open(str(path), framework="pt"))
            except SafetensorError as error:
                raise checkpoint_error(f"{path} is no readable safetensors file: {error}") from error
        return self._files[file]

    def _file(self, name: str) -> _TensorFile:
        if name not in self._file_of:
            raise checkpoint_error(f"checkpoint {self.folder.name} lacks the tensor {name}")
        return self._files[self._file_of[name]]


def read_json(path: Path, kind: type[T]) -> T:
    if not path.exists():
        raise checkpoint_error(f"{path.parent} has no {path.name}")
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except msgspec.DecodeError as error:
        raise checkpoint_error(f"{path}: {error}") from error


def read_processor_config(folder: Path, file: str, section: str, kind: type[T]) -> T | None:
    """A processor's own `file`, else its `section` of the file that newer checkpoints combine all in. None:
    the
    folder has neither."""
    if (folder / file).exists():
        return read_json(folder / file, kind)
    if not (folder / COMBINED_PROCESSORS_FILE).exists():
        return None
    found = read_json(folder / COMBINED_PROCESSORS_FILE, dict[str, msgspec.Raw]).get(section)
    if found is None or bytes(found) == b"null":
        return None
    try:
        return msgspec.json.decode(found, type=kind)
    except msgspec.DecodeError as error:
        raise checkpoint_error(f"{folder / COMBINED_PROCESSORS_FILE}: {section}: {error}") from error
