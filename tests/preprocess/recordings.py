"""Small sound files, made with PyAV, and the audio specs of the families."""

from __future__ import annotations

import io
import struct

import av
import numpy as np

from contracts.specs import AudioSpec

QWEN3_OMNI = AudioSpec(tokens="qwen3_omni")
QWEN2_5_OMNI = AudioSpec(tokens="qwen2_5_omni", tail="zeros", max_samples=300 * 16_000)
QWEN3_ASR = AudioSpec(tokens="qwen3_omni", min_samples=8000)
WHISPER = AudioSpec(tokens="whisper", num_mels=80, window_samples=30 * 16_000)
TINY_AUDIO = AudioSpec(tokens="qwen3_omni", num_mels=8)


def tone(seconds: float, rate: int = 16_000, hertz: float = 440.0, amplitude: float = 0.5) -> np.ndarray:
    """[1, samples] float32."""
    time_s = np.arange(round(seconds * rate)) / rate
    return (amplitude * np.sin(2 * np.pi * hertz * time_s)).astype(np.float32)[None]


def stereo(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    return np.concatenate([left, right])


def record(
    channels_CS: np.ndarray, rate: int, container: str, codec: str, sample_format: str | None = None
) -> bytes:
    """A sound file. Integers are scaled from [-1, 1]; encoders that want another format get it converted."""
    layout = {1: "mono", 2: "stereo", 6: "5.1", 8: "7.1"}[len(channels_CS)]
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container) as file:
        stream = file.add_stream(codec, rate=rate, layout=layout)
        if sample_format is not None:
            stream.codec_context.format = sample_format
        interleaved = np.ascontiguousarray(channels_CS.T.reshape(1, -1))
        frame = av.AudioFrame.from_ndarray(interleaved, format="flt", layout=layout)
        frame.sample_rate = rate
        frame.pts = 0
        resampler = av.AudioResampler(
            format=stream.codec_context.format.name, layout=layout, rate=rate, frame_size=1024
        )
        pieces = [*resampler.resample(frame), *resampler.resample(None)]
        for piece in pieces:
            file.mux(stream.encode(piece))
        file.mux(stream.encode(None))
    return buffer.getvalue()


def wav(
    values: np.ndarray,
    rate: int = 16_000,
    *,
    channels: int = 1,
    tag: int = 1,
    claimed_bytes: int | None = None,
) -> bytes:
    """A RIFF WAVE file written by hand: `values` as they are, interleaved. `tag` 1 integer PCM, 3 float."""
    body = values.tobytes()
    width = values.dtype.itemsize
    size = len(body) if claimed_bytes is None else claimed_bytes
    head = struct.pack("<HHIIHH", tag, channels, rate, rate * channels * width, channels * width, 8 * width)
    return (
        b"RIFF"
        + struct.pack("<I", min(size + 36, 0xFFFFFFFF))
        + b"WAVEfmt "
        + struct.pack("<I", len(head))
        + head
        + b"data"
        + struct.pack("<I", size)
        + body
    )


def int16(channels_CS: np.ndarray) -> np.ndarray:
    return np.round(channels_CS.T.reshape(-1) * 32767).astype("<i2")
