"""What a run leaves and takes up again: trained tensors in float16, in files of a bounded size."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

MAX_FILE_BYTES = 14 << 20
STATE_FILE = "state.json"
SCHEME = 1  # 0: colour and shape by turns over a thing; 1: phrases in reading order


@dataclass(frozen=True)
class Progress:
    steps: int = 0
    seconds: float = 0.0
    pictures: int = 0
    scheme: int = 0  # what its tokens were taught to say


def save(model: nn.Module, progress: Progress, folder: Path) -> None:
    """Each file is replaced whole; the state file is the last."""
    folder.mkdir(parents=True, exist_ok=True)
    for index, shard in enumerate(_shards(model)):
        target = folder / f"trained-{index}.safetensors"
        scratch = target.with_suffix(".part")
        save_file(shard, scratch)
        scratch.rename(target)
    (folder / STATE_FILE).write_text(json.dumps(asdict(progress)) + "\n")


def _shards(model: nn.Module) -> list[dict[str, Tensor]]:
    shards: list[dict[str, Tensor]] = [{}]
    used = 0
    for name, parameter in sorted(model.named_parameters()):
        tensor = parameter.detach().to(device="cpu", dtype=torch.float16).contiguous()
        if used + tensor.nbytes > MAX_FILE_BYTES:
            shards.append({})
            used = 0
        shards[-1][name] = tensor
        used += tensor.nbytes
    return shards


def read_trained(folder: Path) -> dict[str, Tensor]:
    """Every trained tensor of a run, float32."""
    files = sorted(folder.glob("trained-*.safetensors"))
    if not files:
        raise SystemExit(f"{folder} holds no trained tensors")
    return {name: tensor.float() for file in files for name, tensor in load_file(file).items()}


@torch.no_grad()
def restore(model: nn.Module, folder: Path) -> Progress:
    """Takes up what the folder has: adapters that it lacks stay as they are."""
    parameters = dict(model.named_parameters())
    for name, tensor in read_trained(folder).items():
        parameters[name].copy_(tensor)
    return Progress(**json.loads((folder / STATE_FILE).read_text()))
