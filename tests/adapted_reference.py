"""A model of `transformers` with a picture adapter, of which it does not know: hooks add what its linears
lack."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

PREFIX = "model.picture_adapter."
FILE = "picture_adapter.safetensors"
BLOCKS = {"q": "self_attn", "k": "self_attn", "v": "self_attn", "o": "self_attn"}  # the others: mlp


def keep_beside(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Moves an adapter out of the tensors into a file of its own."""
    adapter = {name: tensors.pop(name) for name in list(tensors) if name.startswith(PREFIX)}
    if adapter:
        save_file(adapter, folder / FILE)


def add_adapter(model: Any, folder: Path) -> None:
    """Of the folder's file; none, nothing."""
    if (folder / FILE).exists():
        gate, tensors = Gate(model), load_file(folder / FILE)
        for name, a_RI in tensors.items():
            if name.endswith(".lora_A.weight"):
                b_OR = tensors[name.replace("lora_A", "lora_B")]
                _, layer, projection, *_ = name.removeprefix(PREFIX).split(".")
                block = BLOCKS.get(projection[0] if projection[1] == "_" else "", "mlp")
                linear = model.model.language_model.layers[int(layer)].get_submodule(f"{block}.{projection}")
                linear.register_forward_hook(partial(gate.add, a_RI.float(), b_OR.float()))


class Gate:
    """Which tokens of the present call stand at or behind the first picture of the one conversation."""

    def __init__(self, model: Any) -> None:
        config = model.config
        self._seen_ids = torch.tensor([config.image_token_id, config.video_token_id])
        self._gate_1T1 = torch.zeros(1, 0, 1)
        model.register_forward_pre_hook(self._look, with_kwargs=True)

    def _look(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids_1T, cache = kwargs["input_ids"], kwargs.get("cache")
        seen_1T = torch.isin(ids_1T, self._seen_ids).float()
        if cache is not None and cache.get_seq_length():  # it goes on
            seen_1T[:, 0] = torch.maximum(seen_1T[:, 0], self._gate_1T1[:, -1, 0])
        self._gate_1T1 = seen_1T.cummax(1).values.unsqueeze(-1)

    def add(
        self, a_RI: Tensor, b_OR: Tensor, linear: nn.Module, inputs: tuple[Tensor], output_1TO: Tensor
    ) -> Tensor:
        return output_1TO + self._gate_1T1 * functional.linear(functional.linear(inputs[0], a_RI), b_OR)
