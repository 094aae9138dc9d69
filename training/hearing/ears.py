"""The server's own ears in training: sounds of unlike lengths side by side, padded; which weights are
trained.

Shapes: B sounds, M mels, F mel frames, R rows (two frames each), W width.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional

from model_families.audio.layers import AudioBlock, sinusoids
from model_families.default_model.omni import EARS, EARS_MORE, WHISPER_LAYERS, whisper_ears
from model_families.omnistage_nano.ears import NanoEars, ears_name
from model_families.qwen2_5_omni.audio_encoder import Qwen25OmniAudioConfig
from model_families.vision.attention import GroupedAttention

FROZEN_LAYERS = 2  # and the convolutions: what they know of real voices stays
TRAINED = (*(f"blocks.{n}." for n in range(FROZEN_LAYERS, EARS["encoder_layers"])), "norm.", "letters.")
DROPPED = 0.1  # of what a trained block adds, in training
NEW = (*(f"blocks.{n}." for n in range(WHISPER_LAYERS, EARS["encoder_layers"])), "letters.")
CONFIG = msgspec.convert({**EARS, **EARS_MORE, "output_dim": 576}, Qwen25OmniAudioConfig)


def new_ears(whisper: Path, tokenizer: Tokenizer) -> NanoEars:
    """Whisper's encoder, then layers that pass on what they are given, then letters at random."""
    ears = NanoEars(CONFIG, GroupedAttention(), tokenizer, 1)
    torch.manual_seed(20260103)
    nn.init.normal_(ears.letters.weight, std=0.02)
    nn.init.zeros_(ears.letters.bias)
    nn.init.zeros_(ears.words.weight)
    own = ears.state_dict()
    for theirs, value in whisper_ears(load_file(whisper)).items():
        name = ears_name(f"thinker.{theirs}")
        assert name is not None, theirs
        assert name in own, theirs
        own[name] = value.float()
    ears.load_state_dict(own)
    for name, parameter in ears.named_parameters():
        parameter.requires_grad_(name.startswith(TRAINED))
    return ears


def trained_tensors(ears: NanoEars) -> dict[str, Tensor]:
    return {name: value for name, value in ears.state_dict().items() if name.startswith(TRAINED)}


def letter_logits(ears: NanoEars, mel_BMF: Tensor, frames_B: Tensor) -> Tensor:
    """[B, R, letters]: as the server computes them, for every sound by itself."""
    inside = torch.arange(mel_BMF.shape[2], device=mel_BMF.device) < frames_B[:, None]
    with torch.no_grad():
        x = functional.gelu(ears.conv1(mel_BMF)) * inside[:, None]
        x_BRW = functional.gelu(ears.conv2(x)).transpose(1, 2)
        x_BRW = x_BRW.float() + sinusoids(x_BRW.shape[1], x_BRW.shape[2], x_BRW.device)
    rows_B = num_rows(frames_B)
    heard = torch.arange(x_BRW.shape[1], device=mel_BMF.device) < rows_B[:, None]
    mask = heard[:, None, None, :].expand(-1, 1, x_BRW.shape[1], -1)
    for index, block in enumerate(ears.blocks):
        assert isinstance(block, AudioBlock)
        with torch.set_grad_enabled(index >= FROZEN_LAYERS and torch.is_grad_enabled()):
            x_BRW = _block(block, x_BRW, mask, DROPPED if ears.training and index >= FROZEN_LAYERS else 0.0)
    logits: Tensor = ears.letters(ears.norm(x_BRW))
    return logits


def num_rows(frames_B: Tensor) -> Tensor:
    return (frames_B - 1) // 2 + 1


def _block(block: AudioBlock, x: Tensor, mask: Tensor, dropped: float) -> Tensor:
    attention = block.attention
    h = block.norm1(x)
    q, k, v = (
        part(h).unflatten(2, (attention.num_heads, -1)).transpose(1, 2)
        for part in (attention.q, attention.k, attention.v)
    )
    mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    x = x + functional.dropout(attention.out(mixed.transpose(1, 2).flatten(2)), dropped)
    return x + functional.dropout(block.down(functional.gelu(block.up(block.norm2(x)))), dropped)
