"""The one decoder: Llama, Qwen2, Qwen3 and the text halves of the Qwen-VL and omni families, by
configuration.

Shapes: T tokens of a step, A position axes, H hidden, K deepstack levels, R rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from lm_engine.gpu_target import stands_for_gpu
from lm_engine.layers.gated import with_gate
from lm_engine.layers.kernels import (
    DecoderLayer,
    ExpertWeights,
    FusedPass,
    HeadShape,
    Kernels,
    LayerAdapter,
    Linear,
    LowRank,
    Mlp,
    QKNorm,
)
from lm_engine.layers.mlp import DenseMlp, SharedExpert, SparseMlp
from lm_engine.layers.rope import RotaryEmbedding
from lm_engine.model import AttentionBackend, AttentionMetadata, DecoderConfig, PagedKV
from lm_engine.parallel import TensorParallel, with_sums


class WeightSource(Protocol):
    """Where a decoder's weights come from, under our names: `embed.weight`, `norm.weight`, `lm_head.weight`
    and, per layer, `layers.<i>.` with `input_norm`, `q`, `k`, `v`, `o`, `q_norm`, `k_norm`, `post_norm`,
    `gate`, `up`, `down`; a sparse layer has `router`, `experts.<e>.gate`, `.up`, `.down`, and
    `shared.gate`, `.up`, `.down`, `shared_gate` instead of the last three. Of a picture adapter,
    `layers.<i>.<q>.lora_a` [rank, inputs] and `.lora_b` [outputs, rank], of each projection that has one."""

    device: torch.device
    dtype: torch.dtype

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor on `device` in `dtype`; the caller owns it. Raises EngineError when absent or
        mis-shaped."""
        ...


Turns = tuple[Tensor, Tensor]


class DecoderStack:
    """The layers and the final norm, from hidden states to hidden states. Read-only once built.

    `parallel`: config and source are one rank's share (`lm_engine.parallel`).
    """

    def __init__(
        self,
        config: DecoderConfig,
        source: WeightSource,
        kernels: Kernels,
        parallel: TensorParallel | None = None,
    ) -> None:
        indices = list(range(config.num_layers))
        if stands_for_gpu(source.device):
            indices = _first_of_each_kind(config)
            config = _windows_of(config, indices)
        self.config = config
        self.device, self.dtype = source.device, source.dtype
        self.kernels = kernels
        self.attention = kernels.attention
        self.activation_dtype = kernels.activation_dtype(source.dtype)
        self.heads = HeadShape(config.num_heads, config.num_kv_heads, config.head_dim)
        self.rotary = RotaryEmbedding(config.rope, self.device)
        self._own_layers = [_load_layer(config, source, kernels, index) for index in indices]
        self._parallel = parallel
        self._fused = kernels.fused_pass if parallel is None else None  # it knows of no sums
        self.layers = self._summed(self._own_layers)
        self.norm_H = source.take("norm.weight", (config.hidden_size,))

    def forward(
        self,
        hidden_TH: Tensor,
        positions_AT: Tensor,
        kv: PagedKV,
        attention: AttentionBackend,
        metadata: AttentionMetadata,
        deepstack_KTH: Tensor | None = None,
    ) -> Tensor:
        """Spends `hidden_TH`: it carries the residual stream."""
        return self.forward_turned(
            hidden_TH, self.turns(positions_AT), kv, attention, metadata, deepstack_KTH
        )

    def turns(self, positions_AT: Tensor) -> Turns:
        """Cosines and sines [T, P] of positions."""
        return self.kernels.turns(self.rotary, positions_AT)

    def forward_turned(
        self,
        hidden_TH: Tensor,
        turns: Turns,
        kv: PagedKV,
        attention: AttentionBackend,
        metadata: AttentionMetadata,
        deepstack_KTH: Tensor | None = None,
    ) -> Tensor:
        """`forward` for positions whose `turns` are at hand."""
        kernels, eps = self.kernels, self.config.rms_norm_eps
        num_deepstack = 0 if deepstack_KTH is None else deepstack_KTH.shape[0]
        assert num_deepstack <= len(self.layers)
        cos_TP, sin_TP = turns
        kept_layer, num_layers = self.config.kept_hidden_layer, len(self.layers)
        fused = self._fused if num_deepstack == 0 else None
        if fused is not None and attention is self.attention and fused.takes(metadata):
            return self._forward_fused(fused, hidden_TH, turns, kv, metadata)
        layers, gate_T1 = self.layers, metadata.gate_T1
        if gate_T1 is not None:
            layers = self._gated(gate_T1.to(hidden_TH.dtype))
        residual_TH = hidden_TH
        normed_TH = kernels.rms_norm(residual_TH, layers[0].input_norm_H, eps)
        for index, layer in enumerate(layers):
            qkv_TX = layer.qkv(normed_TH)
            attended_TX = kernels.attend(
                qkv_TX, self.heads, cos_TP, sin_TP, layer.qk_norm, attention, kv, index, metadata
            )
            mixed_TH = layer.output(attended_TX)
            normed_TH, residual_TH = kernels.add_rms_norm(mixed_TH, residual_TH, layer.post_norm_H, eps)
            delta_TH = layer.mlp(normed_TH)
            if index + 1 == kept_layer != num_layers:
                _keep(residual_TH + delta_TH, kv, metadata)
            if deepstack_KTH is not None and index < num_deepstack:
                delta_TH += deepstack_KTH[index]
            is_last = index + 1 == num_layers
            next_norm_H = self.norm_H if is_last else layers[index + 1].input_norm_H
            normed_TH, residual_TH = kernels.add_rms_norm(delta_TH, residual_TH, next_norm_H, eps)
        if kept_layer == num_layers:
            _keep(normed_TH, kv, metadata)
        return normed_TH

    def _gated(self, gate_T1: Tensor) -> list[DecoderLayer]:
        """Where ranks add up, each adds its part of the adapter's sum to its part of the layer's."""
        return self._summed([with_gate(layer, gate_T1) for layer in self._own_layers])

    def _summed(self, layers: list[DecoderLayer]) -> list[DecoderLayer]:
        parallel = self._parallel
        return layers if parallel is None else [with_sums(layer, parallel) for layer in layers]

    def _forward_fused(
        self, fused: FusedPass, hidden_TH: Tensor, turns: Turns, kv: PagedKV, metadata: AttentionMetadata
    ) -> Tensor:
        """In two parts where hidden states between them are kept."""
        eps, kept_layer, num_layers = (
            self.config.rms_norm_eps,
            self.config.kept_hidden_layer,
            len(self.layers),
        )
        cut = num_layers if kept_layer is None else kept_layer
        residual_TH = fused.run(self.layers[:cut], hidden_TH, self.heads, *turns, eps, kv, metadata)
        if cut < num_layers:
            _keep(residual_TH, kv, metadata)
            rest = self.layers[cut:]
            residual_TH = fused.run(rest, residual_TH, self.heads, *turns, eps, kv, metadata, cut)
        normed_TH = self.kernels.rms_norm(residual_TH, self.norm_H, eps)
        if kept_layer == num_layers:
            _keep(normed_TH, kv, metadata)
        return normed_TH


