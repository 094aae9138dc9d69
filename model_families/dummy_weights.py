"""A checkpoint folder without weights: names and shapes from its configuration, values drawn when asked for.

For measuring speed, which does not depend on the values. A folder says that it wants this by holding a file
named `dummy_weights`. One that `write_table` has written stands for the headers of the weights' files, so
that a start does not build the model class of transformers, which no checkpoint with weights needs.
"""

from __future__ import annotations

import threading
from functools import lru_cache
from pathlib import Path

import msgspec
import torch
import xxhash
from torch import Tensor

from model_families.checkpoint import Checkpoint, checkpoint_error

MARK_FILE = "dummy_weights"
STANDARD_DEVIATION = 0.02
_LOCK = threading.Lock()


def open_checkpoint(folder: Path) -> Checkpoint:
    return DummyCheckpoint(folder) if (folder / MARK_FILE).exists() else Checkpoint(folder)


class DummyCheckpoint(Checkpoint):
    """Tensors are normal noise seeded by their name, norms are one; every process draws the same on the same
    device."""

    def _locate(self) -> dict[str, str]:
        with _LOCK:  # stages load in threads of one process
            self._meta = _tensors_of(self.folder)
        return dict.fromkeys(self._meta, MARK_FILE)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._of(name).shape)

    def dtype(self, name: str) -> torch.dtype:
        return self._of(name).dtype

    def tensor(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> Tensor:
        found = self.shape(name)
        if found != shape:
            raise checkpoint_error(f"tensor {name} has shape {list(found)}, config.json needs {list(shape)}")
        place = torch.device("cpu") if device is None else device
        made = torch.empty(shape, dtype=dtype or self.dtype(name), device=place)
        if made.is_meta:  # asked for its shape alone
            return made
        if "norm" in name and len(shape) == 1:
            return made.fill_(1.0) if name.endswith("weight") else made.zero_()
        generator = torch.Generator(place).manual_seed(xxhash.xxh64_intdigest(name.encode()) >> 1)
        return made.normal_(0.0, STANDARD_DEVIATION, generator=generator)

    def home(self, device: torch.device) -> torch.device:
        return device

    def part(self, name: str, index: int, device: torch.device | None = None) -> Tensor:
        shape, dtype = self.shape(name)[1:], self.dtype(name)
        place = torch.device("cpu") if device is None else device
        generator = torch.Generator(place).manual_seed(
            xxhash.xxh64_intdigest(f"{name}[{index}]".encode()) >> 1
        )
        made = torch.empty(shape, dtype=dtype, device=place)
        return made.normal_(0.0, STANDARD_DEVIATION, generator=generator)

    def _of(self, name: str) -> Tensor:
        if name not in self._meta:
            raise checkpoint_error(f"checkpoint {self.folder.name} lacks the tensor {name}")
        return self._meta[name]


class _Header(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]


def write_table(folder: Path) -> None:
    """Marks the folder, with a table of its model's tensors. Takes seconds."""
    tensors = _build(folder)
    table = {
        name: _Header(str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in tensors.items()
    }
    (folder / MARK_FILE).write_bytes(msgspec.json.encode(table))


@lru_cache(maxsize=4)
def _tensors_of(folder: Path) -> dict[str, Tensor]:
    table = (folder / MARK_FILE).read_bytes()
    if not table:
        return _build(folder)
    headers = msgspec.json.decode(table, type=dict[str, _Header])
    return {
        name: torch.empty(header.shape, dtype=getattr(torch, header.dtype), device="meta")
        for name, header in headers.items()
    }


def _build(folder: Path) -> dict[str, Tensor]:
    """Every tensor of the folder's model, without values; seconds for a large one."""
    import transformers  # only here: a server with weights needs no model class of it

    config = transformers.AutoConfig.from_pretrained(folder)
    architectures = config.architectures or [""]
    model_class = getattr(transformers, architectures[0], None)
    if not isinstance(model_class, type) or not issubclass(model_class, transformers.PreTrainedModel):
        raise checkpoint_error(f"transformers has no architecture {architectures[0]!r}")
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(config.dtype or torch.bfloat16)
    try:
        with torch.device("meta"):
            model = model_class(config)
    finally:
        torch.set_default_dtype(dtype)
    tensors: dict[str, Tensor] = dict(model.state_dict())
    head = model.get_output_embeddings()
    if head is not None and head.weight is model.get_input_embeddings().weight:
        tensors.pop("lm_head.weight", None)  # tied: a checkpoint holds it once
    return tensors
