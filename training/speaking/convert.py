"""What was trained → what is shipped: checkpoint names, and the sections of config.json that go with them.

`python -m training.speaking.convert WORK OUT` writes OUT/speaking.safetensors and OUT/speaking.json.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from model_families.default_model.shipped import write_shipped
from training.speaking.sizes import NANO, TINY, Sizes
from training.speaking.talker import TalkerNet
from training.speaking.train_decoder import open_decoder
from training.speaking.train_talker import open_talker
from vocoder.code2wav import Code2WavNetwork

RULES = (
    (r"codes", r"code_embedding.weight"),
    (r"transformer\.norm\.weight", r"pre_transformer.norm.weight"),
    (
        r"transformer\.layers\.(\d+)\.attention\.([qkv])\.(\w+)",
        r"pre_transformer.layers.\1.self_attn.\2_proj.\3",
    ),
    (r"transformer\.layers\.(\d+)\.attention\.out\.(\w+)", r"pre_transformer.layers.\1.self_attn.o_proj.\2"),
    (r"transformer\.layers\.(\d+)\.(gate|up|down)\.weight", r"pre_transformer.layers.\1.mlp.\2_proj.weight"),
    (
        r"transformer\.layers\.(\d+)\.attention_norm\.weight",
        r"pre_transformer.layers.\1.input_layernorm.weight",
    ),
    (
        r"transformer\.layers\.(\d+)\.mlp_norm\.weight",
        r"pre_transformer.layers.\1.post_attention_layernorm.weight",
    ),
    (
        r"transformer\.layers\.(\d+)\.attention_scale",
        r"pre_transformer.layers.\1.self_attn_layer_scale.scale",
    ),
    (r"transformer\.layers\.(\d+)\.mlp_scale", r"pre_transformer.layers.\1.mlp_layer_scale.scale"),
    (r"stages\.(\d+)\.upsampling\.(\w+)", r"upsample.\1.0.conv.\2"),
    (r"stages\.(\d+)\.block\.depthwise\.(\w+)", r"upsample.\1.1.dwconv.conv.\2"),
    (r"stages\.(\d+)\.block\.norm\.(\w+)", r"upsample.\1.1.norm.\2"),
    (r"stages\.(\d+)\.block\.up\.(\w+)", r"upsample.\1.1.pwconv1.\2"),
    (r"stages\.(\d+)\.block\.down\.(\w+)", r"upsample.\1.1.pwconv2.\2"),
    (r"stages\.(\d+)\.block\.scale", r"upsample.\1.1.gamma"),
    (r"entry\.(\w+)", r"decoder.0.conv.\1"),
    (r"blocks\.(\d+)\.snake\.(\w+)", r"decoder.<\1+1>.block.0.\2"),
    (r"blocks\.(\d+)\.upsampling\.(\w+)", r"decoder.<\1+1>.block.1.conv.\2"),
    (r"blocks\.(\d+)\.units\.(\d+)\.snake([12])\.(\w+)", r"decoder.<\1+1>.block.<\2+2>.act\3.\4"),
    (r"blocks\.(\d+)\.units\.(\d+)\.conv([12])\.(\w+)", r"decoder.<\1+1>.block.<\2+2>.conv\3.conv.\4"),
    (r"snake\.(\w+)", r"decoder.<blocks+1>.\1"),
    (r"exit\.(\w+)", r"decoder.<blocks+2>.conv.\1"),
)


def code2wav_name(ours: str, num_blocks: int) -> str:
    for pattern, template in RULES:
        if match := re.fullmatch(pattern, ours):
            name = match.expand(template).replace("<blocks", f"<{num_blocks}")
            name = re.sub(r"<(\d+)\+(\d)>", lambda found: str(int(found[1]) + int(found[2])), name)
            return "code2wav." + name.replace(".frequency", ".alpha").replace(".gain", ".beta")
    raise AssertionError(ours)


def code2wav_tensors(decoder: Code2WavNetwork) -> dict[str, Tensor]:
    num_blocks = len(decoder.config.upsample_rates)
    tensors = {}
    for ours, value in decoder.state_dict().items():
        if ours.endswith(".frequency"):
            value = value[:, 0].log()
        elif ours.endswith(".gain"):
            value = -value[:, 0].log()
        tensors[code2wav_name(ours, num_blocks)] = value
    return tensors


def talker_tensors(net: TalkerNet) -> dict[str, Tensor]:
    return {f"talker.{name}": value for name, value in net.state_dict().items()}


def sections(sizes: Sizes) -> dict[str, Any]:
    """Of config.json."""
    talker, control = sizes.talker, sizes.control
    common = {
        "model_type": "qwen3_omni_moe_talker_text",
        "hidden_size": talker.hidden_size,
        "num_attention_heads": talker.num_heads,
        "num_key_value_heads": talker.num_heads,
        "head_dim": talker.head_dim,
        "rms_norm_eps": talker.norm_eps,
        "hidden_act": "silu",
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
    }
    rope = {"rope_type": "default", "rope_theta": talker.rope_theta}
    half = talker.head_dim // 2
    section = [half - 2 * (half // 3), half // 3, half // 3]
    text = common | {
        "vocab_size": sizes.vocabulary,
        "intermediate_size": talker.intermediate_size,
        "num_hidden_layers": talker.num_layers,
        "num_experts": 0,
        "rope_parameters": rope | {"mrope_section": section},
    }
    predictor = common | {
        "vocab_size": sizes.codebook_size,
        "intermediate_size": talker.predictor_intermediate_size,
        "num_hidden_layers": talker.predictor_layers,
        "rope_parameters": rope,
    }
    return {
        "enable_audio_output": True,
        "spelling": "phonemes",
        "talker_config": {
            "text_config": text,
            "code_predictor_config": predictor,
            "num_code_groups": sizes.num_groups,
            "thinker_hidden_size": talker.text_width,
            "accept_hidden_layer": 1,
            "codec_eos_token_id": control["eos"],
            "codec_nothink_id": control["nothink"],
            "codec_think_bos_id": control["think_bos"],
            "codec_think_eos_id": control["think_eos"],
            "codec_pad_id": control["pad"],
            "codec_bos_id": control["bos"],
            "speaker_id": {"heart": control["voice"]},
        },
        "code2wav_config": {
            "codebook_size": sizes.codebook_size,
            "num_quantizers": sizes.num_groups,
            "hidden_size": sizes.width,
            "intermediate_size": sizes.intermediate,
            "num_hidden_layers": sizes.layers,
            "num_attention_heads": sizes.heads,
            "num_key_value_heads": sizes.heads,
            "sliding_window": sizes.window,
            "rope_theta": 10_000.0,
            "rms_norm_eps": 1e-5,
            "upsampling_ratios": list(sizes.upsampling_ratios),
            "upsample_rates": list(sizes.upsample_rates),
            "decoder_dim": sizes.decoder_width,
        },
    }


def convert(work: Path, out: Path, sizes: Sizes) -> None:
    decoder = open_decoder(work, sizes, torch.device("cpu"))
    net = open_talker(work, sizes, torch.device("cpu"))
    write_shipped(out / "speaking.safetensors", talker_tensors(net) | code2wav_tensors(decoder))
    (out / "speaking.json").write_text(json.dumps(sections(sizes), indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--sizes", choices=("nano", "tiny"), default="nano")
    given = parser.parse_args()
    convert(given.work, given.out, NANO if given.sizes == "nano" else TINY)


if __name__ == "__main__":
    main()