class Decoder(DecoderStack):
    """Implements `DecoderModel`: the stack between an embedding table and a head."""

    def __init__(
        self,
        config: DecoderConfig,
        source: WeightSource,
        kernels: Kernels,
        parallel: TensorParallel | None = None,
    ) -> None:
        vocabulary = (config.vocab_size, config.hidden_size)
        self.embedding_VH = source.take("embed.weight", vocabulary)
        super().__init__(config, source, kernels, parallel)
        head_VH = self.embedding_VH if config.tie_embeddings else source.take("lm_head.weight", vocabulary)
        self.head = kernels.pack_linear(head_VH, float32_output=True)

    def embed(self, token_ids_T: Tensor) -> Tensor:
        return functional.embedding(token_ids_T, self.embedding_VH).to(self.activation_dtype)

    def logits(self, hidden_RH: Tensor) -> Tensor:
        return self.head(hidden_RH)


def _keep(hidden_TH: Tensor, kv: PagedKV, metadata: AttentionMetadata) -> None:
    assert kv.hidden is not None, "the cache has no room for hidden states"
    kv.hidden.flatten(0, 1).index_copy_(0, metadata.slot_mapping, hidden_TH.to(kv.hidden.dtype))


def _first_of_each_kind(config: DecoderConfig) -> list[int]:
    """Layers differ in nothing but being sparse or not, and their windows."""
    moe = config.moe
    kinds = [(moe is not None and moe.is_sparse(i), config.window(i)) for i in range(config.num_layers)]
    return [kinds.index(kind) for kind in dict.fromkeys(kinds)]


def _windows_of(config: DecoderConfig, indices: list[int]) -> DecoderConfig:
    """These layers' come first, as the layers do that are loaded alone."""
    if not config.windows:
        return config
    rest = (None,) * (config.num_layers - len(indices))
    return replace(config, windows=(*(config.windows[index] for index in indices), *rest))


def _load_layer(config: DecoderConfig, source: WeightSource, kernels: Kernels, index: int) -> DecoderLayer:
    hidden, prefix = config.hidden_size, f"layers.{index}."
    q_width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def norm(name: str, size: int) -> Tensor:
        return source.take(f"{prefix}{name}.weight", (size,))

    qk_norm = None
    if config.qk_norm:
        q_norm_D, k_norm_D = norm("q_norm", config.head_dim), norm("k_norm", config.head_dim)
        qk_norm = QKNorm(q_norm_D, k_norm_D, config.rms_norm_eps)
    qkv = {"q": q_width, "k": kv_width, "v": kv_width}
    return DecoderLayer(
        input_norm_H=norm("input_norm", hidden),
        qkv=_load_linear(source, kernels, prefix, qkv, hidden, config.qkv_bias),
        qk_norm=qk_norm,
        output=_load_linear(source, kernels, prefix, {"o": hidden}, q_width, config.output_bias),
        post_norm_H=norm("post_norm", hidden),
        mlp=_load_mlp(config, source, kernels, index),
        adapter=_load_adapter(config, source, kernels, prefix),
    )


