"""The language model as training runs it: rows of one length, causal, weights frozen; its picture adapter.

An adapted matrix gives W x + g B A x, B and A of low rank; g is one for tokens at and behind the first row
of a picture, else zero. B rows, L tokens, D width, R ranks of all matrices that read one input, P rotated
pairs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

PREFIXES = ("model.language_model.", "model.")  # as transformers 5 names them, then as checkpoints do
OTHERS = ("model.visual.", "visual.")
# Of the adapter, by matrix. A byte a weight is shipped: of more there would be no room.
RANKS: Mapping[str, int] = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj", "down_proj"), 8),
    **dict.fromkeys(("gate_proj", "up_proj"), 4),
}
READERS = (
    ("q_proj", "k_proj", "v_proj"),
    ("o_proj",),
    ("gate_proj", "up_proj"),
    ("down_proj",),
)  # of one input


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


class LowRank(nn.Module):
    """What is added to a frozen matrix: b a, nothing at first."""

    def __init__(self, inputs: int, outputs: int, rank: int) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(rank, inputs) * inputs**-0.5)
        self.b = nn.Parameter(torch.zeros(outputs, rank))


class Layer(nn.Module):
    def __init__(self, stored: dict[str, Tensor], ranks: Mapping[str, int]) -> None:
        super().__init__()
        self.register_buffer("norm1", stored["input_layernorm.weight"], persistent=False)
        self.register_buffer("norm2", stored["post_attention_layernorm.weight"], persistent=False)
        self.adapter = nn.ModuleDict()
        for index, readers in enumerate(READERS):
            block = "self_attn" if index < 2 else "mlp"
            matrices = [stored[f"{block}.{name}.weight"] for name in readers]
            self.register_buffer(f"weight{index}", torch.cat(matrices), persistent=False)
            for name, matrix in zip(readers, matrices, strict=True):
                outputs, inputs = matrix.shape
                self.adapter[name] = LowRank(inputs, outputs, ranks[name])

    def weights(self) -> list[Tensor]:
        """Norms, then the four matrices."""
        return [self.get_buffer(name) for name in ("norm1", "norm2", *(f"weight{i}" for i in range(4)))]

    def low_ranks(self) -> list[Tensor]:
        """Of each matrix in turn a [R, inputs], b [outputs, R] as one: readers of one input side by side."""
        found: list[Tensor] = []
        dtype = self.get_buffer("weight0").dtype
        for readers in READERS:
            parts = [self.adapter[name] for name in readers]
            found.append(torch.cat([part.get_parameter("a") for part in parts]).to(dtype))
            found.append(_diagonal([part.get_parameter("b") for part in parts]).to(dtype))
        return found


def _diagonal(blocks: Sequence[Tensor]) -> Tensor:
    """One matrix of blocks that share neither rows nor columns."""
    width, before = sum(block.shape[1] for block in blocks), 0
    rows = []
    for block in blocks:
        rows.append(functional.pad(block, (before, width - before - block.shape[1])))
        before += block.shape[1]
    return torch.cat(rows)


LayerForward = Callable[
    [Tensor, Tensor, Tensor, Tensor, DecoderShape, Sequence[Tensor], Sequence[Tensor]], Tensor
]


def run_layer(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    gate: Tensor,
    shape: DecoderShape,
    weights: Sequence[Tensor],
    low_ranks: Sequence[Tensor],
) -> Tensor:
    """x [B, L, D]; cos and sin [B, L, 1, head]; gate [B, L, 1]. A function of tensors: compiled once for all
    layers."""
    norm1, norm2, qkv, out, gate_up, down = weights
    qkv_low, out_low, gate_up_low, down_low = zip(low_ranks[::2], low_ranks[1::2], strict=True)
    normed = functional.rms_norm(x, norm1.shape, norm1, shape.eps)
    heads = _adapted(normed, qkv, qkv_low, gate).view(*x.shape[:2], -1, shape.head_dim)
    turned = _rotate(heads[:, :, : shape.heads + shape.kv_heads], cos, sin)
    q, k, v = turned[:, :, : shape.heads], turned[:, :, shape.heads :], heads[:, :, -shape.kv_heads :]
    mixed = functional.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True
    )
    x = x + _adapted(mixed.transpose(1, 2).flatten(2), out, out_low, gate)
    normed = functional.rms_norm(x, norm2.shape, norm2, shape.eps)
    gated, up = _adapted(normed, gate_up, gate_up_low, gate).chunk(2, dim=-1)
    return x + _adapted(functional.silu(gated) * up, down, down_low, gate)


def _adapted(x: Tensor, weight: Tensor, low_rank: tuple[Tensor, Tensor], gate: Tensor) -> Tensor:
    a, b = low_rank
    low = functional.linear(x, a) * gate
    plain = functional.linear(x, weight)
    return torch.addmm(plain.flatten(0, 1), low.flatten(0, 1), b.T).view(plain.shape)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-b, a], dim=-1) * sin


class Decoder(nn.Module):
    """Its parameters are the adapter's alone."""

    def __init__(
        self,
        checkpoint: Path,
        dtype: torch.dtype,
        ranks: Mapping[str, int] = RANKS,
        layer_forward: LayerForward = run_layer,
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
            self.layers.append(Layer(inner, ranks))

    def forward(self, embeddings: Tensor, positions: Tensor, behind: Tensor) -> Tensor:
        """[B, L, D] at int [B, 3, L] → the last hidden states, normed. `behind`: bool [B, L], whether a token
        is at or behind its row's first picture."""
        cos, sin = self._angles(positions)
        x = embeddings.to(self.words.dtype)
        gate = behind.unsqueeze(2).to(x.dtype)
        for layer in self.layers:
            assert isinstance(layer, Layer)
            x = self.layer_forward(x, cos, sin, gate, self.shape, layer.weights(), layer.low_ranks())
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
