"""Weights of ours in the repository: matrices as int8 rows with a scale each, the rest in bfloat16; lists of
words beside them, packed."""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

WEIGHTS = Path(__file__).parent / "weights"
# The vision tower, without `model.` or `thinker.` before its names, and `adapter.`: low-rank weights of the
# language model for what stands behind a picture, where there are any.
SEEING = WEIGHTS / "seeing.safetensors"
HEARING = WEIGHTS / "hearing.safetensors"  # what of the ears is not Whisper's, likewise
SPEAKING = WEIGHTS / "speaking.safetensors"  # talker and decoder of sound, under their checkpoint's names
EVALUATION = WEIGHTS / "evaluation.json"  # how good they are: written by hand of what the recipes measured
PACKED = ".gz"  # behind the name that a file has in the checkpoint
SCALE = ".scale"
ONE_POSITION_PER_TOKEN = "one_position_per_token"  # marks a tower whose tokens are read like text


def shipped_name() -> str:
    """The default model's own, or that of the one which is blind, deaf and dumb."""
    trained = any(path.exists() for path in (SEEING, HEARING, SPEAKING))
    return "omnistage-nano" if trained else "omnistage-default"


def write_shipped(path: Path, tensors: Mapping[str, Tensor], marks: Mapping[str, str] | None = None) -> None:
    """`marks`: strings that stand in the file's header."""
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        value = tensor.detach().float().cpu()
        if value.ndim < 2:
            stored[name] = value.bfloat16()
            continue
        rows = value.flatten(1)
        scale = (rows.abs().amax(1) / 127).clamp(min=1e-12).bfloat16()
        stored[name] = (
            (rows / scale.float()[:, None]).round().clamp(-127, 127).to(torch.int8).view(value.shape)
        )
        stored[name + SCALE] = scale
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(stored, path, metadata=dict(marks or {}))


def has_mark(path: Path, name: str) -> bool:
    with safe_open(path, framework="pt") as stored:
        return name in (stored.metadata() or {})


def read_shipped(path: Path) -> dict[str, Tensor]:
    """float32."""
    stored = load_file(path)
    tensors: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        if tensor.dtype == torch.int8:
            scale = stored[name + SCALE].float().view(-1, *(1,) * (tensor.ndim - 1))
            tensors[name] = tensor.float() * scale
        elif not (name.endswith(SCALE) and name.removesuffix(SCALE) in stored):
            tensors[name] = tensor.float()
    return tensors


def write_packed(path: Path, lines: Iterable[str]) -> None:
    """ASCII; the same lines make the same bytes."""
    text = "".join(f"{line}\n" for line in lines)
    path.write_bytes(gzip.compress(text.encode("ascii"), 9, mtime=0))


def read_packed(path: Path) -> str:
    return gzip.decompress(path.read_bytes()).decode("ascii")
