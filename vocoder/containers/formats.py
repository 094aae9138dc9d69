"""The response formats: their MIME types, codecs, and how many samples a decoder gives back.

    format  decoded samples                 because
    pcm     n                               16 bits, little-endian, no container
    wav     n                               16 bits; sizes in the header say "until the end", as for any
    stream
    flac    n                               16 bits, lossless
    opus    n * 48000 / rate                the header's pre-skip and the last page's position trim both ends
    mp3     whole frames of 576 or 1152     1,105 samples before the first, at least 576 after the last
    aac     whole frames of 1024            1,024 samples before the first, the rest of a frame after the last

A stream of mp3 or ADTS has nowhere to say how long it will be: that would stand in a header already sent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

from contracts.errors import BadRequest

OPUS_RATE = 48_000
AAC_FRAME = 1024
MP3_LEAD = 576  # LAME starts this early, and ends at least as much later, in whole frames
MPEG1_RATES = (32_000, 44_100, 48_000)


@dataclass(frozen=True)
class Codec:
    name: str  # FFmpeg's encoder
    muxer: str
    sample_format: str
    rates: tuple[int, ...]  # ascending; empty: any
    bit_rate: int | None = None
    muxer_options: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class AudioFormat:
    name: str
    mime: str
    codec: Codec | None  # None: samples as they are
    decoded: Callable[[int, int], int]  # samples encoded, their rate → samples a decoder gives

    def encoding_rate(self, sample_rate: int) -> int:
        """The rate itself where the codec takes it, otherwise the next higher one."""
        rates = self.codec.rates if self.codec else ()
        if not rates or sample_rate in rates:
            return sample_rate
        return next((rate for rate in rates if rate > sample_rate), rates[-1])


def mp3_frame(rate: int) -> int:
    return 1152 if rate in MPEG1_RATES else 576


def _same(num_samples: int, rate: int) -> int:
    return num_samples


def _opus_samples(num_samples: int, rate: int) -> int:
    return num_samples * OPUS_RATE // rate


def _mp3_samples(num_samples: int, rate: int) -> int:
    frame, whole = mp3_frame(rate), num_samples + MP3_LEAD
    padding = frame - whole % frame
    return whole + padding + (frame if padding < MP3_LEAD else 0)


def _aac_samples(num_samples: int, rate: int) -> int:
    return (ceil(num_samples / AAC_FRAME) + 1) * AAC_FRAME


_MP3 = Codec(
    "libmp3lame",
    "mp3",
    "fltp",
    (8000, 11025, 12000, 16000, 22050, 24000, 32000, 44100, 48000),
    bit_rate=96_000,
    muxer_options=(("write_xing", "0"), ("id3v2_version", "0")),
)
_OPUS = Codec(
    "libopus",
    "ogg",
    "flt",
    (8000, 12000, 16000, 24000, 48000),
    bit_rate=64_000,
    muxer_options=(("page_duration", "20000"),),  # microseconds: every packet leaves at once
)
_AAC = Codec(
    "aac",
    "adts",
    "fltp",
    (7350, 8000, 11025, 12000, 16000, 22050, 24000, 32000, 44100, 48000, 64000, 88200, 96000),
    bit_rate=96_000,
)
_FLAC = Codec("flac", "flac", "s16", (), muxer_options=(("metadata_header_padding", "0"),))

FORMATS = {
    audio_format.name: audio_format
    for audio_format in (
        AudioFormat("wav", "audio/wav", None, _same),
        AudioFormat("pcm", "audio/pcm", None, _same),
        AudioFormat("mp3", "audio/mpeg", _MP3, _mp3_samples),
        AudioFormat("opus", "audio/ogg", _OPUS, _opus_samples),
        AudioFormat("aac", "audio/aac", _AAC, _aac_samples),
        AudioFormat("flac", "audio/flac", _FLAC, _same),
    )
}


def find_format(name: str, param: str = "response_format") -> AudioFormat:
    """Raises BadRequest naming the supported ones."""
    if name not in FORMATS:
        raise BadRequest(
            f"audio format {name!r} is not supported; choose one of: {', '.join(FORMATS)}", param=param
        )
    return FORMATS[name]
