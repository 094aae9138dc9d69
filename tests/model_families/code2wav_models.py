"""Tiny seeded code2wav checkpoints, and the transformers model that reads them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeCode2WavConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav

TINY = {
    "codebook_size": 32,
    "num_quantizers": 4,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "sliding_window": 5,
    "upsample_rates": [3, 2],
    "upsampling_ratios": [2, 2],
    "decoder_dim": 16,
}


def seed_parameters(model: torch.nn.Module, seed: int = 0) -> None:
    """Every tensor matters and PCM stays well inside [-1, 1]."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            scale = 0.7 * tensor[0].numel() ** -0.5 if tensor.dim() > 1 else 0.2
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * scale)
            if name.endswith(("norm.weight", "gamma", "scale")):
                tensor.abs_().add_(0.5)


def build_code2wav(folder: Path, **changes) -> Qwen3OmniMoeCode2Wav:
    """Writes a checkpoint that holds code2wav alone, and gives the reference with its weights."""
    fields = TINY | changes
    reference = Qwen3OmniMoeCode2Wav(Qwen3OmniMoeCode2WavConfig(**fields)).eval()
    seed_parameters(reference)
    with torch.no_grad():
        for tensor in reference.decoder[-1].parameters():
            tensor.mul_(0.05)
    tensors = {f"code2wav.{name}": tensor.contiguous() for name, tensor in reference.state_dict().items()}
    save_file(tensors, str(folder / "model.safetensors"))
    (folder / "config.json").write_text(json.dumps({"code2wav_config": fields}))
    return reference
