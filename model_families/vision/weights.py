"""Loads a tower from a checkpoint under our names, and fingerprints the weights."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import torch
import xxhash
from torch import Tensor, nn

from model_families.checkpoint import Checkpoint, checkpoint_error

# As transformers 5 names them, then as the published checkpoints do.
PREFIXES = ("model.visual.", "visual.")

# Checkpoint name → ours; None: no tensor of the tower. A part of ours ends in "@" and its place: the parts
# are
# stacked along their outputs.
TensorName = Callable[[str], str | None]
VisionName = TensorName

_INDEXED = re.compile(r"(\w+)\.(\d+)\.(.+)")


def rename_vision(name: str, modules: Mapping[str, str]) -> str | None:
    return rename_tower(name, modules, PREFIXES)


def rename_tower(name: str, modules: Mapping[str, str], prefixes: tuple[str, ...]) -> str | None:
    """`modules` maps module paths below the tower, numbers left out: "blocks.attn.qkv" → "attention.qkv".

    "blocks.attn.k": "blocks.attention.qkv@1" makes it the second part of one tensor. A tensor nobody knows
    keeps its name, so that it shows as left over.
    """
    prefix = next((prefix for prefix in prefixes if name.startswith(prefix)), None)
    if prefix is None:
        return None
    path, _, kind = name.removeprefix(prefix).rpartition(".")
    if path in modules:
        return _with_kind(modules[path], kind)
    match = _INDEXED.fullmatch(path)
    if match and (ours := modules.get(f"{match[1]}.{match[3]}")):
        container, _, rest = ours.partition(".")
        return _with_kind(f"{container}.{match[2]}.{rest}", kind)
    return name


def _with_kind(module: str, kind: str) -> str:
    path, at, place = module.partition("@")
    return f"{path}.{kind}{at}{place}"


def load_tower(
    checkpoint: Checkpoint,
    tower: nn.Module,
    name_of: TensorName,
    device: torch.device,
    dtype: torch.dtype,
) -> str:
    """Fills `tower`, built on the meta device, and returns a fingerprint of the stored weights.

    Raises EngineError naming the tensor when one is missing, mis-shaped or unknown.
    """
    theirs: dict[str, dict[str, str]] = {}  # ours → place → theirs
    for name in checkpoint.names:
        if (ours := name_of(name)) is not None:
            path, _, place = ours.partition("@")
            theirs.setdefault(path, {})[place] = name
    wanted = {name: tuple(tensor.shape) for name, tensor in tower.state_dict().items()}
    if missing := sorted(wanted.keys() - theirs.keys()):
        raise checkpoint_error(
            f"the tower that config.json describes (depth, encoder_layers, ...) wants {len(missing)}"
            f" tensors that the checkpoint lacks: {', '.join(missing[:3])}"
        )
    if unknown := sorted(n for ours in theirs.keys() - wanted.keys() for n in theirs[ours].values()):
        raise checkpoint_error(
            f"the tower that config.json describes (depth, encoder_layers, ...) has no use for"
            f" {len(unknown)} tensors: {', '.join(unknown[:3])}"
        )
    fingerprint = xxhash.xxh3_128()
    state: dict[str, Tensor] = {}
    for name in sorted(wanted):
        parts = [theirs[name][place] for place in sorted(theirs[name])]
        stored = _read(checkpoint, parts, wanted[name], device)
        fingerprint.update(f"{name}|{stored.dtype}|{tuple(stored.shape)}|".encode())
        fingerprint.update(stored.contiguous().view(-1).view(torch.uint8).cpu().numpy().data)
        state[name] = stored.to(device=device, dtype=dtype)
    tower.load_state_dict(state, assign=True)
    tower.requires_grad_(False)
    return fingerprint.hexdigest()


def _read(checkpoint: Checkpoint, names: list[str], shape: tuple[int, ...], device: torch.device) -> Tensor:
    """The parts stacked. A convolution whose kernel is its stride is a linear over flattened patches."""
    home = checkpoint.home(device)
    parts = [checkpoint.tensor(name, checkpoint.shape(name), device=home) for name in names]
    tensor = parts[0] if len(parts) == 1 else torch.cat(parts)
    flat = tensor.flatten(1) if tensor.dim() == 5 and len(shape) == 2 else tensor
    if tuple(flat.shape) != shape:
        found = list(tensor.shape)
        raise checkpoint_error(f"tensor {names[0]} has shape {found}, config.json needs {list(shape)}")
    return flat
