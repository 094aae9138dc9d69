"""`python -m training.seeing.export RUN`: a run's tower and adapter become the weights that the
repository ships."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import torch
from torch import Tensor

from model_families.default_model.adapter import join_adapter
from model_families.default_model.shipped import ONE_POSITION_PER_TOKEN, SEEING, write_shipped
from training.seeing.checkpoints import read_trained
from training.seeing.tower import CONFIG

PREFIX = "tower.tower."
ADAPTER = re.compile(r"decoder\.layers\.(\d+)\.adapter\.(\w+)\.([ab])")
# Our module paths → the checkpoint's, numbers left as they are.
NAMES = (
    ("patch_embed.", "patch_embed.proj."),
    (".attention.qkv.", ".attn.qkv."),
    (".attention.out.", ".attn.proj."),
    (".mlp.gate.", ".mlp.gate_proj."),
    (".mlp.up.", ".mlp.up_proj."),
    (".mlp.down.", ".mlp.down_proj."),
    ("merger.norm.", "merger.ln_q."),
    ("merger.fc1.", "merger.mlp.0."),
    ("merger.fc2.", "merger.mlp.2."),
)


def tower_tensors(trained: dict[str, Tensor]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name, tensor in trained.items():
        if not name.startswith(PREFIX):
            continue
        theirs = name.removeprefix(PREFIX)
        for ours, stored in NAMES:
            theirs = theirs.replace(ours, stored)
        if theirs == "patch_embed.proj.weight":
            shape = (
                len(tensor),
                CONFIG.in_channels,
                CONFIG.temporal_patch_size,
                CONFIG.patch_size,
                CONFIG.patch_size,
            )
            tensor = tensor.view(shape)
        tensors[f"visual.{theirs}"] = tensor
    return tensors


def adapter_tensors(trained: dict[str, Tensor]) -> dict[str, Tensor]:
    """Under the names that `join_adapter` takes; nothing of a run that had no adapter."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in trained.items():
        if found := ADAPTER.fullmatch(name):
            layer, projection, kind = found.groups()
            tensors[f"layers.{layer}.{projection}.lora_{kind.upper()}.weight"] = tensor
    return tensors


def shipped_tensors(trained: dict[str, Tensor]) -> dict[str, Tensor]:
    adapter = adapter_tensors(trained)
    layers = 1 + max((int(name.split(".")[1]) for name in adapter), default=0)
    return tower_tensors(trained) | join_adapter(adapter, layers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--to", type=Path, default=SEEING)
    arguments = parser.parse_args()
    with torch.no_grad():
        tensors = shipped_tensors(read_trained(arguments.run))
        write_shipped(arguments.to, tensors, {ONE_POSITION_PER_TOKEN: "yes"})
    print(f"{arguments.to}: {arguments.to.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
