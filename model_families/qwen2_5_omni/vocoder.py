"""Qwen2.5-Omni's token2wav: its config, and its checkpoint names → ours."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import torch
from torch import nn

from model_families.checkpoint import Checkpoint, checkpoint_error, read_config
from model_families.dummy_weights import open_checkpoint
from model_families.fields import Count, check_multiple
from model_families.module_weights import Rename, fill_module
from model_families.qwen2_5_omni.speakers import read_speakers
from model_families.rope import RopeParameters
from model_families.snakes import finish_snakes, snake_name
from vocoder.token2wav.bigvgan import BigVgan, BigVganConfig
from vocoder.token2wav.dit import Dit, DitConfig, Voice
from vocoder.token2wav.model import Token2Wav
from vocoder.token2wav.noise import BLOCK as NOISE_BLOCK
from vocoder.token2wav.speaker import SpeakerConfig

SAMPLE_RATE = 24_000
DIT_PREFIX = "token2wav.code2wav_dit_model."
BIGVGAN_PREFIX = "token2wav.code2wav_bigvgan_model."


class DitFields(msgspec.Struct, frozen=True, kw_only=True):
    """`dit_config`; the defaults are the published model's."""

    hidden_size: Count = 1024
    num_hidden_layers: Count = 22
    num_attention_heads: Count = 16
    head_dim: Count = 64
    ff_mult: Count = 2
    emb_dim: Count = 512
    num_embeds: Count = 8193
    repeats: Count = 2
    mel_dim: Count = 80
    block_size: Count = 24
    look_ahead_layers: tuple[int, ...] = (10,)
    look_backward_layers: tuple[int, ...] = (0, 20)
    rope_theta: float = 10_000.0
    rope_parameters: RopeParameters | None = None
    enc_emb_dim: Count = 192
    enc_dim: Count = 128
    enc_channels: tuple[Count, ...] = (256, 256, 256, 256, 768)
    enc_kernel_sizes: tuple[Count, ...] = (5, 3, 3, 3, 1)
    enc_dilations: tuple[Count, ...] = (1, 2, 3, 4, 1)
    enc_attention_channels: Count = 64
    enc_res2net_scale: Count = 2
    enc_se_channels: Count = 64

    def __post_init__(self) -> None:
        check_multiple("block_size", self.block_size, "repeats", self.repeats)
        if self.repeats * self.mel_dim % NOISE_BLOCK:
            raise ValueError(f"mel_dim: repeats * mel_dim wants to be a multiple of {NOISE_BLOCK}")
        channels = self.enc_channels
        if not len(channels) == len(self.enc_kernel_sizes) == len(self.enc_dilations) >= 3:
            raise ValueError("enc_channels, enc_kernel_sizes and enc_dilations want one length, 3 or more")
        if sum(channels[1:-1]) != channels[-1]:
            raise ValueError("enc_channels: the last wants to be the sum of those between first and last")

    def to_config(self) -> DitConfig:
        rope = self.rope_parameters or RopeParameters()
        if rope.kind != "default":
            raise checkpoint_error(f"token2wav with rope {rope.kind} is not supported")
        reference = SpeakerConfig(
            mel_dim=self.mel_dim,
            out_dim=self.enc_dim,
            channels=self.enc_channels,
            kernels=self.enc_kernel_sizes,
            dilations=self.enc_dilations,
            attention_channels=self.enc_attention_channels,
            groups=self.enc_res2net_scale,
            gate_channels=self.enc_se_channels,
        )
        return DitConfig(
            hidden_size=self.hidden_size,
            num_layers=self.num_hidden_layers,
            num_heads=self.num_attention_heads,
            head_dim=self.head_dim,
            ff_mult=self.ff_mult,
            code_dim=self.emb_dim,
            num_codes=self.num_embeds + 1,
            repeats=self.repeats,
            mel_dim=self.mel_dim,
            speaker_dim=self.enc_emb_dim,
            block_size=self.block_size,
            look_back_layers=self.look_backward_layers,
            look_ahead_layers=self.look_ahead_layers,
            rope_theta=rope.rope_theta or self.rope_theta,
            reference=reference,
        )


