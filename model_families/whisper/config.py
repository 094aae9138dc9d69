"""Whisper's config.json and generation_config.json as plain data."""

from __future__ import annotations

from pathlib import Path

import msgspec

from lm_engine.model import DecoderConfig, RopeConfig
from model_families.checkpoint import checkpoint_error, read_config, read_json
from model_families.fields import Count, check_multiple

GENERATION_FILE = "generation_config.json"
FRAMES_PER_POSITION = 2  # mel frames that the encoder's strided convolution makes one position of
SECONDS_PER_FRAME = 0.01
SECONDS_PER_TIMESTAMP = 0.02
NORM_EPS = 1e-5


class WhisperConfig(msgspec.Struct, frozen=True, kw_only=True):
    vocab_size: Count
    num_mel_bins: Count
    d_model: Count
    encoder_layers: Count
    encoder_attention_heads: Count
    encoder_ffn_dim: Count
    decoder_layers: Count
    decoder_attention_heads: Count
    decoder_ffn_dim: Count
    max_source_positions: Count = 1500
    max_target_positions: Count = 448
    activation_function: str = "gelu"
    scale_embedding: bool = False

    def __post_init__(self) -> None:
        check_multiple("d_model", self.d_model, "encoder_attention_heads", self.encoder_attention_heads)
        check_multiple("d_model", self.d_model, "decoder_attention_heads", self.decoder_attention_heads)

    @property
    def window_frames(self) -> int:
        """Mel frames that one pass of the encoder takes (30 s of the published models)."""
        return self.max_source_positions * FRAMES_PER_POSITION


class WhisperGeneration(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint says of its decoding. `lang_to_id` and `task_to_id` are absent in English-only
    ones."""

    eos_token_id: int
    decoder_start_token_id: int
    no_timestamps_token_id: int
    suppress_tokens: tuple[int, ...] | None = None
    begin_suppress_tokens: tuple[int, ...] | None = None
    is_multilingual: bool = False
    lang_to_id: dict[str, int] = {}
    task_to_id: dict[str, int] = {}
    prev_sot_token_id: int | None = None
    max_initial_timestamp_index: int | None = None
    alignment_heads: tuple[tuple[int, int], ...] | None = None  # (layer, head)

    @property
    def no_speech_token_id(self) -> int:
        """In every vocabulary of Whisper's it stands before the token that asks for no timestamps."""
        return self.no_timestamps_token_id - 1

    @property
    def first_timestamp(self) -> int:
        """Every token from here on is a time: 0.00, 0.02, ... seconds into the window."""
        return self.no_timestamps_token_id + 1

    def heads_of_alignment(self, config: WhisperConfig) -> tuple[tuple[int, int], ...]:
        """Whose cross-attention follows the speech; where the checkpoint does not say, all of the upper
        half."""
        if self.alignment_heads is not None:
            return self.alignment_heads
        upper = range(config.decoder_layers // 2, config.decoder_layers)
        return tuple((layer, head) for layer in upper for head in range(config.decoder_attention_heads))

    @property
    def prompt_start(self) -> int | None:
        """The token before text that went before; published checkpoints name it only among what they
        suppress."""
        if self.prev_sot_token_id is not None:
            return self.prev_sot_token_id
        suppressed = self.suppress_tokens or ()
        return suppressed[-2] if len(suppressed) >= 2 else None


def read_whisper_config(folder: Path) -> WhisperConfig:
    config = read_config(folder, WhisperConfig)
    if config.activation_function != "gelu":
        raise checkpoint_error(f"activation {config.activation_function!r} is not supported, only gelu")
    return config


def read_generation(folder: Path) -> WhisperGeneration:
    return read_json(folder / GENERATION_FILE, WhisperGeneration)


def decoder_config(config: WhisperConfig) -> DecoderConfig:
    """The decoder as the engine sizes it: a sequence is the encoder's positions, then the tokens."""
    return DecoderConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.d_model,
        intermediate_size=config.decoder_ffn_dim,
        num_layers=config.decoder_layers,
        num_heads=config.decoder_attention_heads,
        num_kv_heads=config.decoder_attention_heads,
        head_dim=config.d_model // config.decoder_attention_heads,
        rms_norm_eps=NORM_EPS,
        rope=RopeConfig(theta=0.0, inv_freq=()),  # positions are learned
        max_position=config.max_source_positions + config.max_target_positions,
        tie_embeddings=True,
    )


def read_decoder_config(folder: Path) -> DecoderConfig:
    return decoder_config(read_whisper_config(folder))
