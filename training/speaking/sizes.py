"""The sizes of the speaking half: one place for training, for the checkpoint's config, and for the tests.

A frame of codes is 80 ms. The talker's vocabulary is the first codebook and then the control codes.
"""

from __future__ import annotations

from dataclasses import dataclass

from vocoder.code2wav import Code2WavConfig
from vocoder.transformer import TransformerConfig

SAMPLE_RATE = 24_000
NUM_CONTROL_CODES = 1024  # what the family never draws, but for the end


@dataclass(frozen=True)
class TalkerSizes:
    hidden_size: int = 256
    intermediate_size: int = 1024
    num_layers: int = 6
    num_heads: int = 4
    predictor_intermediate_size: int = 512
    predictor_layers: int = 2
    head_dim: int = 64
    text_width: int = 576
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6


@dataclass(frozen=True)
class Sizes:
    codebook_size: int = 192  # symbols of the speech package
    num_groups: int = 9  # phonemes, pitch, loudness, and where in the text this is
    width: int = 256
    intermediate: int = 512
    layers: int = 3
    heads: int = 4
    window: int = 16  # frames; no shorter than the crops of training
    upsampling_ratios: tuple[int, ...] = (2, 2)
    upsample_rates: tuple[int, ...] = (8, 5, 4, 3)
    decoder_width: int = 384
    talker: TalkerSizes = TalkerSizes()

    @property
    def pointer(self) -> int:
        """The group that points into the text."""
        return self.num_groups - 1

    @property
    def vocabulary(self) -> int:
        return self.codebook_size + NUM_CONTROL_CODES

    @property
    def control(self) -> dict[str, int]:
        """Config names of the control codes, and theirs."""
        first = self.codebook_size
        names = ("pad", "bos", "eos", "nothink", "think_bos", "think_eos", "voice")
        return {name: first + index for index, name in enumerate(names)}

    @property
    def code2wav(self) -> Code2WavConfig:
        transformer = TransformerConfig(
            hidden_size=self.width,
            intermediate_size=self.intermediate,
            num_layers=self.layers,
            num_heads=self.heads,
            num_kv_heads=self.heads,
            head_dim=self.width // self.heads,
            window=self.window,
            rope_theta=10_000.0,
            norm_eps=1e-5,
            attention_bias=False,
        )
        return Code2WavConfig(
            transformer=transformer,
            codebook_size=self.codebook_size,
            num_code_groups=self.num_groups,
            upsampling_ratios=self.upsampling_ratios,
            upsample_rates=self.upsample_rates,
            decoder_width=self.decoder_width,
            sample_rate=SAMPLE_RATE,
        )


NANO = Sizes()
TINY = Sizes(
    width=16,
    intermediate=24,
    layers=1,
    heads=2,
    window=4,
    decoder_width=32,
    talker=TalkerSizes(
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=2,
        predictor_intermediate_size=32,
        predictor_layers=1,
        head_dim=16,
        text_width=576,
    ),
)
