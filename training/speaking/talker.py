"""The talker in training: a dense Qwen3-Omni talker with its code predictor, under the checkpoint's own
names.

Shapes: B sequences, L rows, H hidden, X width of the text table, Q code groups, N frames.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from training.speaking.sizes import Sizes, TalkerSizes


class RmsNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, x.shape[-1:], self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    def __init__(self, sizes: TalkerSizes) -> None:
        super().__init__()
        inner = sizes.num_heads * sizes.head_dim
        self.head_dim = sizes.head_dim
        self.q_proj = nn.Linear(sizes.hidden_size, inner, bias=False)
        self.k_proj = nn.Linear(sizes.hidden_size, inner, bias=False)
        self.v_proj = nn.Linear(sizes.hidden_size, inner, bias=False)
        self.o_proj = nn.Linear(inner, sizes.hidden_size, bias=False)
        self.q_norm = RmsNorm(sizes.head_dim, sizes.norm_eps)
        self.k_norm = RmsNorm(sizes.head_dim, sizes.norm_eps)

    def forward(self, x_BLH: Tensor, turn: Turn) -> Tensor:
        q, k, v = (self._heads(part(x_BLH)) for part in (self.q_proj, self.k_proj, self.v_proj))
        q, k = turn(self.q_norm(q)), turn(self.k_norm(k))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.o_proj(y.transpose(1, 2).flatten(2))
        return out

    def _heads(self, x_BLI: Tensor) -> Tensor:
        return x_BLI.view(*x_BLI.shape[:2], -1, self.head_dim).transpose(1, 2)


class Turn:
    """Rotary positions 0, 1, 2… of one forward."""

    def __init__(self, length: int, head_dim: int, theta: float, like: Tensor) -> None:
        half = torch.arange(0, head_dim, 2, dtype=torch.float32, device=like.device)
        angle = torch.arange(length, device=like.device)[:, None] * theta ** -(half / head_dim)
        angle = torch.cat([angle, angle], dim=-1)
        self._cos, self._sin = angle.cos().to(like.dtype), angle.sin().to(like.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        low, high = x.chunk(2, dim=-1)
        return x * self._cos + torch.cat([-high, low], dim=-1) * self._sin


class Mlp(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    def __init__(self, sizes: TalkerSizes, inner: int) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(sizes.hidden_size, sizes.norm_eps)
        self.self_attn = Attention(sizes)
        self.post_attention_layernorm = RmsNorm(sizes.hidden_size, sizes.norm_eps)
        self.mlp = Mlp(sizes.hidden_size, inner)

    def forward(self, x_BLH: Tensor, turn: Turn) -> Tensor:
        x_BLH = x_BLH + self.self_attn(self.input_layernorm(x_BLH), turn)
        out: Tensor = x_BLH + self.mlp(self.post_attention_layernorm(x_BLH))
        return out


class Stack(nn.Module):
    """`model` of the talker, and of its code predictor. `codec_embedding` is the owner's to fill in."""

    codec_embedding: nn.Module

    def __init__(self, sizes: TalkerSizes, inner: int, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(sizes, inner) for _ in range(num_layers))
        self.norm = RmsNorm(sizes.hidden_size, sizes.norm_eps)
        self.head_dim, self.theta = sizes.head_dim, sizes.rope_theta

    def forward(self, x_BLH: Tensor) -> Tensor:
        turn = Turn(x_BLH.shape[1], self.head_dim, self.theta, x_BLH)
        for layer in self.layers:
            x_BLH = layer(x_BLH, turn)
        out: Tensor = self.norm(x_BLH)
        return out


class TextProjection(nn.Module):
    def __init__(self, sizes: TalkerSizes) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(sizes.text_width, sizes.intermediate_size)
        self.linear_fc2 = nn.Linear(sizes.intermediate_size, sizes.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear_fc2(functional.silu(self.linear_fc1(x)))
        return out


class CodePredictor(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        talker, groups = sizes.talker, sizes.num_groups - 1
        self.model = Stack(talker, talker.predictor_intermediate_size, talker.predictor_layers)
        self.model.codec_embedding = nn.ModuleList(
            nn.Embedding(sizes.codebook_size, talker.hidden_size) for _ in range(groups)
        )
        self.lm_head = nn.ModuleList(
            nn.Linear(talker.hidden_size, sizes.codebook_size, bias=False) for _ in range(groups)
        )

    def embed(self, code: Tensor, group: int) -> Tensor:
        out: Tensor = self.model.codec_embedding[group - 1](code)  # type: ignore[index]
        return out


class TalkerNet(nn.Module):
    """The first vocabulary counts the codes and then the few control codes that are used."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes, talker = sizes, sizes.talker
        self.num_codes = sizes.codebook_size + len(sizes.control)
        self.model = Stack(talker, talker.intermediate_size, talker.num_layers)
        self.model.codec_embedding = nn.Embedding(self.num_codes, talker.hidden_size)
        self.codec_head = nn.Linear(talker.hidden_size, self.num_codes, bias=False)
        self.text_projection = TextProjection(talker)
        self.code_predictor = CodePredictor(sizes)
        self.apply(_draw)
        for layer in [*self.model.layers, *self.code_predictor.model.layers]:
            for out in (layer.self_attn.o_proj, layer.mlp.down_proj):
                nn.init.normal_(out.weight, std=0.02 / talker.num_layers**0.5)

    def embed_first(self, code: Tensor) -> Tensor:
        out: Tensor = self.model.codec_embedding(code)
        return out

    def embed_frames(self, codes: Tensor) -> Tensor:
        """[…, Q] → […, H]."""
        rows = self.embed_first(codes[..., 0])
        for group in range(1, self.sizes.num_groups):
            rows = rows + self.code_predictor.embed(codes[..., group], group)
        return rows

    def first_logits(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.codec_head(hidden)
        return out

    def residual_losses(self, hidden_NH: Tensor, codes_NQ: Tensor) -> Tensor:
        """[Q - 1]: mean cross entropy of each group behind the first, given those before it. Negative codes
        do not count."""
        predictor = self.code_predictor
        heard_NQ = codes_NQ.clamp(min=0)
        heard = [self.embed_first(heard_NQ[:, 0])]
        heard += [predictor.embed(heard_NQ[:, g], g) for g in range(1, self.sizes.num_groups - 1)]
        said_NQH = predictor.model(torch.stack([hidden_NH, *[h.to(hidden_NH.dtype) for h in heard]], dim=1))
        losses = [
            functional.cross_entropy(predictor.lm_head[g - 1](said_NQH[:, g]).float(), codes_NQ[:, g])
            for g in range(1, self.sizes.num_groups)
        ]
        return torch.stack(losses)


def _draw(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
