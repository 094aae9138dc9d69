"""The server's own decoder from codes to sound, in training: run from the beginning of a stream,
differentiable."""

from __future__ import annotations

import torch
from torch import Tensor

from training.speaking.sizes import Sizes
from vocoder.code2wav import Code2WavNetwork
from vocoder.layers import Snake
from vocoder.streaming import Level, Slot, StreamBatch


class Beginning(StreamBatch):
    """Streams at their first frame whose state nobody needs afterwards. Differentiable."""

    def __init__(self, batch: int, device: torch.device) -> None:
        self._batch, self._device = batch, device
        self.num_frames_B = torch.zeros(batch, dtype=torch.int64, device=device)

    def read(self, slot: Slot) -> Tensor:
        return torch.zeros(self._batch, *slot.shape, device=self._device)

    def write(self, slot: Slot, value: Tensor) -> None:
        return None

    def blank_void(self, x_BCT: Tensor, level: Level) -> Tensor:
        x_BCT[..., : level.void].zero_()
        return x_BCT


def quicken(decoder: Code2WavNetwork) -> None:
    """Takes the fused kernels where there is a GPU."""
    if decoder.codes.device.type == "cuda":
        from training.speaking.fused_snake import FusedSnake

        for module in decoder.modules():
            if isinstance(module, Snake):
                module.__class__ = FusedSnake


def new_decoder(sizes: Sizes) -> Code2WavNetwork:
    decoder = Code2WavNetwork(sizes.code2wav)
    draw_decoder(decoder)
    return decoder


def speak(decoder: Code2WavNetwork, x_BTW: Tensor) -> Tensor:
    pcm_BS = decoder.synthesise(x_BTW, Beginning(x_BTW.shape[0], x_BTW.device))
    return pcm_BS[:, decoder.level.void :]


@torch.no_grad()
def draw_decoder(decoder: Code2WavNetwork) -> None:
    """Random weights that keep the scale of what passes."""
    for name, parameter in decoder.named_parameters():
        last = name.rpartition(".")[2]
        if last in ("frequency", "gain"):
            parameter.fill_(1.0)
        elif last in ("scale", "attention_scale", "mlp_scale"):
            parameter.fill_(0.2)
        elif parameter.ndim == 1:
            parameter.fill_(1.0 if last == "weight" else 0.0)
        elif last == "codes":
            parameter.normal_()
        else:
            fan_in = parameter.shape[1:].numel()
            if "upsampling" in name:  # [in, out, kernel]: an output sample sums kernel / stride taps
                fan_in = parameter.shape[0] * (2 if "blocks" in name else 1)
            gain = 0.1 if name.startswith("exit") else 0.7  # quiet at first: what is clipped learns nothing
            parameter.normal_(std=gain * fan_in**-0.5)


@torch.no_grad()
def keep_snakes_positive(decoder: Code2WavNetwork) -> None:
    """The checkpoint stores logarithms of both."""
    for name, parameter in decoder.named_parameters():
        if name.endswith((".frequency", ".gain")):
            parameter.clamp_(min=1e-2)
