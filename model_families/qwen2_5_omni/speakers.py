"""Qwen2.5-Omni's voices: what the talker and the vocoder must know of each, from the checkpoint's own
file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from zipfile import is_zipfile

import torch
from torch import Tensor

from model_families.checkpoint import checkpoint_error

SPEAKER_FILE = "spk_dict.pt"


@dataclass(frozen=True)
class Speaker:
    bos_token: int  # text token that opens its speech
    condition_1E: Tensor  # speaker embedding
    reference_1TM: Tensor  # mel of its reference sound


def read_speakers(folder: Path) -> dict[str, Speaker]:
    """By name, in the file's order. Raises EngineError for a file that is absent or holds anything else.

    torch's own format, read as tensors and numbers only: nothing of the file is run.
    """
    path = folder / SPEAKER_FILE
    if not path.exists():
        raise checkpoint_error(f"{folder} has no {SPEAKER_FILE}")
    if not is_zipfile(path):
        raise checkpoint_error(f"{path} does not hold voices: it is no archive of tensors")
    try:
        stored = torch.load(path, map_location="cpu", weights_only=True)
        return {
            str(name): Speaker(int(entry["bos_token"]), entry["cond"].float(), entry["ref_mel"].float())
            for name, entry in stored.items()
        }
    except (RuntimeError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise checkpoint_error(f"{path} does not hold voices: {error}") from error
