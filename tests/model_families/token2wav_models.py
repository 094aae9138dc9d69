"""A tiny seeded token2wav checkpoint with two voices, and the transformers model that reads it."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniToken2WavConfig
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniToken2WavModel

CODES = 33
MEL = 16
DIT = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "head_dim": 16,
    "emb_dim": 16,
    "block_size": 6,
    "look_ahead_layers": [1],
    "look_backward_layers": [0, 2],
    "num_embeds": CODES,
    "mel_dim": MEL,
    "enc_emb_dim": 8,
    "enc_dim": 8,
    "enc_channels": [16, 16, 16, 16, 48],
    "enc_attention_channels": 8,
    "enc_se_channels": 8,
}
BIGVGAN = {
    "mel_dim": MEL,
    "upsample_initial_channel": 16,
    "resblock_kernel_sizes": [3, 5],
    "resblock_dilation_sizes": [[1, 3, 2], [1, 2, 1]],
    "upsample_rates": [5, 2],
    "upsample_kernel_sizes": [11, 4],
}


def build_token2wav(folder: Path) -> tuple[Qwen2_5OmniToken2WavModel, dict[str, dict]]:
    """Writes a checkpoint that holds token2wav alone; gives the reference with its weights, and its
    voices."""
    reference = Qwen2_5OmniToken2WavModel(Qwen2_5OmniToken2WavConfig(dit_config=DIT, bigvgan_config=BIGVGAN))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in reference.parameters():
            scale = 0.7 * tensor[0].numel() ** -0.5 if tensor.dim() > 1 else 0.2
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * scale)
        reference.code2wav_bigvgan_model.conv_post.weight.mul_(0.3)
    voices = {
        name: {
            "bos_token": index,
            "cond": torch.randn(1, DIT["enc_emb_dim"], generator=generator),
            "ref_mel": torch.randn(1, 20, MEL, generator=generator),
        }
        for index, name in enumerate(("Amber", "Basalt"))
    }
    tensors = {f"token2wav.{name}": tensor.contiguous() for name, tensor in reference.state_dict().items()}
    save_file(tensors, str(folder / "model.safetensors"))
    torch.save(voices, folder / "spk_dict.pt")
    config = {"token2wav_config": {"dit_config": DIT, "bigvgan_config": BIGVGAN}}
    (folder / "config.json").write_text(json.dumps(config))
    return reference.eval(), voices
