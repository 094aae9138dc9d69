"""The seam between the runner and a decoder: configuration, KV cache, attention, and the model protocol.

Shapes: T tokens of a step (all sequences packed), H hidden, N query heads, G KV heads, D head size, V
vocabulary,
B blocks, S slots of a block, R sequences in the step, M blocks of the longest sequence.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from lm_engine.config import SpokenHidden

KVDtype = Literal["auto", "fp8"]
MixedAttention = Literal["auto", "tiles", "walks"]  # how steps with chunks divide; `attention/choice.py`
"""Of cached keys and values: the model's own dtype, or e4m3 with a power of two for each token and KV
head."""


@dataclass(frozen=True)
class RopeConfig:
    """`mrope_section` (half-dimensions per axis t, h, w) is None for plain RoPE. `scaling`: the family's
    `rope_parameters` for llama3/linear/yarn kinds, as frequencies already applied to `inv_freq`."""

    theta: float
    inv_freq: tuple[float, ...]  # D/2 entries, after any scaling
    attention_scaling: float = 1.0
    mrope_section: tuple[int, int, int] | None = None
    mrope_interleaved: bool = False


@dataclass(frozen=True)
class MoeConfig:
    """Sparse MLPs: every token goes to `num_chosen` of `num_experts` experts."""

    num_experts: int
    num_chosen: int
    intermediate_size: int  # of each expert
    normalise: bool  # the chosen experts' weights add up to one
    shared_intermediate_size: int | None = None  # of an expert that serves every token
    dense_layers: frozenset[int] = frozenset()  # layers that keep a plain MLP

    def is_sparse(self, layer: int) -> bool:
        return layer not in self.dense_layers


@dataclass(frozen=True)
class AdapterRanks:
    """Of a picture adapter: low-rank weights beside the projections of every layer, which add B(A x) for
    tokens at and behind the first row of their sequence's first picture or video, and nothing for others.
    0: the projection has none."""

    q: int = 0
    k: int = 0
    v: int = 0
    o: int = 0
    gate: int = 0
    up: int = 0
    down: int = 0

    def of(self, *projections: str) -> dict[str, int]:
        """By our name of the projection, in the order asked for."""
        ranks = dataclasses.asdict(self)
        return {name: ranks[name] for name in projections}


@dataclass(frozen=True)
class DecoderConfig:
    """One decoder covers Llama, Qwen2, Qwen3, Qwen3-MoE and the text half of the
    Qwen-VL and omni families.

    `kept_hidden_layer`: the hidden states after so many layers are kept beside the KV, one row a slot, for a
    talker to read. After all layers they are those of the final norm, before that those without the deepstack
    features that are added there. `kept_hidden_of`: see `EngineConfig.spoken_hidden`. `windows`: how many
    keys a query of each layer sees, its own the last of them; None: all. Empty: no layer has one.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position: int
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    tie_embeddings: bool = False
    moe: MoeConfig | None = None  # None: every MLP is dense
    num_deepstack_levels: int = 0  # visual features added after the first layers (Qwen3-VL)
    kept_hidden_layer: int | None = None
    kept_hidden_of: SpokenHidden = "media"
    picture_adapter: AdapterRanks | None = None  # of dense layers only
    windows: tuple[int | None, ...] = ()

    def __post_init__(self) -> None:
        assert len(self.windows) in (0, self.num_layers)
        assert all(window is None or window > 0 for window in self.windows)

    @property
    def has_windows(self) -> bool:
        return any(self.windows)

    def window(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None

    @property
    def num_position_axes(self) -> int:
        return 3 if self.rope.mrope_section else 1

    def kv_bytes_per_token(self, dtype: torch.dtype, kv_dtype: KVDtype = "auto") -> int:
        """`dtype`: the model's, in which hidden states are kept."""
        kept = self.hidden_size if self.kept_hidden_layer is not None else 0
        head_bytes = self.head_dim * dtype.itemsize if kv_dtype == "auto" else self.head_dim + 1
        return 2 * self.num_layers * self.num_kv_heads * head_bytes + kept * dtype.itemsize


@dataclass
class PagedKV:
    """Keys and values of every layer: [num_layers, B, S, G, D] each; hidden states [B, S, H] if the decoder
    keeps them. Block 0 is a scratch block, never owned.

    In e4m3, a head's values stand for themselves times two to the power of its exponent, int8
    [num_layers, B, S, G] (`attention/quantised.py`). `windows`: the decoder's; what lies before them is
    kept as well.
    """

    keys: Tensor
    values: Tensor
    hidden: Tensor | None = None
    key_exponents: Tensor | None = None
    value_exponents: Tensor | None = None
    windows: tuple[int | None, ...] = ()

    def window(self, layer: int) -> int | None:
        """Keys of this layer that a query sees, its own included; None: all."""
        return self.windows[layer] if self.windows else None

    @property
    def block_size(self) -> int:
        return self.keys.shape[2]

    @property
    def is_quantised(self) -> bool:
        return self.key_exponents is not None

    @property
    def layered(self) -> tuple[Tensor, ...]:
        """Everything that has a layer's blocks in it, [num_layers, B, ...], to be moved and not computed
        with."""
        if self.key_exponents is None or self.value_exponents is None:
            return self.keys, self.values
        as_bytes = (self.keys.view(torch.uint8), self.values.view(torch.uint8))  # torch indexes no e4m3
        return *as_bytes, self.key_exponents, self.value_exponents


@dataclass(frozen=True)
class AttentionMetadata:
    """Where the step's tokens stand: one row per sequence, queries packed in row order."""

    query_starts: Tensor  # [R+1] int32: first query row of each sequence
    sequence_lengths: Tensor  # [R] int32: keys visible to the last query (computed before + this step)
    block_tables: Tensor  # [R, M] int32
    slot_mapping: Tensor  # [T] int64: block * S + offset that each token's K/V is written to
    max_query_length: int
    max_sequence_length: int
    host_query_starts: tuple[int, ...]  # the same on the host, for the reference path
    host_sequence_lengths: tuple[int, ...]
    padded: bool = False  # rows follow that belong to no sequence; their attention is zero
    # [T, 1] float32, 1 where a token takes part in the picture adapter, else 0; None: none does.
    gate_T1: Tensor | None = None


class AttentionBackend(Protocol):
    """Writes the step's K/V into the paged cache and attends causally over it. `kv_dtypes`: of caches that it
    can read."""

    name: str
    kv_dtypes: tuple[KVDtype, ...]

    def attend(
        self,
        q_TND: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
        kv: PagedKV,
        layer: int,
        metadata: AttentionMetadata,
    ) -> Tensor:
        """Returns [T, N, D]. Mutates `kv` of `layer` at `metadata.slot_mapping`."""
        ...


class DecoderModel(Protocol):
    """The mathematics of one language model; holds weights, no request state."""

    config: DecoderConfig
    dtype: torch.dtype
    device: torch.device
    attention: AttentionBackend  # the one its kernels go with

    def embed(self, token_ids_T: Tensor) -> Tensor:
        """[T] int64 → [T, H]."""
        ...

    def forward(
        self,
        hidden_TH: Tensor,
        positions_AT: Tensor,
        kv: PagedKV,
        attention: AttentionBackend,
        metadata: AttentionMetadata,
        deepstack_KTH: Tensor | None = None,
    ) -> Tensor:
        """Final-norm hidden states [T, H]. Spends `hidden_TH`. `deepstack_KTH`: zero where a token is no
        visual token. Writes what `kept_hidden_layer` asks for to `kv.hidden`."""
        ...

    def logits(self, hidden_RH: Tensor) -> Tensor:
        """[R, H] → [R, V] float32."""
        ...


@runtime_checkable
class AligningModel(DecoderModel, Protocol):
    """An encoder-decoder whose cross-attention tells where in the encoder's output a token is spoken."""

    num_prefix: int  # positions of the encoder's output, which come first in every sequence

    def cross_attention(self, token_ids_U: Tensor, kv: PagedKV, prefix_slots_P: Tensor) -> Tensor:
        """[heads that align, U, P]: weights of all tokens of a sequence over its encoder positions, whose
        keys
        and values are in the cache."""
        ...


Kernels = Literal["auto", "reference", "native", "triton"]
