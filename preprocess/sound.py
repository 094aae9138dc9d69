"""The one audio decoder: any container FFmpeg reads → mono float32 samples at the family's rate.

Channels are averaged before resampling (by soxr, as a stream: linear time, exact length).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import av
import numpy as np
import numpy.typing as npt
import soxr
from av.audio.frame import AudioFrame
from av.audio.stream import AudioStream
from av.container import InputContainer

from contracts.errors import MediaDecodeError, MediaTooLarge
from contracts.specs import AudioSpec, MediaLimits
from preprocess.container import check_codec, opened

Float32 = npt.NDArray[np.float32]

EMPTY = "audio_is_empty"  # error code: a file without a single sample

# Sample format → (value of silence, full scale). 24-bit samples come as the high bytes of 32-bit ones.
_SCALES = {
    "u8": (128, 1 << 7),
    "s16": (0, 1 << 15),
    "s32": (0, 1 << 31),
    "flt": (0, 1),
    "dbl": (0, 1),
}
# Integers written as floats reach 2**31; beyond that the power of a frame is no float32 any more.
_LOUDEST = 2.0**31
_MAX_WAV_CHUNKS = 1024  # before the sound
_UNKNOWN_LENGTH = 0x7FFF0000  # streams claim 0xFFFFFFFF, or about 2 GiB, which is over every limit
_MAX_PLANES = 7  # PyAV looks for a null after the last plane: beyond the frame's eight pointers is none


class Sound(NamedTuple):
    """`duration_s` is the source's; silence may have been added to reach the family's minimum."""

    samples_S: Float32
    duration_s: float


def decode_audio(data: bytes, spec: AudioSpec, limits: MediaLimits) -> Sound:
    """The first (or default) audio track. Raises MediaDecodeError (with code EMPTY when there is no sample),
    MediaTooLarge.

    Broken packets are skipped, as players do. A WAV file that ends before its sound does is refused, as a
    truncated image is; other formats do not say how long they are, and give what they hold.
    """
    _check_wav_length(data)
    with opened(data, "audio") as container:
        stream = audio_stream(container)
        if stream is None:
            raise MediaDecodeError("the file has no audio track")
        check_codec(stream, "audio")
        _check_header(container, stream, len(data), spec, limits)
        return _collect(_mono_frames(container, stream, limits), spec, limits)


def _check_wav_length(data: bytes) -> None:
    """A length that nobody knew when it was written (of a stream) promises nothing."""
    if data[:4] != b"RIFF" or data[8:12] != b"WAVE":
        return
    at = 12
    for _ in range(_MAX_WAV_CHUNKS):
        if at + 8 > len(data):
            return
        name, num_bytes = struct.unpack_from("<4sI", data, at)
        at += 8
        if name == b"data":
            num_left = len(data) - at
            if 0 < num_left < num_bytes < _UNKNOWN_LENGTH:
                raise MediaDecodeError(
                    f"the wav file is truncated: it holds {num_left} of {num_bytes} bytes of sound"
                )
            return
        at += num_bytes + num_bytes % 2


def audio_stream(container: InputContainer) -> AudioStream | None:
    stream = container.streams.best("audio")
    return stream if isinstance(stream, AudioStream) else None


def max_duration_s(spec: AudioSpec, limits: MediaLimits) -> float:
    if spec.max_samples is None:
        return limits.max_audio_s
    return min(limits.max_audio_s, spec.max_samples / spec.sampling_rate)


def _check_header(
    container: InputContainer, stream: AudioStream, num_bytes: int, spec: AudioSpec, limits: MediaLimits
) -> None:
    channels = stream.codec_context.channels
    if channels > limits.max_audio_channels:
        raise MediaTooLarge(f"the audio has {channels} channels; the limit is {limits.max_audio_channels}")
    claimed_s = 0.0 if container.duration is None else container.duration / av.time_base
    if stream.codec_context.name.startswith("pcm_") and stream.bit_rate:
        # Streamed WAV files claim a size that nobody knew; what the file can hold is certain.
        claimed_s = min(claimed_s, 8 * num_bytes / stream.bit_rate)
    if claimed_s > max_duration_s(spec, limits):
        raise _too_long(claimed_s, spec, limits)


def _too_long(seconds: float, spec: AudioSpec, limits: MediaLimits) -> MediaTooLarge:
    limit_s = max_duration_s(spec, limits)
    return MediaTooLarge(f"the audio is {seconds:.0f} s long or more; the limit is {limit_s:g} s")


def _mono_frames(
    container: InputContainer, stream: AudioStream, limits: MediaLimits
) -> Iterator[tuple[int, Float32]]:
    """(sample rate, mono samples) of each decoded frame."""
    stream.codec_context.thread_count = 1
    broken: av.FFmpegError | None = None
    decoded_any = False
    packets = container.demux(stream)
    while True:
        try:
            frames = next(packets).decode()
        except StopIteration:
            break
        except av.FFmpegError as error:
            broken = error
            continue
        for frame in frames:
            assert isinstance(frame, AudioFrame)
            if frame.layout.nb_channels > limits.max_audio_channels:
                raise MediaTooLarge(f"the audio has more than {limits.max_audio_channels} channels")
            decoded_any = True
            yield frame.sample_rate, _to_mono(frame)
    if broken is not None and not decoded_any:
        raise broken


def _to_mono(frame: AudioFrame) -> Float32:
    name = frame.format.name.removesuffix("p")
    if name not in _SCALES:
        raise MediaDecodeError(f"unsupported sample format {frame.format.name!r}")
    silence, full_scale = _SCALES[name]
    if frame.format.is_planar and frame.layout.nb_channels > _MAX_PLANES:
        (frame,) = av.AudioResampler(format=frame.format.packed.name).resample(frame)
    values = frame.to_ndarray()
    if not frame.format.is_planar:  # one row of interleaved channels
        values = values.reshape(-1, frame.layout.nb_channels).T
    if full_scale == 1:
        _check_values(values)
    values_CS = values.astype(np.float32) if full_scale <= 1 << 15 else values.astype(np.float64)
    mono_S: npt.NDArray[np.floating] = values_CS.mean(axis=0)
    if silence or full_scale != 1:
        mono_S = (mono_S - silence) / full_scale
    return mono_S.astype(np.float32)


def _check_values(values: npt.NDArray[Any]) -> None:
    loudest = float(max(values.max(initial=0.0), -values.min(initial=0.0)))  # NaN goes through both
    if not math.isfinite(loudest):
        raise MediaDecodeError("the audio holds samples that are not numbers")
    if loudest > _LOUDEST:
        raise MediaDecodeError(
            f"the audio holds samples far beyond full scale: {loudest:.3g} where 1 is full"
        )


def _collect(frames: Iterator[tuple[int, Float32]], spec: AudioSpec, limits: MediaLimits) -> Sound:
    source_rate: int | None = None
    resampler: soxr.ResampleStream | None = None
    num_source, pieces = 0, []
    for rate, mono_S in frames:
        if source_rate is None:
            source_rate = rate
            if rate != spec.sampling_rate:
                resampler = soxr.ResampleStream(rate, spec.sampling_rate, 1, dtype="float32")
        if rate != source_rate:
            raise MediaDecodeError(f"the audio changes its sample rate from {source_rate} to {rate}")
        num_source += len(mono_S)
        if num_source > max_duration_s(spec, limits) * rate:
            raise _too_long(num_source / rate, spec, limits)
        pieces.append(mono_S if resampler is None else resampler.resample_chunk(mono_S))
    if source_rate is None or num_source == 0:
        raise MediaDecodeError("the audio is empty: it holds no samples", code=EMPTY)
    if resampler is not None:
        pieces.append(resampler.resample_chunk(np.empty(0, np.float32), last=True))
    samples_S = np.concatenate(pieces)
    missing = max(0, spec.min_samples - len(samples_S))
    return Sound(np.pad(samples_S, (0, missing)), num_source / source_rate)
