"""Fills a module built on the meta device from a checkpoint, under our names."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from model_families.checkpoint import Checkpoint, checkpoint_error

Rename = Callable[[str], str | None]  # checkpoint name → ours; None: no tensor of this module
Convert = Callable[[str, Tensor], Tensor]  # our name and the stored tensor → what the module holds


def keep(name: str, stored: Tensor) -> Tensor:
    return stored


def fill_module(
    checkpoint: Checkpoint,
    module: nn.Module,
    rename: Rename,
    *,
    part: str,
    device: torch.device,
    dtype: torch.dtype,
    convert: Convert = keep,
) -> None:
    """`part` names the module in errors. Raises EngineError naming the tensor when one is missing,
    mis-shaped or
    unknown."""
    theirs = {ours: name for name in checkpoint.names if (ours := rename(name)) is not None}
    wanted = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    if missing := sorted(wanted.keys() - theirs.keys()):
        raise checkpoint_error(
            f"the {part} that config.json describes (num_hidden_layers, ...) wants {len(missing)}"
            f" tensors that the checkpoint lacks: {', '.join(missing[:3])}"
        )
    if unknown := sorted(theirs[name] for name in theirs.keys() - wanted.keys()):
        raise checkpoint_error(
            f"the {part} that config.json describes (num_hidden_layers, ...) has no use for"
            f" {len(unknown)} tensors: {', '.join(unknown[:3])}"
        )
    state: dict[str, Tensor] = {}
    for name, shape in wanted.items():
        stored = checkpoint.tensor(theirs[name], checkpoint.shape(theirs[name]), device=device)
        tensor = convert(name, stored)
        if tuple(tensor.shape) != shape:
            found = list(stored.shape)
            raise checkpoint_error(
                f"tensor {theirs[name]} has shape {found}, config.json needs {list(shape)}"
            )
        state[name] = tensor.to(device=device, dtype=dtype)
    module.load_state_dict(state, assign=True)
    module.requires_grad_(False)