class BigVganFields(msgspec.Struct, frozen=True, kw_only=True):
    """`bigvgan_config`; the defaults are the published model's."""

    mel_dim: Count = 80
    upsample_initial_channel: Count = 1536
    resblock_kernel_sizes: tuple[Count, ...] = (3, 7, 11)
    resblock_dilation_sizes: tuple[tuple[Count, ...], ...] = ((1, 3, 5), (1, 3, 5), (1, 3, 5))
    upsample_rates: tuple[Count, ...] = (5, 3, 2, 2, 2, 2)
    upsample_kernel_sizes: tuple[Count, ...] = (11, 7, 4, 4, 4, 4)

    def __post_init__(self) -> None:
        rates, kernels = self.upsample_rates, self.upsample_kernel_sizes
        pairs = zip(rates, kernels, strict=False)
        if not len(rates) == len(kernels) >= 1 or any(k < r or (k - r) % 2 for r, k in pairs):
            raise ValueError(
                "upsample_kernel_sizes: want one for each of upsample_rates, larger by an even number"
            )
        if not len(self.resblock_kernel_sizes) == len(self.resblock_dilation_sizes) >= 1:
            raise ValueError("resblock_kernel_sizes and resblock_dilation_sizes want one length, 1 or more")

    def to_config(self) -> BigVganConfig:
        return BigVganConfig(
            mel_dim=self.mel_dim,
            width=self.upsample_initial_channel,
            block_kernels=self.resblock_kernel_sizes,
            block_dilations=self.resblock_dilation_sizes,
            upsample_rates=self.upsample_rates,
            upsample_kernels=self.upsample_kernel_sizes,
        )


class Token2WavFields(msgspec.Struct, frozen=True):
    dit_config: DitFields = DitFields()
    bigvgan_config: BigVganFields = BigVganFields()


class _OmniConfig(msgspec.Struct, frozen=True):
    token2wav_config: Token2WavFields = Token2WavFields()


def read_token2wav_config(folder: Path) -> tuple[DitConfig, BigVganConfig]:
    fields = read_config(folder, _OmniConfig).token2wav_config
    return fields.dit_config.to_config(), fields.bigvgan_config.to_config()


def load_vocoder(
    folder: Path, device: torch.device, dtype: torch.dtype, *, chunk_blocks: int | None = 3
) -> Token2Wav:
    """Always in float32, whatever `dtype`: the published model is only defined there. `chunk_blocks`: see
    Token2Wav.

    Raises EngineError when the checkpoint does not fit its config, or has no voices.
    """
    dit_config, bigvgan_config = read_token2wav_config(folder)
    with torch.device("meta"):
        dit, bigvgan = Dit(dit_config), BigVgan(bigvgan_config)
    with open_checkpoint(folder) as checkpoint:
        _fill(checkpoint, dit, dit_name, "token2wav transformer", device)
        _fill(checkpoint, bigvgan, bigvgan_name, "token2wav vocoder", device)
    return Token2Wav(dit, bigvgan, _voices(folder, dit, device), SAMPLE_RATE, chunk_blocks=chunk_blocks)


def _fill(checkpoint: Checkpoint, module: nn.Module, rename: Rename, part: str, device: torch.device) -> None:
    fill_module(
        checkpoint, module, rename, part=part, device=device, dtype=torch.float32, convert=finish_snakes
    )


@torch.inference_mode()
def _voices(folder: Path, dit: Dit, device: torch.device) -> dict[str, Voice]:
    return {
        name: dit.voice(speaker.reference_1TM[0].to(device), speaker.condition_1E[0].to(device))
        for name, speaker in read_speakers(folder).items()
    }


