"""Small video files, made with PyAV: known frames at known times."""

from __future__ import annotations

import io
from fractions import Fraction

import av
import numpy as np

from contracts.specs import VideoSpec

QWEN2_VIDEO = VideoSpec(
    rule="qwen2_vl",
    patch_size=14,
    merge_size=2,
    temporal_patch_size=2,
    min_pixels=128 * 28 * 28,
    max_pixels=768 * 28 * 28,
)
QWEN3_VIDEO = VideoSpec(
    rule="qwen3_vl",
    patch_size=16,
    merge_size=2,
    temporal_patch_size=2,
    min_pixels=128 * 32 * 32,
    max_pixels=768 * 32 * 32,
)
TINY_VIDEO = VideoSpec(
    rule="qwen2_vl", patch_size=4, merge_size=2, temporal_patch_size=2, min_pixels=64, max_pixels=64 * 64
)


def moving(num_frames: int, width: int = 64, height: int = 48) -> list[np.ndarray]:
    """Grey frames, each brighter than the one before: a frame's number can be read off its mean."""
    return [np.full((height, width, 3), level_of(i, num_frames), np.uint8) for i in range(num_frames)]


def level_of(number: int, num_frames: int) -> int:
    return 30 + number * 200 // max(1, num_frames - 1)


def film(
    frames: list[np.ndarray],
    *,
    fps: int = 10,
    container: str = "mp4",
    codec: str = "libx264",
    times_s: list[float] | None = None,
    sound: np.ndarray | None = None,
    sound_rate: int = 16_000,
    pixel_format: str = "yuv420p",
    options: dict[str, str] | None = None,
) -> bytes:
    """`times_s`: one for each frame, else `fps`. `sound`: [channels, samples]."""
    height, width, _ = frames[0].shape
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container) as file:
        video = file.add_stream(codec, rate=fps, options=options or {})
        video.width, video.height, video.pix_fmt = width, height, pixel_format
        video.codec_context.thread_count = 1
        tick = Fraction(1, fps) if times_s is None else Fraction(1, 1000)
        video.codec_context.time_base = tick
        track = None
        if sound is not None:
            layout = "mono" if len(sound) == 1 else "stereo"
            track = file.add_stream("aac", rate=sound_rate, layout=layout)
        for number, pixels in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.time_base = tick
            frame.pts = number if times_s is None else round(times_s[number] * 1000)
            file.mux(video.encode(frame))
        file.mux(video.encode(None))
        if track is not None and sound is not None and sound.size:
            piece = av.AudioFrame.from_ndarray(np.ascontiguousarray(sound), format="fltp", layout=layout)
            piece.sample_rate = sound_rate
            piece.pts = 0
            resampler = av.AudioResampler(format="fltp", layout=layout, rate=sound_rate, frame_size=1024)
            for part in [*resampler.resample(piece), *resampler.resample(None)]:
                file.mux(track.encode(part))
            file.mux(track.encode(None))
    return buffer.getvalue()
