"""The language model as training runs it: rows of one length, causal, weights frozen; optionally adapted.

An adapted matrix is W + B·A of low rank; `merged` gives the plain matrices that the server then uses.
B rows, L tokens, D width, P rotated pairs of a head.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

PREFIXES = ("model.language_model.", "model.")  # as transformers 5 names them, then as checkpoints do
OTHERS = ("model.visual.", "visual.")


@dataclass(frozen=True)
class DecoderShape:
    width: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    eps: float
    theta: float
    sections: tuple[int, int, int]

    @property
    def head_dim(self) -> int:
        return self.width // self.heads


def read_shape(checkpoint: Path) -> DecoderShape:
    text = json.loads((checkpoint / "config.json").read_text())["text_config"]
    rope = text["rope_parameters"]
    return DecoderShape(
        width=text["hidden_size"],
        inner=text["intermediate_size"],
        layers=text["num_hidden_layers"],
        heads=text["num_attention_heads"],
        kv_heads=text["num_key_value_heads"],
        eps=text["rms_norm_eps"],
        theta=rope["rope_theta"],
        sections=tuple(rope["mrope_section"]),
    )


def read_decoder(checkpoint: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    stored: dict[str, Tensor] = {}
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        if not name.startswith(OTHERS):
            prefix = next(prefix for prefix in PREFIXES if name.startswith(prefix))
            stored[name.removeprefix(prefix)] = tensor.to(dtype)
    return stored


class Adapted(nn.Module):
    """A frozen matrix, and the low-rank change to it when there is one."""

    def __init__(self, weight: Tensor, rank: int) -> None:
        super().__init__()
        self.register_buffer("weight", weight, persistent=False)
        self.weight: Tensor
        self.rank = rank
        self.on = True
        if rank:
            outputs, inputs = weight.shape
            self.down = nn.Parameter(torch.randn(rank, inputs) * inputs**-0.5)
            self.up = nn.Parameter(torch.zeros(outputs, rank))

    def effective(self) -> Tensor:
        if not self.rank or not self.on:
            return self.weight
        return self.weight + (self.up @ self.down).to(self.weight.dtype)


class Layer(nn.Module):
    def __init__(self, stored: dict[str, Tensor], rank: int) -> None:
        super().__init__()
        self.register_buffer("norm1", stored["input_layernorm.weight"], persistent=False)
        self.register_buffer("norm2", stored["post_attention_layernorm.weight"], persistent=False)
        self.norm1: Tensor
        self.norm2: Tensor
        attention, mlp = "self_attn.{}_proj.weight", "mlp.{}_proj.weight"
        self.qkv = Adapted(torch.cat([stored[attention.format(n)] for n in "qkv"]), rank)
        self.out = Adapted(stored[attention.format("o")], rank)
        self.gate_up = Adapted(torch.cat([stored[mlp.format(n)] for n in ("gate", "up")]), rank)
        self.down = Adapted(stored[mlp.format("down")], rank)

    def weights(self) -> list[Tensor]:
        inner = (self.qkv, self.out, self.gate_up, self.down)
        return [self.norm1, self.norm2, *(matrix.effective() for matrix in inner)]


LayerForward = Callable[[Tensor, Tensor, Tensor, DecoderShape, Sequence[Tensor]], Tensor]


def run_layer(x: Tensor, cos: Tensor, sin: Tensor, shape: DecoderShape, weights: Sequence[Tensor]) -> Tensor:
    """x [B, L, D]; cos and sin [B, L, 1, head]. A function of tensors: compiled once for all layers."""
    norm1, norm2, qkv, out, gate_up, down = weights
    normed = functional.rms_norm(x, norm1.shape, norm1, shape.eps)
    heads = functional.linear(normed, qkv).view(*x.shape[:2], -1, shape.head_dim)
    turned = _rotate(heads[:, :, : shape.heads + shape.kv_heads], cos, sin)
    q, k, v = turned[:, :, : shape.heads], turned[:, :, shape.heads :], heads[:, :, -shape.kv_heads :]
    mixed = functional.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True
    )
    x = x + functional.linear(mixed.transpose(1, 2).flatten(2), out)
    normed = functional.rms_norm(x, norm2.shape, norm2, shape.eps)
    gate, up = functional.linear(normed, gate_up).chunk(2, dim=-1)
    return x + functional.linear(functional.silu(gate) * up, down)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-b, a], dim=-1) * sin


class Decoder(nn.Module):
    def __init__(
        self, checkpoint: Path, dtype: torch.dtype, rank: int = 0, layer_forward: LayerForward = run_layer
    ) -> None:
        super().__init__()
        self.shape = read_shape(checkpoint)
        self.layer_forward = layer_forward
        stored = read_decoder(checkpoint, dtype)
        self.register_buffer("words", stored["embed_tokens.weight"], persistent=False)
        self.register_buffer("norm", stored["norm.weight"], persistent=False)
        self.words: Tensor
        self.norm: Tensor
        self.layers = nn.ModuleList()
        for index in range(self.shape.layers):
            prefix = f"layers.{index}."
            inner = {n.removeprefix(prefix): t for n, t in stored.items() if n.startswith(prefix)}
            self.layers.append(Layer(inner, rank))

    def forward(self, embeddings: Tensor, positions: Tensor) -> Tensor:
        """[B, L, D] at int [B, 3, L] → the last hidden states, normed."""
        cos, sin = self._angles(positions)
        x = embeddings.to(self.words.dtype)
        for layer in self.layers:
            assert isinstance(layer, Layer)
            x = self.layer_forward(x, cos, sin, self.shape, layer.weights())
        return functional.rms_norm(x, self.norm.shape, self.norm, self.shape.eps)

    def logits(self, hidden: Tensor) -> Tensor:
        return functional.linear(hidden, self.words).float()

    def _angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        pairs = self.shape.head_dim // 2
        exponents = torch.arange(pairs, dtype=torch.float32, device=positions.device) / pairs
        axis_P = torch.repeat_interleave(
            torch.arange(3, device=positions.device),
            torch.tensor(self.shape.sections, device=positions.device),
        )
        angles = positions.transpose(1, 2).float()[:, :, axis_P] * self.shape.theta**-exponents
        angles = torch.cat([angles, angles], dim=-1).unsqueeze(2)
        return angles.cos().to(self.words.dtype), angles.sin().to(self.words.dtype)

    def adapted(self) -> Iterator[tuple[str, Adapted]]:
        for name, module in self.named_modules():
            if isinstance(module, Adapted) and module.rank:
                yield name, module

    def switch_adapters(self, on: bool) -> None:
        for _, module in self.adapted():
            module.on = on

    def merged(self) -> dict[str, Tensor]:
        """The changed matrices under the checkpoint's names (without prefix), float32; nothing without
        adapters."""
        shape = self.shape
        parts = {
            "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "out": ("self_attn.o_proj",),
            "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
            "down": ("mlp.down_proj",),
        }
        kv = shape.kv_heads * shape.head_dim
        merged: dict[str, Tensor] = {}
        for name, module in self.adapted():
            _, index, kind = name.split(".")
            whole = module.weight.float() + module.up.detach() @ module.down.detach()
            names = parts[kind]
            ends = (shape.width, shape.width + kv) if kind == "qkv" else len(names)
            for part, rows in zip(names, torch.tensor_split(whole, ends), strict=True):
                merged[f"layers.{index}.{part}.weight"] = rows
        return merged
