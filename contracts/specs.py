"""What the stages must know of a model's media and speech: plain data, so that no worker imports torch."""

from __future__ import annotations

from math import ceil
from typing import Literal

import msgspec

from contracts.media import Modality
from contracts.params import SamplingParams

AlphaPolicy = Literal["white", "drop"]
Resample = Literal["bicubic", "bilinear", "lanczos"]
AudioTokens = Literal["whisper", "qwen2_5_omni", "qwen3_omni"]


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
    resample: Resample = "bicubic"
    alpha: AlphaPolicy = "white"
    image_mean: tuple[float, float, float] = (0.48145466, 0.4578275, 0.40821073)
    image_std: tuple[float, float, float] = (0.26862954, 0.26130258, 0.27577711)

    @property
    def factor(self) -> int:
        return self.patch_size * self.merge_size

    def key(self) -> str:
        """Everything that changes the features, for the bytes_digest."""
        return msgspec.json.encode(self).decode()


class AudioSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Log-mel features of the Whisper kind, and how many tokens the family's audio encoder makes of them.

    `tail`: what the last frames see after the end of the sound: its reflection, or zeros (families whose
    reference pads to a fixed length and masks). `window_samples` (Whisper): the sound is cut into windows of
    this length, the last one padded with zeros to it, each an item of its own with all its frames.
    """

    tokens: AudioTokens
    num_mels: int = 128
    sampling_rate: int = 16_000
    n_fft: int = 400
    hop_length: int = 160
    tail: Literal["reflect", "zeros"] = "reflect"
    min_samples: int = 1600  # shorter sound is padded with zeros to this
    max_samples: int | None = None  # longer sound is refused
    window_samples: int | None = None
    n_window: int = 50  # qwen3_omni: half the mel frames of one convolution chunk

    def num_frames(self, num_samples: int) -> int:
        """Mel frames of `num_samples` (padded to `min_samples` already)."""
        if self.tail == "zeros":
            return -(-num_samples // self.hop_length)
        return num_samples // self.hop_length

    def num_tokens(self, num_frames: int) -> int:
        """Rows that the audio encoder gives for `num_frames` mel frames."""
        if self.tokens == "whisper":
            return _halved(num_frames)
        if self.tokens == "qwen2_5_omni":
            return (_halved(num_frames) - 2) // 2 + 1
        whole, rest = divmod(num_frames, 2 * self.n_window)
        return whole * _eighth(2 * self.n_window) + _eighth(rest)

    def key(self) -> str:
        """Everything that changes the features, for the bytes_digest."""
        return msgspec.json.encode(self).decode()


class VideoSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Which frames are sampled and how large they become; one token per merge_size² patches.

    `rule`: "qwen2_vl" (also Qwen2.5-VL and both Omni families) bounds the area of a frame by
    [min_pixels, max_pixels], "qwen3_vl" the area of all sampled frames together. `frame_cap_tokens`: the
    reference's optional further cap (`cap_pixels_per_frame`), its `max_video_tokens`.
    """

    rule: Literal["qwen2_vl", "qwen3_vl"]
    patch_size: int
    merge_size: int
    temporal_patch_size: int
    min_pixels: int
    max_pixels: int
    fps: float = 2.0
    min_frames: int = 4
    max_frames: int = 768
    frame_cap_tokens: int | None = None
    max_aspect_ratio: float = 200.0
    resample: Resample = "bicubic"
    image_mean: tuple[float, float, float] = (0.48145466, 0.4578275, 0.40821073)
    image_std: tuple[float, float, float] = (0.26862954, 0.26130258, 0.27577711)

    @property
    def factor(self) -> int:
        return self.patch_size * self.merge_size

    def key(self) -> str:
        """Everything that changes the features, for the bytes_digest."""
        return msgspec.json.encode(self).decode()


class MediaSpecs(msgspec.Struct, frozen=True, kw_only=True):
    """What a model takes besides text; None: not this modality."""

    image: ImageSpec | None = None
    audio: AudioSpec | None = None
    video: VideoSpec | None = None

    @property
    def modalities(self) -> tuple[Modality, ...]:
        given: dict[Modality, object] = {"image": self.image, "audio": self.audio, "video": self.video}
        return tuple(modality for modality, spec in given.items() if spec is not None)


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
    max_source_pixels: int = 100_000_000  # before resizing, from the header; of a video: of one frame
    max_audio_s: float = 3600.0
    max_audio_channels: int = 32
    max_video_s: float = 3600.0
    max_video_source_frames: int = 36_000  # what decoding may have to walk through
    max_video_frames: int = 768  # sampled
    max_video_pixels: int = 256 << 20  # of all sampled frames together, after resizing
    max_items_per_request: int = 64
    fetch_timeout_s: float = 10.0
    max_redirects: int = 3
    job_timeout_s: float = 30.0
    worker_memory_bytes: int = 2 << 30
    allow_private_addresses: bool = False
    media_root: str | None = None


def _halved(length: int) -> int:
    """Length after a convolution of kernel 3, stride 2 and padding 1."""
    return (length - 1) // 2 + 1


def _eighth(length: int) -> int:
    return _halved(_halved(_halved(length)))