def _load_adapter(
    config: DecoderConfig, source: WeightSource, kernels: Kernels, prefix: str
) -> LayerAdapter | None:
    ranks, hidden, inner = config.picture_adapter, config.hidden_size, config.intermediate_size
    if ranks is None:
        return None
    assert config.moe is None, "an adapter beside experts"
    q_width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def load(num_inputs: int, sizes: dict[str, int]) -> LowRank | None:
        return _load_low_rank(source, kernels, prefix, num_inputs, sizes, ranks.of(*sizes))

    return LayerAdapter(
        qkv=load(hidden, {"q": q_width, "k": kv_width, "v": kv_width}),
        output=load(q_width, {"o": hidden}),
        gate_up=load(hidden, {"gate": inner, "up": inner}),
        down=load(inner, {"down": hidden}),
    )


def _load_low_rank(
    source: WeightSource,
    kernels: Kernels,
    prefix: str,
    num_inputs: int,
    sizes: dict[str, int],
    ranks: dict[str, int],
) -> LowRank | None:
    """Beside projections of one input (name → outputs), stacked as they are: A's rows one after the other,
    B's blocks along the diagonal."""
    adapted = [name for name in sizes if ranks[name]]
    if not adapted:
        return None
    a_RI = _stacked([source.take(f"{prefix}{n}.lora_a", (ranks[n], num_inputs)) for n in adapted])
    b_OR = a_RI.new_zeros(sum(sizes.values()), len(a_RI))
    row = column = 0
    for name, size in sizes.items():
        rank = ranks[name]
        if rank:
            b_OR[row : row + size, column : column + rank] = source.take(
                f"{prefix}{name}.lora_b", (size, rank)
            )
        row, column = row + size, column + rank
    return LowRank(kernels.pack_linear(a_RI), kernels.pack_linear(b_OR))


def _load_linear(
    source: WeightSource,
    kernels: Kernels,
    prefix: str,
    parts: dict[str, int],
    num_inputs: int,
    bias: bool = False,
    *,
    float32_output: bool = False,
) -> Linear:
    """Projections of one input, rows stacked in the order of `parts` (name → outputs)."""
    weights = [source.take(f"{prefix}{name}.weight", (size, num_inputs)) for name, size in parts.items()]
    biases = [source.take(f"{prefix}{name}.bias", (size,)) for name, size in parts.items()] if bias else []
    weight_OI = _stacked(weights)
    bias_O = _stacked(biases) if biases else None
    return kernels.pack_linear(weight_OI, bias_O, float32_output=float32_output)


def _stacked(rows: list[Tensor]) -> Tensor:
    if len(rows) == 1:
        return rows[0]
    if rows[0].is_meta:  # torch.cat of shapes alone would first import its compiler, for seconds
        return rows[0].new_empty((sum(len(part) for part in rows), *rows[0].shape[1:]))
    return torch.cat(rows)


def _load_mlp(config: DecoderConfig, source: WeightSource, kernels: Kernels, index: int) -> Mlp:
    hidden, prefix = config.hidden_size, f"layers.{index}."
    moe = config.moe
    if moe is None or not moe.is_sparse(index):
        return _load_dense_mlp(source, kernels, prefix, hidden, config.intermediate_size)
    experts = [
        _load_expert(source, f"{prefix}experts.{expert}.", hidden, moe.intermediate_size)
        for expert in range(moe.num_experts)
    ]
    shared = None
    if moe.shared_intermediate_size is not None:
        width = moe.shared_intermediate_size
        shared = SharedExpert(
            _load_dense_mlp(source, kernels, f"{prefix}shared.", hidden, width),
            _load_linear(source, kernels, prefix, {"shared_gate": 1}, hidden, float32_output=True),
        )
    router = {"router": moe.num_experts}
    return SparseMlp(
        router=_load_linear(source, kernels, prefix, router, hidden, float32_output=True),
        experts=kernels.pack_experts(experts),
        num_chosen=moe.num_chosen,
        normalise=moe.normalise,
        shared=shared,
    )


def _load_dense_mlp(
    source: WeightSource, kernels: Kernels, prefix: str, hidden: int, intermediate: int
) -> DenseMlp:
    gate_up = {"gate": intermediate, "up": intermediate}
    return DenseMlp(
        kernels,
        _load_linear(source, kernels, prefix, gate_up, hidden),
        _load_linear(source, kernels, prefix, {"down": hidden}, intermediate),
    )


def _load_expert(source: WeightSource, prefix: str, hidden: int, intermediate: int) -> ExpertWeights:
    gate_IH, up_IH = (source.take(f"{prefix}{n}.weight", (intermediate, hidden)) for n in ("gate", "up"))
    down_HI = source.take(f"{prefix}down.weight", (hidden, intermediate))
    return ExpertWeights(torch.cat([gate_IH, up_IH]), down_HI)
