"""The text half of a config.json: flat or under `text_config`, old and new rope keys, as a DecoderConfig."""

from __future__ import annotations

import msgspec

from lm_engine.model import DecoderConfig
from model_families.checkpoint import checkpoint_error
from model_families.rope import RopeParameters, rope_config


class TextConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of Llama and Qwen text models. None: the family's default."""

    vocab_size: int | None = None
    hidden_size: int | None = None
    intermediate_size: int | None = None
    num_hidden_layers: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    rms_norm_eps: float | None = None
    max_position_embeddings: int | None = None
    hidden_act: str = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False
    use_sliding_window: bool | None = False
    tie_word_embeddings: bool | None = None
    rope_theta: float | None = None
    rope_scaling: RopeParameters | None = None
    rope_parameters: RopeParameters | None = None

    @property
    def rope(self) -> RopeParameters:
        return self.rope_scaling or self.rope_parameters or RopeParameters()


class CheckpointConfig(TextConfig, frozen=True, kw_only=True):
    """config.json as the decoder sees it."""

    model_type: str
    text_config: TextConfig | None = None
    quantization_config: msgspec.Raw = msgspec.Raw(b"")


class FamilyDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """What a family's config leaves unsaid, and its fixed traits."""

    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6
    max_position: int = 32_768
    head_dim: int | None = None  # None: hidden size / heads
    qkv_bias: bool | None = None  # None: `attention_bias` decides, for the output projection as well
    qk_norm: bool = False
    mrope_section: tuple[int, int, int] | None = None  # None: plain RoPE
    mrope_interleaved: bool = False


def build_decoder_config(
    config: CheckpointConfig, defaults: FamilyDefaults, *, num_deepstack_levels: int = 0
) -> DecoderConfig:
    text = config.text_config or config
    _refuse_unsupported(config, text)
    hidden_size = _required("hidden_size", text.hidden_size)
    num_heads = _required("num_attention_heads", text.num_attention_heads)
    head_dim = text.head_dim or defaults.head_dim or hidden_size // num_heads
    max_position = text.max_position_embeddings or defaults.max_position
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
        intermediate_size=_required("intermediate_size", text.intermediate_size),
        num_layers=_required("num_hidden_layers", text.num_hidden_layers),
        num_heads=num_heads,
        num_kv_heads=text.num_key_value_heads or num_heads,
        head_dim=head_dim,
        rms_norm_eps=text.rms_norm_eps if text.rms_norm_eps is not None else defaults.rms_norm_eps,
        rope=rope,
        max_position=_reach(text.rope, max_position),
        qkv_bias=text.attention_bias if defaults.qkv_bias is None else defaults.qkv_bias,
        output_bias=text.attention_bias if defaults.qkv_bias is None else False,
        qk_norm=defaults.qk_norm,
        tie_embeddings=bool(config.tie_word_embeddings or text.tie_word_embeddings),
        num_deepstack_levels=num_deepstack_levels,
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
        raise checkpoint_error(f"hidden_act {text.hidden_act!r} is not supported; only silu is")
    if text.mlp_bias:
        raise checkpoint_error("mlp_bias is not supported")
    if text.use_sliding_window:
        raise checkpoint_error("sliding-window attention is not supported")
    if bytes(config.quantization_config) not in (b"", b"null"):
        raise checkpoint_error("quantised checkpoints are not supported; use a float one")
