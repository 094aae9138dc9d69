"""config.json of an omni checkpoint: whole, with its thinker inside, or of the thinker alone."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

from model_families.checkpoint import CONFIG_FILE, checkpoint_error, read_config

T = TypeVar("T")


class _Whole(msgspec.Struct, frozen=True):
    thinker_config: msgspec.Raw = msgspec.Raw(b"")


def read_thinker_config(folder: Path, kind: type[T]) -> T:
    """The thinker's part decoded into a msgspec struct; fields that it does not name are ignored."""
    inner = bytes(read_config(folder, _Whole).thinker_config)
    if not inner:
        return read_config(folder, kind)
    try:
        return msgspec.json.decode(inner, type=kind)
    except msgspec.DecodeError as error:
        raise checkpoint_error(f"{folder / CONFIG_FILE}: thinker_config: {error}") from error
