"""Feeds a checkpoint's text tensors to the decoder under our names, and sees that none is left over."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from lm_engine.decoder import Decoder
from lm_engine.gpu_target import stands_for_gpu
from lm_engine.layers.selection import select_kernels
from lm_engine.model import DecoderConfig
from lm_engine.model import Kernels as KernelChoice
from lm_engine.parallel import ShardedWeights, TensorParallel, shard_config
from model_families.checkpoint import Checkpoint, checkpoint_error

# What of config.json decides a tensor's shape, by the last part of our name.
_FIELDS: Mapping[str, str] = {
    "embed": "vocab_size, hidden_size",
    "lm_head": "vocab_size, hidden_size",
    "q": "num_attention_heads, head_dim, hidden_size",
    "k": "num_key_value_heads, head_dim, hidden_size",
    "v": "num_key_value_heads, head_dim, hidden_size",
    "o": "hidden_size, num_attention_heads, head_dim",
    "q_norm": "head_dim",
    "k_norm": "head_dim",
    "gate": "intermediate_size, hidden_size",
    "up": "intermediate_size, hidden_size",
    "down": "hidden_size, intermediate_size",
    "router": "num_experts, hidden_size",
}
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
    "mlp.gate": "router",
    "mlp.shared_expert.gate_proj": "shared.gate",
    "mlp.shared_expert.up_proj": "shared.up",
    "mlp.shared_expert.down_proj": "shared.down",
    "mlp.shared_expert_gate": "shared_gate",
}
_EXPERT = re.compile(r"layers\.(\d+)\.mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight")
# Some checkpoints stack a layer's experts: [expert, input, gate's outputs then up's], [expert, input,
# output].
_STACK = re.compile(r"layers\.(\d+)\.mlp\.experts\.(gate_up|down)_proj")
# Of a picture adapter.
_LOW_RANK = re.compile(r"picture_adapter\.layers\.(\d+)\.(q|k|v|o|gate|up|down)_proj\.lora_([AB])\.weight")
_OUR_LOW_RANK = re.compile(r"layers\.(\d+)\.(\w+)\.lora_([ab])")
_OUR_EXPERT = re.compile(r"layers\.(\d+)\.experts\.(\d+)\.(gate|up|down)\.weight")


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
    if match := _EXPERT.fullmatch(rest):
        return f"layers.{match[1]}.experts.{match[2]}.{match[3]}.weight"
    if match := _STACK.fullmatch(rest):
        return f"layers.{match[1]}.experts.{match[2]}"
    if match := _LOW_RANK.fullmatch(rest):
        return f"layers.{match[1]}.{match[2]}.lora_{match[3].lower()}"
    return name


def published_name(name: str) -> str:
    """The usual checkpoint name of our `name`, for errors; without the family's prefix."""
    if match := _OUR_EXPERT.fullmatch(name):
        return f"layers.{match[1]}.mlp.experts.{match[2]}.{match[3]}_proj.weight"
    if match := _OUR_LOW_RANK.fullmatch(name):
        return f"picture_adapter.layers.{match[1]}.{match[2]}_proj.lora_{match[3].upper()}.weight"
    if match := _LAYER.fullmatch(name):
        theirs = next(theirs for theirs, ours in _IN_LAYER.items() if ours == match[2])
        return f"layers.{match[1]}.{theirs}.{match[3]}"
    return name.replace("embed.", "embed_tokens.")


def _asked_by(name: str) -> str:
    """The field of config.json for which our `name` is looked for."""
    if _OUR_LOW_RANK.fullmatch(name):
        return "picture_adapter"
    return "num_hidden_layers" if name.startswith("layers.") else "tie_word_embeddings"


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
            if (expert_OI := self._take_stacked(name, shape)) is not None:
                return expert_OI
            folder = self._checkpoint.folder.name
            raise checkpoint_error(
                f"checkpoint {folder} lacks the text tensor {published_name(name)}, asked for by config.json"
                f" ({_asked_by(name)})"
            )
        self._untaken.discard(name)
        theirs = self._theirs[name]
        found = self._checkpoint.shape(theirs)
        if found != shape:
            fields = _FIELDS.get(name.split(".")[-2], "hidden_size")
            if _OUR_LOW_RANK.fullmatch(name):
                fields = f"picture_adapter, {fields}"
            raise checkpoint_error(
                f"tensor {theirs} has shape {list(found)}, config.json needs {list(shape)} ({fields})"
            )
        return self._checkpoint.tensor(theirs, shape, dtype=self.dtype, device=self.device)

    def _take_stacked(self, name: str, shape: tuple[int, ...]) -> Tensor | None:
        """One expert's weight out of a stack; None when there is no such stack."""
        match = _OUR_EXPERT.fullmatch(name)
        if match is None:
            return None
        stack = f"layers.{match[1]}.experts.{'down' if match[3] == 'down' else 'gate_up'}"
        if stack not in self._theirs:
            return None
        self._untaken.discard(stack)
        if self.device.type == "meta":  # shapes are checked, nothing is read
            return torch.empty(shape, device="meta", dtype=self.dtype)
        outputs, inputs = shape
        width = outputs if match[3] == "down" else 2 * outputs
        weight_OI = self._part(self._theirs[stack], int(match[2]), (width, inputs))
        first = outputs if match[3] == "up" else 0
        return weight_OI[first : first + outputs].to(device=self.device, dtype=self.dtype).contiguous()

    def _part(self, name: str, index: int, shape: tuple[int, int]) -> Tensor:
        """An expert out of a stack, outputs first: published checkpoints have the inputs first."""
        found = self._checkpoint.shape(name)
        if len(found) != 3 or index >= found[0] or found[1:] not in (shape, shape[::-1]):
            raise checkpoint_error(
                f"tensor {name} has shape {list(found)}, config.json needs {index + 1} or more of"
                f" {list(shape)}"
            )
        part = self._checkpoint.part(name, index, self.device)
        return part if found[1:] == shape else part.t()

    def check_all_taken(self, *, allowed: tuple[str, ...] = ()) -> None:
        if stands_for_gpu(self.device):
            return
        left = sorted(self._theirs[name] for name in self._untaken.difference(allowed))
        if left:
            raise checkpoint_error(
                f"the decoder that config.json describes (num_hidden_layers, attention_bias, ...)"
                f" has no use for {len(left)} tensors: {', '.join(left[:3])}"
            )


def check_decoder(checkpoint: Checkpoint, config: DecoderConfig, text_name: TextName) -> None:
    """Builds the decoder without reading a weight. Raises EngineError, naming the tensor that does not
    fit."""
    load_decoder(
        checkpoint, config, text_name, device=torch.device("meta"), dtype=torch.bfloat16, kernels="reference"
    )


def load_decoder(
    checkpoint: Checkpoint,
    config: DecoderConfig,
    text_name: TextName,
    *,
    device: torch.device,
    dtype: torch.dtype,
    kernels: KernelChoice,
    parallel: TensorParallel | None = None,
) -> Decoder:
    """Raises EngineError naming the tensor when one is missing, mis-shaped or unknown."""
    tensors = TextTensors(checkpoint, text_name, device, dtype)
    chosen = select_kernels(kernels, device, dtype)
    if parallel is None:
        decoder = Decoder(config, tensors, chosen)
    else:
        share = shard_config(config, parallel.size)
        weights = ShardedWeights(tensors, config, parallel.rank, parallel.size)
        decoder = Decoder(share, weights, chosen, parallel)
    # A tied head is often stored as well.
    tensors.check_all_taken(allowed=("lm_head.weight",) if config.tie_embeddings else ())
    return decoder
