"""What the stages must know of a model's media and speech: plain data, so that no worker imports torch."""

from __future__ import annotations

from math import ceil
from typing import Literal

import msgspec

from contracts.params import SamplingParams

AlphaPolicy = Literal["white", "drop"]


class ImageSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Resizing rule of the Qwen-VL kind: both sides become multiples of `patch_size * merge_size`,
    the area stays within [min_pixels, max_pixels], one token per merge_size² patches.

    `alpha`: composite onto white, or drop the alpha channel as the family's reference does.
    """

    patch_size: int
    merge_size: int
    temporal_patch_size: int
    min_pixels: int
    max_pixels: int
    max_aspect_ratio: float = 200.0
    resample: Literal["bicubic", "bilinear", "lanczos"] = "bicubic"
    alpha: AlphaPolicy = "white"
    image_mean: tuple[float, float, float] = (0.48145466, 0.4578275, 0.40821073)
    image_std: tuple[float, float, float] = (0.26862954, 0.26130258, 0.27577711)

    @property
    def factor(self) -> int:
        return self.patch_size * self.merge_size

    def key(self) -> str:
        """Everything that changes the features, for the bytes_digest."""
        return msgspec.json.encode(self).decode()


class SpeechSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The speech of a model: its PCM, its voices (the first is the default) and the talker's own sampling.

    A text of T tokens is spoken in at most `extra_s + T * s_per_text_token` seconds: several times what
    people
    take, so that only a talker that never ends comes to it.
    """

    sample_rate: int  # Hz
    samples_per_frame: int
    num_code_groups: int
    voices: tuple[str, ...]
    sampling: SamplingParams = SamplingParams()
    s_per_text_token: float = 1.0
    extra_s: float = 5.0

    @property
    def frames_per_s(self) -> float:
        return self.sample_rate / self.samples_per_frame

    def max_frames_of(self, num_text_tokens: int) -> int:
        return ceil((self.extra_s + num_text_tokens * self.s_per_text_token) * self.frames_per_s)


class MediaLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds on what a client may send; each is checked before the work it bounds."""

    max_item_bytes: int = 64 << 20
    max_source_pixels: int = 100_000_000  # before resizing, from the header
    max_items_per_request: int = 64
    fetch_timeout_s: float = 10.0
    max_redirects: int = 3
    job_timeout_s: float = 30.0
    worker_memory_bytes: int = 2 << 30
    allow_private_addresses: bool = False
    media_root: str | None = None
