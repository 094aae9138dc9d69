"""Feeds a checkpoint's text tensors to the decoder under our names, and sees that none is left over."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from lm_engine.decoder import Decoder
from lm_engine.layers.selection import select_kernels
from lm_engine.model import DecoderConfig
from lm_engine.model import Kernels as KernelChoice
from model_families.checkpoint import Checkpoint, checkpoint_error

TextName = Callable[[str], str | None]  # checkpoint name → ours; None: no tensor of the text half

_LAYER = re.compile(r"layers\.(\d+)\.(.+)\.(weight|bias)")
_IN_LAYER: Mapping[str, str] = {
    "input_layernorm": "input_norm",
    "self_attn.q_proj": "q",
    "self_attn.k_proj": "k",
    "self_attn.v_proj": "v",
    "self_attn.o_proj": "o",
    "self_attn.q_norm": "q_norm",
    "self_attn.k_norm": "k_norm",
    "post_attention_layernorm": "post_norm",
    "mlp.gate_proj": "gate",
    "mlp.up_proj": "up",
    "mlp.down_proj": "down",
}


def rename_text(name: str, prefixes: tuple[str, ...]) -> str | None:
    """Our name of a tensor that lies under one of `prefixes`. Buffers that we compute ourselves are None;
    a tensor nobody knows keeps its name, so that it shows as left over."""
    prefix = next((prefix for prefix in prefixes if name.startswith(prefix)), None)
    if prefix is None:
        return name if name == "lm_head.weight" else None
    rest = name.removeprefix(prefix)
    if rest.endswith("rotary_emb.inv_freq"):
        return None
    if rest in ("embed_tokens.weight", "norm.weight"):
        return rest.replace("embed_tokens", "embed")
    if (match := _LAYER.fullmatch(rest)) and match[2] in _IN_LAYER:
        return f"layers.{match[1]}.{_IN_LAYER[match[2]]}.{match[3]}"
    return name


def published_name(name: str) -> str:
    """The usual checkpoint name of our `name`, for errors; without the family's prefix."""
    if match := _LAYER.fullmatch(name):
        theirs = next(theirs for theirs, ours in _IN_LAYER.items() if ours == match[2])
        return f"layers.{match[1]}.{theirs}.{match[3]}"
    return name.replace("embed.", "embed_tokens.")


class TextTensors:
    """The text half of a checkpoint as a WeightSource."""

    def __init__(
        self, checkpoint: Checkpoint, text_name: TextName, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.device = device
        self.dtype = dtype
        self._checkpoint = checkpoint
        self._theirs: dict[str, str] = {}
        for name in checkpoint.names:
            ours = text_name(name)
            if ours is None:
                continue
            if ours in self._theirs:
                raise checkpoint_error(f"tensors {self._theirs[ours]} and {name} are both {ours}")
            self._theirs[ours] = name
        self._untaken = set(self._theirs)

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name not in self._theirs:
            folder = self._checkpoint.folder.name
            raise checkpoint_error(f"checkpoint {folder} lacks the text tensor {published_name(name)}")
        self._untaken.discard(name)
        theirs = self._theirs[name]
        return self._checkpoint.tensor(theirs, shape, dtype=self.dtype, device=self.device)

    def check_all_taken(self, *, allowed: tuple[str, ...] = ()) -> None:
        left = sorted(self._theirs[name] for name in self._untaken.difference(allowed))
        if left:
            raise checkpoint_error(f"the decoder has no use for {len(left)} tensors: {', '.join(left[:3])}")


def load_decoder(
    checkpoint: Checkpoint,
    config: DecoderConfig,
    text_name: TextName,
    *,
    device: torch.device,
    dtype: torch.dtype,
    kernels: KernelChoice,
) -> Decoder:
    """Raises EngineError naming the tensor when one is missing, mis-shaped or unknown."""
    tensors = TextTensors(checkpoint, text_name, device, dtype)
    decoder = Decoder(config, tensors, select_kernels(kernels, device, dtype))
    # A tied head is often stored as well.
    tensors.check_all_taken(allowed=("lm_head.weight",) if config.tie_embeddings else ())
    return decoder
