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

VisionName = Callable[[str], str | None]  # checkpoint name → ours; None: no tensor of the tower

_INDEXED = re.compile(r"(\w+)\.(\d+)\.(.+)")


def rename_vision(name: str, modules: Mapping[str, str]) -> str | None:
    """`modules` maps module paths below the tower, numbers left out: "blocks.attn.qkv" → "attention.qkv".

    A tensor nobody knows keeps its name, so that it shows as left over.
    """
    prefix = next((prefix for prefix in PREFIXES if name.startswith(prefix)), None)
    if prefix is None:
        return None
    path, _, kind = name.removeprefix(prefix).rpartition(".")
    if path in modules:
        return f"{modules[path]}.{kind}"
    match = _INDEXED.fullmatch(path)
    if match and (ours := modules.get(f"{match[1]}.{match[3]}")):
        container, _, rest = ours.partition(".")
        return f"{container}.{match[2]}.{rest}.{kind}"
    return name


def load_tower(
    checkpoint: Checkpoint,
    tower: nn.Module,
    vision_name: VisionName,
    device: torch.device,
    dtype: torch.dtype,
) -> str:
    """Fills `tower`, built on the meta device, and returns a fingerprint of the stored weights.

    Raises EngineError naming the tensor when one is missing, mis-shaped or unknown.
    """
    theirs = {ours: name for name in checkpoint.names if (ours := vision_name(name)) is not None}
    wanted = {name: tuple(tensor.shape) for name, tensor in tower.state_dict().items()}
    if missing := sorted(wanted.keys() - theirs.keys()):
        raise checkpoint_error(
            f"the checkpoint lacks {len(missing)} vision tensors: {', '.join(missing[:3])}"
        )
    if unknown := sorted(theirs[name] for name in theirs.keys() - wanted.keys()):
        raise checkpoint_error(
            f"the vision tower has no use for {len(unknown)} tensors: {', '.join(unknown[:3])}"
        )
    fingerprint = xxhash.xxh3_128()
    state: dict[str, Tensor] = {}
    for name in sorted(wanted):
        stored = _read(checkpoint, theirs[name], wanted[name])
        fingerprint.update(f"{name}|{stored.dtype}|{tuple(stored.shape)}|".encode())
        fingerprint.update(stored.contiguous().view(-1).view(torch.uint8).numpy().data)
        state[name] = stored.to(device=device, dtype=dtype)
    tower.load_state_dict(state, assign=True)
    tower.requires_grad_(False)
    return fingerprint.hexdigest()


def _read(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> Tensor:
    """A convolution whose kernel is its stride is a linear over flattened patches."""
    stored = checkpoint.shape(name)
    is_convolution = len(stored) == 5 and len(shape) == 2
    tensor = checkpoint.tensor(name, stored if is_convolution else shape)
    flat = tensor.flatten(1) if is_convolution else tensor
    if tuple(flat.shape) != shape:
        raise checkpoint_error(f"tensor {name} has shape {list(stored)}, the config needs {list(shape)}")
    return flat