_SPEAKER = r"input_embed\.spk_encoder"
_DIT_RULES = (
    (r"time_embed\.time_mlp\.0\.(\w+)", r"time1.\1"),
    (r"time_embed\.time_mlp\.2\.(\w+)", r"time2.\1"),
    (r"text_embed\.codec_embed\.weight", r"codes.weight"),
    (r"input_embed\.proj\.(\w+)", r"entry.\1"),
    (rf"{_SPEAKER}\.blocks\.0\.conv\.(\w+)", r"speaker_encoder.entry.\1"),
    (rf"{_SPEAKER}\.blocks\.(\d+)\.tdnn([12])\.conv\.(\w+)", r"speaker_encoder.blocks.\1.conv\2.\3"),
    (
        rf"{_SPEAKER}\.blocks\.(\d+)\.res2net_block\.blocks\.(\d+)\.conv\.(\w+)",
        r"speaker_encoder.blocks.\1.grouped.convs.\2.\3",
    ),
    (rf"{_SPEAKER}\.blocks\.(\d+)\.se_block\.conv1\.(\w+)", r"speaker_encoder.blocks.\1.squeeze.\2"),
    (rf"{_SPEAKER}\.blocks\.(\d+)\.se_block\.conv2\.(\w+)", r"speaker_encoder.blocks.\1.gate.\2"),
    (rf"{_SPEAKER}\.mfa\.conv\.(\w+)", r"speaker_encoder.merge.\1"),
    (rf"{_SPEAKER}\.asp\.tdnn\.conv\.(\w+)", r"speaker_encoder.score1.\1"),
    (rf"{_SPEAKER}\.asp\.conv\.(\w+)", r"speaker_encoder.score2.\1"),
    (rf"{_SPEAKER}\.fc\.(\w+)", r"speaker_encoder.exit.\1"),
    (r"transformer_blocks\.(\d+)\.attn_norm\.linear\.(\w+)", r"layers.\1.modulation.\2"),
    (r"transformer_blocks\.(\d+)\.attn\.to_([qkv])\.(\w+)", r"layers.\1.attention.\2.\3"),
    (r"transformer_blocks\.(\d+)\.attn\.to_out\.0\.(\w+)", r"layers.\1.attention.out.\2"),
    (r"transformer_blocks\.(\d+)\.ff\.ff\.0\.(\w+)", r"layers.\1.up.\2"),
    (r"transformer_blocks\.(\d+)\.ff\.ff\.3\.(\w+)", r"layers.\1.down.\2"),
    (r"norm_out\.linear\.(\w+)", r"modulation.\1"),
    (r"proj_out\.(\w+)", r"exit.\1"),
)
_BIGVGAN_RULES = (
    (r"conv_pre\.(\w+)", r"entry.\1"),
    (r"ups\.(\d+)\.0\.(\w+)", r"upsamplings.\1.\2"),
    (r"resblocks\.(\d+)\.convs([12])\.(\d+)\.(\w+)", r"blocks.\1.convs\2.\3.\4"),
    (r"resblocks\.(\d+)\.activations\.(\d+)\.act\.(\w+)", r"blocks.\1.activations.\2.snake.\3"),
    (r"activation_post\.act\.(\w+)", r"activation.snake.\1"),
    (r"conv_post\.weight", r"exit.weight"),
)
_COMPUTED = (".inv_freq", ".filter")  # buffers that some checkpoints store


def _renamed(name: str, prefix: str, rules: tuple[tuple[str, str], ...]) -> str | None:
    """A tensor nobody knows keeps its name, so that it shows as left over."""
    if not name.startswith(prefix) or name.endswith(_COMPUTED):
        return None
    name = name.removeprefix(prefix)
    for pattern, template in rules:
        if match := re.fullmatch(pattern, name):
            return match.expand(template)
    return name


def dit_name(name: str) -> str | None:
    """Their first speaker block is our entry, so ours count from one less."""
    ours = _renamed(name, DIT_PREFIX, _DIT_RULES)
    if ours is None:
        return None
    return re.sub(r"^(speaker_encoder\.blocks)\.(\d+)", lambda m: f"{m[1]}.{int(m[2]) - 1}", ours)


def bigvgan_name(name: str) -> str | None:
    """Their activations alternate between those before the first and the second convolutions."""
    ours = _renamed(name, BIGVGAN_PREFIX, _BIGVGAN_RULES)
    if ours is None:
        return None
    alternating = re.compile(r"\.activations\.(\d+)")
    return snake_name(alternating.sub(lambda m: f".activations{int(m[1]) % 2 + 1}.{int(m[1]) // 2}", ours))
