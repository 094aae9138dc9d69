"""The one video decoder: when a file's frames are shown, which of them are sampled, and their pixels.

The packets' time stamps say how many frames there are and when, without decoding any: what a header claims
about rate or number is a hint. Shapes: T frames, H rows, W columns.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass

import av
import numpy as np
from av.container import InputContainer
from av.stream import Disposition
from av.video.frame import VideoFrame
from av.video.stream import VideoStream

from contracts.errors import MediaDecodeError, MediaTooLarge
from contracts.specs import MediaLimits, Resample
from preprocess.container import check_codec, malformed, opened
from preprocess.resampling import Resize, UInt8, resize_by_pillow

DEFAULT_FPS = 24.0  # of files without any notion of time, as in the reference
MIN_READABLE = 0.5  # share of the sampled frames


@dataclass(frozen=True)
class Timeline:
    """When frames are shown. `ticks` are their time stamps in ascending order; None where a file has none
    (its frames are then known by their number). `times_s` count from the first frame; `fps` is the mean where
    the rate is not constant."""

    ticks: tuple[int, ...] | None
    times_s: tuple[float, ...]
    fps: float
    is_uniform: bool

    @property
    def duration_s(self) -> float:
        return len(self.times_s) / self.fps

    def shown_at(self, time_s: float) -> int:
        """The number of the frame on the screen `time_s` after the first."""
        return max(0, bisect.bisect_right(self.times_s, time_s + 1e-6) - 1)


@dataclass(frozen=True)
class OpenedVideo:
    """`size` is width, height, turned upright by `quarter_turns` (counterclockwise)."""

    timeline: Timeline
    size: tuple[int, int]
    quarter_turns: int
    has_audio: bool


def open_video(data: bytes, limits: MediaLimits) -> OpenedVideo:
    """Reads all packets and decodes the first frame. Raises MediaDecodeError, MediaTooLarge."""
    with opened(data, "video") as container:
        stream = _video_stream(container)
        has_audio = container.streams.best("audio") is not None
        _check_header(container, stream, limits)
        timeline = _timeline(container, stream, limits)
    if timeline.duration_s > limits.max_video_s:
        raise _too_long(timeline.duration_s, limits)
    with malformed("video"):
        first = next(_decoded(data, limits), None)
    if first is None:
        raise MediaDecodeError("the video holds no readable frame")
    quarter_turns = round(first.rotation / 90) % 4
    size = (first.height, first.width) if quarter_turns % 2 else (first.width, first.height)
    return OpenedVideo(timeline, size, quarter_turns, has_audio)


def decode_frames(
    data: bytes, video: OpenedVideo, numbers: list[int], limits: MediaLimits
) -> Iterator[VideoFrame]:
    """One frame for each of the ascending `numbers`. In place of one that cannot be read comes the one before
    it. Raises MediaDecodeError when most of them cannot."""
    ticks = video.timeline.ticks
    wanted = [number if ticks is None else ticks[number] for number in numbers]
    frames = ((_key(frame, number, ticks), frame) for number, frame in enumerate(_decoded(data, limits)))
    num_missing = 0
    shown: VideoFrame | None = None
    with malformed("video"):
        key, frame = next(frames, (None, None))
        for target in wanted:
            while key is not None and key < target:
                shown = frame
                key, frame = next(frames, (None, None))
            shown_now = frame if key == target or shown is None else shown
            num_missing += key != target
            if shown_now is None or num_missing > len(wanted) * (1 - MIN_READABLE):
                raise MediaDecodeError("most of the video's frames cannot be read: it is corrupt")
            yield shown_now


def resized_rgb(
    frame: VideoFrame,
    quarter_turns: int,
    height: int,
    width: int,
    resample: Resample,
    resize: Resize = resize_by_pillow,
) -> UInt8:
    """[height, width, 3], upright."""
    pixels_HWC: UInt8 = np.ascontiguousarray(
        np.rot90(frame.to_ndarray(format="rgb24"), quarter_turns), np.uint8
    )
    if pixels_HWC.shape[:2] == (height, width):
        return pixels_HWC
    return resize(pixels_HWC, (width, height), resample)


def _video_stream(container: InputContainer) -> VideoStream:
    for stream in container.streams.video:
        if not stream.disposition & Disposition.attached_pic:  # a cover picture is no video
            check_codec(stream, "video")
            return stream
    raise MediaDecodeError("the file has no video track")


def _check_header(container: InputContainer, stream: VideoStream, limits: MediaLimits) -> None:
    _check_size(stream.codec_context.width, stream.codec_context.height, limits)
    claimed_s = 0.0 if container.duration is None else container.duration / av.time_base
    if claimed_s > limits.max_video_s:
        raise _too_long(claimed_s, limits)


def _check_size(width: int, height: int, limits: MediaLimits) -> None:
    if width * height > limits.max_source_pixels:
        raise MediaTooLarge(
            f"the video's frames have {width}x{height} pixels; the limit is {limits.max_source_pixels} in all"
        )


def _too_long(seconds: float, limits: MediaLimits) -> MediaTooLarge:
    return MediaTooLarge(f"the video is {seconds:.0f} s long; the limit is {limits.max_video_s:g} s")


def _timeline(container: InputContainer, stream: VideoStream, limits: MediaLimits) -> Timeline:
    stamps: list[int | None] = []
    last_duration = 0
    packets = container.demux(stream)
    while True:
        try:
            packet = next(packets, None)
        except av.FFmpegError:  # the rest of the file cannot be read
            break
        if packet is None:
            break
        if packet.size == 0 or packet.is_discard:
            continue
        stamps.append(packet.pts)
        last_duration = packet.duration or last_duration
        if len(stamps) > limits.max_video_source_frames:
            raise MediaTooLarge(
                f"the video has more than {limits.max_video_source_frames} frames; send a part of it, or at a"
                " lower frame rate"
            )
    if not stamps:
        raise MediaDecodeError("the video is empty: it holds no frames")
    rate = stream.guessed_rate or stream.average_rate
    known = sorted({stamp for stamp in stamps if stamp is not None})
    if len(known) < len(stamps) or stream.time_base is None:
        fps = float(rate) if rate else DEFAULT_FPS
        return Timeline(None, tuple(i / fps for i in range(len(stamps))), fps, True)
    return timeline_of(known, float(stream.time_base), last_duration, float(rate) if rate else None)


def timeline_of(stamps: list[int], tick_s: float, last_duration: int, rate: float | None) -> Timeline:
    """`rate`: the frames per second that the file claims; believed where all time stamps agree."""
    total = len(stamps)
    times_s = [(stamp - stamps[0]) * tick_s for stamp in stamps]
    if rate and all(abs(time_s - i / rate) < 1.5 * tick_s + 1e-6 for i, time_s in enumerate(times_s)):
        return Timeline(tuple(stamps), tuple(i / rate for i in range(total)), rate, True)
    if total == 1:
        return Timeline(tuple(stamps), (0.0,), rate or DEFAULT_FPS, True)
    mean_s = times_s[-1] / (total - 1)
    duration_s = times_s[-1] + (last_duration * tick_s or mean_s)
    return Timeline(tuple(stamps), tuple(times_s), total / duration_s, False)


def _key(frame: VideoFrame, number: int, ticks: tuple[int, ...] | None) -> int:
    if ticks is None or frame.pts is None:
        return number if ticks is None else ticks[min(number, len(ticks) - 1)]
    return frame.pts


def _decoded(data: bytes, limits: MediaLimits) -> Iterator[VideoFrame]:
    """All frames that can be decoded, in the order in which they are shown."""
    with opened(data, "video") as container:
        stream = _video_stream(container)
        stream.codec_context.thread_count = 1
        packets = container.demux(stream)
        while True:
            try:
                packet = next(packets, None)
                frames = [] if packet is None else packet.decode()
            except av.FFmpegError:
                continue
            if packet is None:
                return
            for frame in frames:
                assert isinstance(frame, VideoFrame)
                _check_size(frame.width, frame.height, limits)
                yield frame
