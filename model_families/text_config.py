"""The text half of a config.json: flat or under `text_config`, old and new rope keys, as a DecoderConfig."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from lm_engine.model import AdapterRanks, DecoderConfig, MoeConfig
from model_families.checkpoint import checkpoint_error
from model_families.fields import Count, Positive, check_multiple
from model_families.rope import RopeParameters, rope_config

Rank = Annotated[int, msgspec.Meta(ge=0)]


class PictureAdapter(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Ranks of low-rank weights that act behind a picture, by projection; 0: it has none."""

    q_proj: Rank = 0
    k_proj: Rank = 0
    v_proj: Rank = 0
    o_proj: Rank = 0
    gate_proj: Rank = 0
    up_proj: Rank = 0
    down_proj: Rank = 0

    @property
    def ranks(self) -> AdapterRanks | None:
        ranks = {name.removesuffix("_proj"): rank for name, rank in msgspec.structs.asdict(self).items()}
        return AdapterRanks(**ranks) if any(ranks.values()) else None


class TextConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of Llama and Qwen text models. None: the family's default. Experts are counted by either
    name."""

    vocab_size: Count | None = None
    hidden_size: Count | None = None
    intermediate_size: Count | None = None
    num_hidden_layers: Count | None = None
    num_attention_heads: Count | None = None
    num_key_value_heads: Count | None = None
    head_dim: Count | None = None
    rms_norm_eps: Positive | None = None
    max_position_embeddings: Count | None = None
    hidden_act: str = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False
    use_sliding_window: bool | None = False
    sliding_window: Count | msgspec.UnsetType | None = msgspec.UNSET
    max_window_layers: Annotated[int, msgspec.Meta(ge=0)] | None = None
    tie_word_embeddings: bool | None = None
    rope_theta: Positive | None = None
    rope_scaling: RopeParameters | None = None
    rope_parameters: RopeParameters | None = None
    num_experts: int | None = None
    num_local_experts: int | None = None
    num_experts_per_tok: int | None = None
    moe_intermediate_size: int | None = None
    shared_expert_intermediate_size: int | None = None
    norm_topk_prob: bool | None = None
    decoder_sparse_step: Count | None = None
    mlp_only_layers: tuple[int, ...] | None = None
    layer_types: tuple[Literal["full_attention", "sliding_attention"], ...] | None = None
    picture_adapter: PictureAdapter | None = None  # ours, not transformers'

    def __post_init__(self) -> None:
        kinds, layers = self.layer_types, self.num_hidden_layers
        if kinds is not None and layers is not None and len(kinds) != layers:
            raise ValueError(f"layer_types names {len(kinds)} layers, num_hidden_layers is {layers}")
        heads, shared = self.num_attention_heads, self.num_key_value_heads
        if heads is not None and shared is not None:
            check_multiple("num_attention_heads", heads, "num_key_value_heads", shared)

    @property
    def rope(self) -> RopeParameters:
        return self.rope_scaling or self.rope_parameters or RopeParameters()


class CheckpointConfig(TextConfig, frozen=True, kw_only=True):
    """config.json as the decoder sees it."""

    model_type: str
    text_config: TextConfig | None = None
    quantization_config: msgspec.Raw = msgspec.Raw(b"")


class MoeDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """What a sparse family's config leaves unsaid. `always_normalise`: whatever the config says."""

    num_experts: int
    num_chosen: int
    intermediate_size: Count
    normalise: bool
    always_normalise: bool = False
    has_shared: bool = False


class FamilyDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """What a family's config leaves unsaid, and its fixed traits."""

    rope_theta: Positive = 10_000.0
    rms_norm_eps: Positive = 1e-6
    max_position: int = 32_768
    head_dim: Count | None = None  # None: hidden size / heads
    qkv_bias: bool | None = None  # None: `attention_bias` decides, for the output projection as well
    qk_norm: bool = False
    mrope_section: tuple[int, int, int] | None = None  # None: plain RoPE
    mrope_interleaved: bool = False
    intermediate_size: Count | None = None  # None: the config must say it
    moe: MoeDefaults | None = None  # None: a dense family
    max_window_layers: int | None = None  # None: the family has no sliding windows
    sliding_window: Count = 4096


