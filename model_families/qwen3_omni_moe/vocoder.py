"""Qwen3-Omni's code2wav: its config, and its checkpoint names → ours."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import torch

from model_families.checkpoint import checkpoint_error, read_config
from model_families.dummy_weights import open_checkpoint
from model_families.fields import Count, check_multiple
from model_families.module_weights import fill_module
from model_families.rope import RopeParameters
from model_families.snakes import finish_snakes, snake_name
from vocoder.code2wav import Code2Wav, Code2WavConfig, Code2WavNetwork
from vocoder.transformer import TransformerConfig

SAMPLE_RATE = 24_000
PREFIX = "code2wav."


class Code2WavFields(msgspec.Struct, frozen=True, kw_only=True):
    """`code2wav_config` of a config.json; the defaults are the published model's."""

    codebook_size: Count = 2048
    num_quantizers: Count = 16
    hidden_size: Count = 1024
    intermediate_size: Count = 3072
    num_hidden_layers: Count = 8
    num_attention_heads: Count = 16
    num_key_value_heads: Count = 16
    head_dim: Count | None = None
    attention_bias: bool = False
    sliding_window: Count = 72
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    rope_parameters: RopeParameters | None = None
    upsampling_ratios: tuple[Count, ...] = (2, 2)
    upsample_rates: tuple[Count, ...] = (8, 5, 4, 3)
    decoder_dim: Count = 1536

    def __post_init__(self) -> None:
        heads = self.num_attention_heads
        check_multiple("num_attention_heads", heads, "num_key_value_heads", self.num_key_value_heads)
        check_multiple(
            "decoder_dim", self.decoder_dim, "2 to the upsample_rates", 2 ** len(self.upsample_rates)
        )
        if self.head_dim is None:
            check_multiple("hidden_size", self.hidden_size, "twice num_attention_heads,", 2 * heads)
        else:
            check_multiple("head_dim", self.head_dim, "a pair,", 2)

    def to_config(self) -> Code2WavConfig:
        rope = self.rope_parameters or RopeParameters()
        if self.hidden_act != "silu" or rope.kind != "default":
            raise checkpoint_error(f"code2wav with {self.hidden_act} and rope {rope.kind} is not supported")
        transformer = TransformerConfig(
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_layers=self.num_hidden_layers,
            num_heads=self.num_attention_heads,
            num_kv_heads=self.num_key_value_heads,
            head_dim=self.head_dim or self.hidden_size // self.num_attention_heads,
            window=self.sliding_window,
            rope_theta=rope.rope_theta or self.rope_theta,
            norm_eps=self.rms_norm_eps,
            attention_bias=self.attention_bias,
        )
        return Code2WavConfig(
            transformer=transformer,
            codebook_size=self.codebook_size,
            num_code_groups=self.num_quantizers,
            upsampling_ratios=self.upsampling_ratios,
            upsample_rates=self.upsample_rates,
            decoder_width=self.decoder_dim,
            sample_rate=SAMPLE_RATE,
        )


class _OmniConfig(msgspec.Struct, frozen=True):
    code2wav_config: Code2WavFields = Code2WavFields()


def read_code2wav_config(folder: Path) -> Code2WavConfig:
    return read_config(folder, _OmniConfig).code2wav_config.to_config()


def load_vocoder(folder: Path, device: torch.device, dtype: torch.dtype) -> Code2Wav:
    """Raises EngineError when the checkpoint does not fit its config."""
    config = read_code2wav_config(folder)
    with torch.device("meta"):
        network = Code2WavNetwork(config)
    names = Names(len(config.upsample_rates))
    with open_checkpoint(folder) as checkpoint:
        fill_module(
            checkpoint,
            network,
            names.ours,
            part="code2wav",
            device=device,
            dtype=dtype,
            convert=finish_snakes,
        )
    return Code2Wav(network)


class Names:
    """Their decoder is one list: the entry convolution, the blocks, a snake, the exit convolution."""

    def __init__(self, num_blocks: int) -> None:
        last = num_blocks + 1
        rules = (
            (r"code_embedding\.weight", r"codes"),
            (r"pre_transformer\.norm\.weight", r"transformer.norm.weight"),
            (
                r"pre_transformer\.layers\.(\d+)\.self_attn\.([qkv])_proj\.(\w+)",
                r"transformer.layers.\1.attention.\2.\3",
            ),
            (
                r"pre_transformer\.layers\.(\d+)\.self_attn\.o_proj\.(\w+)",
                r"transformer.layers.\1.attention.out.\2",
            ),
            (
                r"pre_transformer\.layers\.(\d+)\.mlp\.(gate|up|down)_proj\.weight",
                r"transformer.layers.\1.\2.weight",
            ),
            (
                r"pre_transformer\.layers\.(\d+)\.input_layernorm\.weight",
                r"transformer.layers.\1.attention_norm.weight",
            ),
            (
                r"pre_transformer\.layers\.(\d+)\.post_attention_layernorm\.weight",
                r"transformer.layers.\1.mlp_norm.weight",
            ),
            (
                r"pre_transformer\.layers\.(\d+)\.self_attn_layer_scale\.scale",
                r"transformer.layers.\1.attention_scale",
            ),
            (r"pre_transformer\.layers\.(\d+)\.mlp_layer_scale\.scale", r"transformer.layers.\1.mlp_scale"),
            (r"upsample\.(\d+)\.0\.conv\.(\w+)", r"stages.\1.upsampling.\2"),
            (r"upsample\.(\d+)\.1\.dwconv\.conv\.(\w+)", r"stages.\1.block.depthwise.\2"),
            (r"upsample\.(\d+)\.1\.norm\.(\w+)", r"stages.\1.block.norm.\2"),
            (r"upsample\.(\d+)\.1\.pwconv1\.(\w+)", r"stages.\1.block.up.\2"),
            (r"upsample\.(\d+)\.1\.pwconv2\.(\w+)", r"stages.\1.block.down.\2"),
            (r"upsample\.(\d+)\.1\.gamma", r"stages.\1.block.scale"),
            (r"decoder\.0\.conv\.(\w+)", r"entry.\1"),
            (rf"decoder\.{last}\.(alpha|beta)", r"snake.\1"),
            (rf"decoder\.{last + 1}\.conv\.(\w+)", r"exit.\1"),
            (r"decoder\.(\d+)\.block\.0\.(alpha|beta)", r"blocks.\1.snake.\2"),
            (r"decoder\.(\d+)\.block\.1\.conv\.(\w+)", r"blocks.\1.upsampling.\2"),
            (r"decoder\.(\d+)\.block\.(\d+)\.act([12])\.(alpha|beta)", r"blocks.\1.units.\2.snake\3.\4"),
            (r"decoder\.(\d+)\.block\.(\d+)\.conv([12])\.conv\.(\w+)", r"blocks.\1.units.\2.conv\3.\4"),
        )
        self._rules = [(re.compile(pattern), ours) for pattern, ours in rules]

    def ours(self, name: str) -> str | None:
        """A tensor nobody knows keeps its name, so that it shows as left over."""
        if not name.startswith(PREFIX):
            return None
        name = name.removeprefix(PREFIX)
        for pattern, template in self._rules:
            if match := pattern.fullmatch(name):
                return _finish(match.expand(template))
        return name


def _finish(name: str) -> str:
    """Blocks count from 0 after the entry, units from 0 after a block's snake and upsampling."""
    name = re.sub(r"^blocks\.(\d+)", lambda m: f"blocks.{int(m[1]) - 1}", name)
    name = re.sub(r"\.units\.(\d+)", lambda m: f".units.{int(m[1]) - 2}", name)
    return snake_name(name)
