"""Whisper's decoder over the engine's paged cache: learned positions, self-attention, cross-attention, GELU.

Shapes: T rows of a step = E rows of encoder output and U token rows, H hidden, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from lm_engine.attention.prefixed import PrefixedAttention
from lm_engine.decoder import WeightSource
from lm_engine.layers.kernels import Kernels, Linear
from lm_engine.model import AttentionBackend, AttentionMetadata, DecoderConfig, PagedKV
from model_families.whisper.config import NORM_EPS, WhisperConfig, decoder_config


@dataclass(frozen=True)
class Norm:
    weight_H: Tensor
    bias_H: Tensor

    def __call__(self, x_TH: Tensor) -> Tensor:
        return functional.layer_norm(x_TH, self.weight_H.shape, self.weight_H, self.bias_H, NORM_EPS)


@dataclass(frozen=True)
class Layer:
    self_norm: Norm
    qkv: Linear
    self_output: Linear
    cross_norm: Norm
    cross_query: Linear
    cross_kv: Linear
    cross_output: Linear
    mlp_norm: Norm
    up: Linear
    down: Linear


class WhisperDecoder:
    """Implements `lm_engine.model.AligningModel`. Read-only once built.

    The first `max_source_positions` rows of a sequence are the encoder's output: they only become
    cross-attention keys and values. Its tokens follow.
    """

    def __init__(
        self,
        config: WhisperConfig,
        source: WeightSource,
        kernels: Kernels,
        alignment_heads: tuple[tuple[int, int], ...],
    ) -> None:
        """`alignment_heads`: (layer, head)."""
        self.config: DecoderConfig = decoder_config(config)
        self.num_prefix = config.max_source_positions
        self._alignment_heads = alignment_heads
        self.device, self.dtype = source.device, source.dtype
        self.activation_dtype = kernels.activation_dtype(source.dtype)
        self._prefixed = PrefixedAttention(config.max_source_positions)
        self.attention: AttentionBackend = self._prefixed
        self._embed_scale = config.d_model**0.5 if config.scale_embedding else 1.0
        loader = _Loader(config, source, kernels, self.activation_dtype)
        self.embedding_VH = source.take("embed_tokens.weight", (config.vocab_size, config.d_model))
        shape = (config.max_target_positions, config.d_model)
        self.position_table = source.take("embed_positions.weight", shape).to(self.activation_dtype)
        self.layers = [loader.layer(f"layers.{index}.") for index in range(config.decoder_layers)]
        self.norm = loader.norm("layer_norm")
        self.head = kernels.pack_linear(self.embedding_VH, float32_output=True)

    def embed(self, token_ids_T: Tensor) -> Tensor:
        embedded_TH = functional.embedding(token_ids_T, self.embedding_VH).to(self.activation_dtype)
        return embedded_TH * self._embed_scale

    def forward(
        self,
        hidden_TH: Tensor,
        positions_AT: Tensor,
        kv: PagedKV,
        attention: AttentionBackend,
        metadata: AttentionMetadata,
        deepstack_KTH: Tensor | None = None,
    ) -> Tensor:
        """Rows of encoder output come back as zeros: nothing follows from them but their keys and values."""
        assert attention is self._prefixed, "cross-attention needs this attention"
        rows = self._prefixed.rows(metadata, kv)
        if rows.num_prefix_rows:
            encoded_EH = hidden_TH[rows.prefix_row_E]
            for index, layer in enumerate(self.layers):
                k_END, v_END = self._heads(layer.cross_kv(encoded_EH), 2)
                self._prefixed.write_prefix(k_END, v_END, kv, index, metadata)
        out_TH = torch.zeros_like(hidden_TH)
        if rows.num_tokens:
            x_UH = hidden_TH[rows.token_row_U] + self.position_table[rows.position_U]
            for index, layer in enumerate(self.layers):
                x_UH = self._run_layer(layer, x_UH, kv, index, metadata)
            out_TH[rows.token_row_U] = self.norm(x_UH)
        return out_TH

    def _run_layer(
        self, layer: Layer, x_UH: Tensor, kv: PagedKV, index: int, metadata: AttentionMetadata
    ) -> Tensor:
        q_UND, k_UND, v_UND = self._heads(layer.qkv(layer.self_norm(x_UH)), 3)
        attended_UND = self._prefixed.attend(q_UND, k_UND, v_UND, kv, index, metadata)
        x_UH = x_UH + layer.self_output(attended_UND.flatten(1))
        (q_UND,) = self._heads(layer.cross_query(layer.cross_norm(x_UH)), 1)
        attended_UND = self._prefixed.attend_prefix(q_UND, kv, index, metadata)
        x_UH = x_UH + layer.cross_output(attended_UND.flatten(1))
        return x_UH + layer.down(functional.gelu(layer.up(layer.mlp_norm(x_UH))))

    def cross_attention(self, token_ids_U: Tensor, kv: PagedKV, prefix_slots_P: Tensor) -> Tensor:
        x_UH = self.embed(token_ids_U) + self.position_table[: len(token_ids_U)]
        weights: list[Tensor] = []
        for index, layer in enumerate(self.layers):
            q_NUD, k_NUD, v_NUD = (
                x.transpose(0, 1) for x in self._heads(layer.qkv(layer.self_norm(x_UH)), 3)
            )
            attended_NUD = functional.scaled_dot_product_attention(q_NUD, k_NUD, v_NUD, is_causal=True)
            x_UH = x_UH + layer.self_output(attended_NUD.transpose(0, 1).flatten(1))
            (q_UND,) = self._heads(layer.cross_query(layer.cross_norm(x_UH)), 1)
            k_NPD, v_NPD = (
                cache[index].flatten(0, 1)[prefix_slots_P].to(x_UH.dtype).transpose(0, 1)
                for cache in (kv.keys, kv.values)
            )
            scores_NUP = q_UND.transpose(0, 1) @ k_NPD.transpose(1, 2) * self.config.head_dim**-0.5
            weights_NUP = scores_NUP.float().softmax(-1)
            weights += [weights_NUP[head] for of, head in self._alignment_heads if of == index]
            attended_UND = (weights_NUP.to(v_NPD.dtype) @ v_NPD).transpose(0, 1)
            x_UH = x_UH + layer.cross_output(attended_UND.flatten(1))
            x_UH = x_UH + layer.down(functional.gelu(layer.up(layer.mlp_norm(x_UH))))
        return torch.stack(weights)

    def logits(self, hidden_RH: Tensor) -> Tensor:
        return self.head(hidden_RH)

    def _heads(self, projected: Tensor, parts: int) -> tuple[Tensor, ...]:
        """[rows, parts · H] as `parts` tensors [rows, N, D]."""
        return projected.view(-1, parts, self.config.num_heads, self.config.head_dim).unbind(1)


class _Loader:
    """Takes the layers' weights, fused where one input feeds several projections. Keys have no bias."""

    def __init__(
        self, config: WhisperConfig, source: WeightSource, kernels: Kernels, norm_dtype: torch.dtype
    ) -> None:
        self._width, self._inner = config.d_model, config.decoder_ffn_dim
        self._source = source
        self._kernels = kernels
        self._norm_dtype = norm_dtype

    def layer(self, prefix: str) -> Layer:
        return Layer(
            self_norm=self.norm(prefix + "self_attn_layer_norm"),
            qkv=self._fused(prefix + "self_attn.", ("q_proj", "k_proj", "v_proj")),
            self_output=self._fused(prefix + "self_attn.", ("out_proj",)),
            cross_norm=self.norm(prefix + "encoder_attn_layer_norm"),
            cross_query=self._fused(prefix + "encoder_attn.", ("q_proj",)),
            cross_kv=self._fused(prefix + "encoder_attn.", ("k_proj", "v_proj")),
            cross_output=self._fused(prefix + "encoder_attn.", ("out_proj",)),
            mlp_norm=self.norm(prefix + "final_layer_norm"),
            up=self._linear(prefix + "fc1", self._inner, self._width),
            down=self._linear(prefix + "fc2", self._width, self._inner),
        )

    def norm(self, name: str) -> Norm:
        weight, bias = (self._source.take(f"{name}.{kind}", (self._width,)) for kind in ("weight", "bias"))
        return Norm(weight.to(self._norm_dtype), bias.to(self._norm_dtype))

    def _linear(self, name: str, num_outputs: int, num_inputs: int) -> Linear:
        weight = self._source.take(f"{name}.weight", (num_outputs, num_inputs))
        return self._kernels.pack_linear(weight, self._source.take(f"{name}.bias", (num_outputs,)))

    def _fused(self, prefix: str, names: tuple[str, ...]) -> Linear:
        width = self._width
        weights = [self._source.take(f"{prefix}{name}.weight", (width, width)) for name in names]
        biases = [
            weights[0].new_zeros(width)
            if name == "k_proj"
            else self._source.take(f"{prefix}{name}.bias", (width,))
            for name in names
        ]
        return self._kernels.pack_linear(torch.cat(weights), torch.cat(biases))