def build_decoder_config(
    config: CheckpointConfig, defaults: FamilyDefaults, *, num_deepstack_levels: int = 0
) -> DecoderConfig:
    text = config.text_config or config
    _refuse_unsupported(config, text)
    hidden_size = _required("hidden_size", text.hidden_size)
    num_heads = _required("num_attention_heads", text.num_attention_heads)
    head_dim = text.head_dim or defaults.head_dim or hidden_size // num_heads
    if head_dim < 2 or head_dim % 2:
        raise checkpoint_error(f"config.json: head_dim, or hidden_size / num_attention_heads, is {head_dim}")
    if text.head_dim is None and defaults.head_dim is None and hidden_size % num_heads:
        raise checkpoint_error(
            f"config.json: hidden_size {hidden_size} is no multiple of num_attention_heads {num_heads}"
        )
    max_position = text.max_position_embeddings or defaults.max_position
    reach = _reach(text.rope, max_position)
    rope = rope_config(
        text.rope,
        theta=text.rope.rope_theta or text.rope_theta or defaults.rope_theta,
        head_dim=head_dim,
        max_position=max_position,
        mrope_section=defaults.mrope_section and (text.rope.mrope_section or defaults.mrope_section),
        mrope_interleaved=defaults.mrope_interleaved,
    )
    return DecoderConfig(
        vocab_size=_required("vocab_size", text.vocab_size),
        hidden_size=hidden_size,
        intermediate_size=_required(
            "intermediate_size", text.intermediate_size or defaults.intermediate_size
        ),
        num_layers=_required("num_hidden_layers", text.num_hidden_layers),
        num_heads=num_heads,
        num_kv_heads=text.num_key_value_heads or num_heads,
        head_dim=head_dim,
        rms_norm_eps=text.rms_norm_eps if text.rms_norm_eps is not None else defaults.rms_norm_eps,
        rope=rope,
        max_position=reach,
        qkv_bias=text.attention_bias if defaults.qkv_bias is None else defaults.qkv_bias,
        output_bias=text.attention_bias if defaults.qkv_bias is None else False,
        qk_norm=defaults.qk_norm,
        tie_embeddings=_is_tied(config, text),
        moe=None if defaults.moe is None else _moe_config(text, defaults.moe),
        num_deepstack_levels=num_deepstack_levels,
        picture_adapter=text.picture_adapter.ranks if text.picture_adapter else None,
        windows=_windows(text, defaults, reach),
    )


def _windows(text: TextConfig, defaults: FamilyDefaults, reach: int) -> tuple[int | None, ...]:
    """Of the layers that `layer_types` names, else of those from `max_window_layers` on. None where a window
    would hold the longest sequence."""
    named = text.layer_types is not None and "sliding_attention" in text.layer_types
    size = None
    if text.use_sliding_window:
        if defaults.max_window_layers is None:
            raise checkpoint_error("config.json: use_sliding_window: this model type has no sliding windows")
        given = text.sliding_window
        size = defaults.sliding_window if isinstance(given, msgspec.UnsetType) else given
    if size is None and named:
        raise checkpoint_error(
            "config.json: layer_types names sliding_attention, but use_sliding_window is off or has no size"
        )
    if size is None or size >= reach:
        return ()
    num_layers = _required("num_hidden_layers", text.num_hidden_layers)
    if text.layer_types is not None:
        windows = tuple(size if kind == "sliding_attention" else None for kind in text.layer_types)
    else:
        first = defaults.max_window_layers if text.max_window_layers is None else text.max_window_layers
        assert first is not None
        windows = tuple(size if layer >= first else None for layer in range(num_layers))
    return windows if any(windows) else ()


def _moe_config(text: TextConfig, defaults: MoeDefaults) -> MoeConfig | None:
    """Layers are sparse at every `decoder_sparse_step`-th, unless they are named as dense."""
    num_layers = _required("num_hidden_layers", text.num_hidden_layers)
    step, named = text.decoder_sparse_step or 1, text.mlp_only_layers or ()
    dense = frozenset(i for i in range(num_layers) if i in named or (i + 1) % step)
    num_experts = text.num_experts if text.num_experts is not None else text.num_local_experts
    if num_experts == 0 or len(dense) == num_layers:
        return None
    normalise = defaults.normalise if text.norm_topk_prob is None else text.norm_topk_prob
    num_experts, num_chosen = (
        num_experts or defaults.num_experts,
        text.num_experts_per_tok or defaults.num_chosen,
    )
    if not 1 <= num_chosen <= num_experts:
        raise checkpoint_error(
            f"config.json: num_experts_per_tok is {num_chosen} of num_experts {num_experts}"
        )
    return MoeConfig(
        num_experts=num_experts,
        num_chosen=num_chosen,
        intermediate_size=text.moe_intermediate_size or defaults.intermediate_size,
        normalise=defaults.always_normalise or normalise,
        shared_intermediate_size=_required(
            "shared_expert_intermediate_size", text.shared_expert_intermediate_size
        )
        if defaults.has_shared
        else None,
        dense_layers=dense,
    )


def _is_tied(config: CheckpointConfig, text: TextConfig) -> bool:
    """The whole model's word goes before the text half's, which may be no more than a default."""
    return bool(
        text.tie_word_embeddings if config.tie_word_embeddings is None else config.tie_word_embeddings
    )


def _reach(rope: RopeParameters, max_position: int) -> int:
    """Positions the model can use: a stretched rope may reach beyond the config's own length."""
    if rope.kind == "yarn" and rope.factor and rope.original_max_position_embeddings:
        return max(max_position, int(rope.original_max_position_embeddings * rope.factor))
    if rope.kind == "linear" and rope.factor:
        return int(max_position * rope.factor)
    return max_position


def _required(name: str, value: int | None) -> int:
    if value is None:
        raise checkpoint_error(f"config.json lacks {name}")
    return value


def _refuse_unsupported(config: CheckpointConfig, text: TextConfig) -> None:
    if text.hidden_act != "silu":
        raise checkpoint_error(f"config.json: hidden_act {text.hidden_act!r} is not supported; only silu is")
    if text.mlp_bias:
        raise checkpoint_error("config.json: mlp_bias is not supported")
    if text.picture_adapter is not None and (text.num_experts or text.num_local_experts):
        raise checkpoint_error("config.json: picture_adapter: a sparse model cannot have one")
    if bytes(config.quantization_config) not in (b"", b"null"):
        raise checkpoint_error("config.json: quantization_config: quantised checkpoints are not supported")
