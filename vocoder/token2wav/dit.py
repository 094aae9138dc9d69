"""The diffusion transformer: the velocity that carries noise to a mel, given codes and a voice.

Attention stays inside blocks of frames, but for a few layers that see one block back or ahead; so every
layer costs
the same per frame, however long the sequence. x is [batch, time, width].
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from vocoder.token2wav.speaker import SpeakerConfig, SpeakerEncoder

NORM_EPS = 1e-6
TIME_FEATURES = 256
TIME_SCALE = 1000.0
TIME_BASE = 10_000.0


@dataclass(frozen=True)
class DitConfig:
    hidden_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    ff_mult: int
    code_dim: int
    num_codes: int
    repeats: int  # mel frames per code
    mel_dim: int
    speaker_dim: int
    block_size: int  # mel frames
    look_back_layers: tuple[int, ...]
    look_ahead_layers: tuple[int, ...]
    rope_theta: float
    reference: SpeakerConfig

    def __post_init__(self) -> None:
        assert self.block_size % self.repeats == 0


@dataclass(frozen=True, eq=False)
class Voice:
    """What a voice adds to every frame: rows are [with the voice, without it]."""

    reference_2E: Tensor
    speaker_2S: Tensor


def time_features(time: Tensor) -> Tensor:
    """[1, TIME_FEATURES]: sines, then cosines, of a scalar."""
    half = TIME_FEATURES // 2
    exponent = torch.arange(half, device=time.device, dtype=torch.float32) * -(
        math.log(TIME_BASE) / (half - 1)
    )
    angle = TIME_SCALE * time * exponent.exp()
    return torch.cat([angle.sin(), angle.cos()])[None]


class BlockAttention(nn.Module):
    """Only the first head is rotated, over neighbouring pairs, as the model was trained."""

    def __init__(self, config: DitConfig, *, back: bool, ahead: bool) -> None:
        super().__init__()
        inner = config.num_heads * config.head_dim
        self.head_dim, self.block_size = config.head_dim, config.block_size
        self.shifts = tuple(range(-1 if back else 0, 2 if ahead else 1))
        self.q = nn.Linear(config.hidden_size, inner)
        self.k = nn.Linear(config.hidden_size, inner)
        self.v = nn.Linear(config.hidden_size, inner)
        self.out = nn.Linear(inner, config.hidden_size)

    def forward(self, x_BTW: Tensor, cos_TP: Tensor, sin_TP: Tensor) -> Tensor:
        num_frames = x_BTW.shape[1]
        padding = -num_frames % self.block_size
        q_BNHSD = self._blocks(self._rotate(self._split(self.q(x_BTW)), cos_TP, sin_TP), padding)
        k_BNHSD = self._blocks(self._rotate(self._split(self.k(x_BTW)), cos_TP, sin_TP), padding)
        v_BNHSD = self._blocks(self._split(self.v(x_BTW)), padding)
        num_blocks = q_BNHSD.shape[1]
        key_N1K = self._key_frames(num_blocks, x_BTW.device)[:, None]
        y_BNHSD = functional.scaled_dot_product_attention(
            q_BNHSD,
            self._neighbours(k_BNHSD),
            self._neighbours(v_BNHSD),
            attn_mask=((key_N1K >= 0) & (key_N1K < num_frames))[:, None],
        )
        y_BTW = y_BNHSD.transpose(2, 3).reshape(x_BTW.shape[0], num_blocks * self.block_size, -1)
        out: Tensor = self.out(y_BTW[:, :num_frames])
        return out

    def _split(self, x_BTW: Tensor) -> Tensor:
        return x_BTW.view(*x_BTW.shape[:2], -1, self.head_dim)

    def _rotate(self, x_BTHD: Tensor, cos_TP: Tensor, sin_TP: Tensor) -> Tensor:
        even, odd = x_BTHD[:, :, 0, 0::2], x_BTHD[:, :, 0, 1::2]
        turned = torch.stack([even * cos_TP - odd * sin_TP, odd * cos_TP + even * sin_TP], dim=-1)
        return torch.cat([turned.flatten(2)[:, :, None], x_BTHD[:, :, 1:]], dim=2)

    def _blocks(self, x_BTHD: Tensor, padding: int) -> Tensor:
        batch, _, heads, width = x_BTHD.shape
        padded = functional.pad(x_BTHD, (0, 0, 0, 0, 0, padding))
        return padded.view(batch, -1, self.block_size, heads, width).transpose(2, 3)

    def _neighbours(self, x_BNHSD: Tensor) -> Tensor:
        """Keys of each block: its own, and those of the neighbours it sees. What wraps around is masked."""
        return torch.cat([x_BNHSD.roll(-shift, dims=1) for shift in self.shifts], dim=3)

    def _key_frames(self, num_blocks: int, device: torch.device) -> Tensor:
        """[blocks, keys]: the frame of each key, outside of the sequence where there is none."""
        block_N1 = torch.arange(num_blocks, device=device)[:, None] * self.block_size
        offset_K = torch.arange(
            self.shifts[0] * self.block_size, (self.shifts[-1] + 1) * self.block_size, device=device
        )
        return block_N1 + offset_K


class DitLayer(nn.Module):
    def __init__(self, config: DitConfig, index: int) -> None:
        super().__init__()
        width = config.hidden_size
        self.modulation = nn.Linear(width, 6 * width)
        self.attention = BlockAttention(
            config, back=index in config.look_back_layers, ahead=index in config.look_ahead_layers
        )
        self.up = nn.Linear(width, width * config.ff_mult)
        self.down = nn.Linear(width * config.ff_mult, width)

    def forward(self, x_BTW: Tensor, time_1W: Tensor, cos_TP: Tensor, sin_TP: Tensor) -> Tensor:
        modulation = self.modulation(time_1W).chunk(6, dim=-1)
        attention_shift, attention_scale, attention_gate, mlp_shift, mlp_scale, mlp_gate = modulation
        y_BTW = _norm(x_BTW) * (1 + attention_scale) + attention_shift
        x_BTW = x_BTW + attention_gate * self.attention(y_BTW, cos_TP, sin_TP)
        y_BTW = _norm(x_BTW) * (1 + mlp_scale) + mlp_shift
        out: Tensor = x_BTW + mlp_gate * self.down(functional.gelu(self.up(y_BTW), approximate="tanh"))
        return out


def _norm(x_BTW: Tensor) -> Tensor:
    return functional.layer_norm(x_BTW, x_BTW.shape[-1:], eps=NORM_EPS)


class Dit(nn.Module):
    def __init__(self, config: DitConfig) -> None:
        super().__init__()
        self.config = config
        width = config.hidden_size
        self.codes = nn.Embedding(config.num_codes, config.code_dim)
        self.speaker_encoder = SpeakerEncoder(config.reference)
        frame = config.mel_dim + config.reference.out_dim + config.code_dim + config.speaker_dim
        self.entry = nn.Linear(frame, width)
        self.time1 = nn.Linear(TIME_FEATURES, width)
        self.time2 = nn.Linear(width, width)
        self.layers = nn.ModuleList(DitLayer(config, index) for index in range(config.num_layers))
        self.modulation = nn.Linear(width, 2 * width)
        self.exit = nn.Linear(width, config.mel_dim)

    def voice(self, reference_TM: Tensor, speaker_S: Tensor) -> Voice:
        references = torch.stack([reference_TM, torch.zeros_like(reference_TM)])
        speakers = torch.stack([speaker_S, torch.zeros_like(speaker_S)])
        return Voice(self.speaker_encoder(references), speakers)

    def frame_conditions(self, codes_BN: Tensor, voices: list[Voice]) -> Tensor:
        """[2 * batch, frames, width]: all that enters a frame beside its mel, with the voice and codes, then
        without them (code 0, no voice)."""
        codes = torch.cat([codes_BN, torch.zeros_like(codes_BN)])
        codes_BTC = self.codes(codes).repeat_interleave(self.config.repeats, dim=1)
        reference_B1E = torch.stack([v.reference_2E for v in voices], dim=1).flatten(0, 1)[:, None]
        speaker_B1S = torch.stack([v.speaker_2S for v in voices], dim=1).flatten(0, 1)[:, None]
        widths = [self.config.mel_dim, reference_B1E.shape[-1], codes_BTC.shape[-1], speaker_B1S.shape[-1]]
        _, reference_W, code_W, speaker_W = torch.split(self.entry.weight, widths, dim=1)
        of_voice = functional.linear(reference_B1E, reference_W) + functional.linear(speaker_B1S, speaker_W)
        return functional.linear(codes_BTC, code_W, self.entry.bias) + of_voice

    def rotation(self, num_frames: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """cos and sin [frames, pairs]."""
        half = torch.arange(0, self.config.head_dim, 2, dtype=torch.float32, device=device)
        frequency_P = self.config.rope_theta ** -(half / self.config.head_dim)
        angle_TP = torch.arange(num_frames, device=device)[:, None].float() * frequency_P
        return angle_TP.cos(), angle_TP.sin()

    def forward(
        self, mel_BTM: Tensor, time: Tensor, conditions_BTW: Tensor, rotation: tuple[Tensor, Tensor]
    ) -> Tensor:
        time_1W = functional.silu(self.time2(functional.silu(self.time1(time_features(time)))))
        x_BTW = functional.linear(mel_BTM, self.entry.weight[:, : self.config.mel_dim]) + conditions_BTW
        for layer in self.layers:
            x_BTW = layer(x_BTW, time_1W, *rotation)
        scale, shift = self.modulation(time_1W).chunk(2, dim=-1)
        out: Tensor = self.exit(_norm(x_BTW) * (1 + scale) + shift)
        return out
