"""Whisper: checkpoint names → ours, which are the checkpoint's own below its two halves."""

from __future__ import annotations

from pathlib import Path

import torch

from lm_engine.gpu_target import is_gpu
from lm_engine.layers.selection import select_kernels
from lm_engine.model import Kernels
from model_families.decoder_weights import TextTensors
from model_families.dummy_weights import open_checkpoint
from model_families.whisper.config import read_generation, read_whisper_config
from model_families.whisper.decoder import WhisperDecoder

ENCODER = ("model.encoder.", "encoder.")
DECODER = ("model.decoder.", "decoder.")


def _below(name: str, prefixes: tuple[str, ...]) -> str | None:
    prefix = next((prefix for prefix in prefixes if name.startswith(prefix)), None)
    return None if prefix is None else name.removeprefix(prefix)


def encoder_name(name: str) -> str | None:
    return _below(name, ENCODER)


def text_name(name: str) -> str | None:
    """The output head is the embedding table, also where it is stored twice."""
    return _below(name, DECODER)


def load_decoder(folder: Path, device: torch.device, dtype: torch.dtype, kernels: Kernels) -> WhisperDecoder:
    """Raises EngineError naming the tensor when one is missing, mis-shaped or unknown."""
    if kernels == "auto" and is_gpu(device):
        kernels = "reference"  # the Triton kernels are made for decoders without cross-attention
    with open_checkpoint(folder) as checkpoint:
        tensors = TextTensors(checkpoint, text_name, device, dtype)
        config = read_whisper_config(folder)
        heads = read_generation(folder).heads_of_alignment(config)
        decoder = WhisperDecoder(config, tensors, select_kernels(kernels, device, dtype), heads)
        tensors.check_all_taken()
    return decoder
