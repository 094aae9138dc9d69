"""From encoded bytes to items with their features in the arena: what a worker does for each recipe.

`prepare` reads as much as it takes to know the features' size; `write` makes them, in the place granted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from av.video.frame import VideoFrame

from contracts.digests import ContentDigest, Digester
from contracts.errors import MediaDecodeError, MediaTooLarge
from contracts.media import FeatureRef, MediaItem
from contracts.specs import AudioSpec, ImageSpec, MediaLimits
from preprocess.arena import ArenaMapping
from preprocess.images import OpenedImage, decode_image, open_image
from preprocess.mel import Float32, log_mel
from preprocess.recipes import AudioRecipe, ImageRecipe, Recipe, VideoRecipe
from preprocess.resampling import Resize, resize_by_pillow
from preprocess.resize import ResizedShape, resized_shape
from preprocess.sampling import frame_size, sample_positions, whole_frames
from preprocess.sound import EMPTY, decode_audio
from preprocess.video import OpenedVideo, decode_frames, open_video, resized_rgb

ALIGNMENT = 64


class Place:
    """A block of the arena and the identity of the source whose features go there."""

    def __init__(
        self, arena: ArenaMapping, offset: int, nbytes: int, bytes_digest: ContentDigest, digester: Digester
    ) -> None:
        self._arena = arena
        self._next, self._end = offset, offset + nbytes
        self.bytes_digest = bytes_digest
        self.digester = digester

    def take(self, shape: tuple[int, ...], dtype: str) -> tuple[FeatureRef, np.ndarray]:
        """The next free part of the block, as an array to write to."""
        nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        ref = FeatureRef(self._arena.name, self._next, nbytes, dtype, shape)
        self._next += aligned(nbytes)
        assert ref.offset + nbytes <= self._end
        return ref, self._arena.view(ref)


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Prepared(Protocol):
    @property
    def nbytes(self) -> int:
        """Of the block that `write` needs."""
        ...

    def write(self, place: Place) -> tuple[MediaItem, ...]: ...


def prepare(recipe: Recipe, data: bytes, limits: MediaLimits, resize: Resize = resize_by_pillow) -> Prepared:
    """Raises MediaError kinds. Reads an image's header and a video's packets only; decodes a sound (its
    length is known no earlier)."""
    match recipe:
        case ImageRecipe(spec, budget):
            opened = open_image(data, limits.max_source_pixels)
            return PreparedImage(opened, resized_shape(*opened.size, spec, budget), spec, resize)
        case AudioRecipe(spec):
            return prepare_audio(data, spec, limits)
        case VideoRecipe():
            return prepare_video(data, recipe, limits, resize)


@dataclass(frozen=True)
class PreparedImage:
    opened: OpenedImage
    shape: ResizedShape
    spec: ImageSpec
    resize: Resize

    @property
    def nbytes(self) -> int:
        return self.shape.nbytes

    def write(self, place: Place) -> tuple[MediaItem, ...]:
        ref, pixels_HWC = place.take((self.shape.height, self.shape.width, 3), "uint8")
        decode_image(self.opened, self.shape, self.spec, self.resize, pixels_HWC)
        item = MediaItem(
            modality="image",
            bytes_digest=place.bytes_digest,
            pixel_digest=place.digester.of_array(pixels_HWC),
            num_tokens=self.shape.num_tokens,
            grid_thw=self.shape.grid_thw,
            source_size=self.opened.size,
            features=ref,
        )
        return (item,)


@dataclass(frozen=True)
class PreparedAudio:
    """`windows`: (samples, seconds of sound in them), one item each."""

    windows: tuple[tuple[Float32, float], ...]
    spec: AudioSpec
    of_video: bool = False

    @property
    def nbytes(self) -> int:
        return sum(aligned(4 * self.spec.num_mels * self._num_frames(w)) for w, _ in self.windows)

    def write(self, place: Place) -> tuple[MediaItem, ...]:
        start_s, items = 0.0, []
        for samples_S, duration_s in self.windows:
            num_frames = self._num_frames(samples_S)
            ref, stored_MF = place.take((self.spec.num_mels, num_frames), "float32")
            log_mel(samples_S, self.spec, stored_MF)
            items.append(
                MediaItem(
                    modality="audio",
                    bytes_digest=place.bytes_digest,
                    pixel_digest=place.digester.of_array(samples_S),
                    num_tokens=self.spec.num_tokens(num_frames),
                    num_frames=num_frames,
                    start_s=start_s,
                    duration_s=duration_s,
                    of_video=self.of_video,
                    features=ref,
                )
            )
            start_s += duration_s
        return tuple(items)

    def _num_frames(self, samples_S: Float32) -> int:
        return self.spec.num_frames(len(samples_S))


def prepare_audio(
    data: bytes, spec: AudioSpec, limits: MediaLimits, *, of_video: bool = False
) -> PreparedAudio:
    sound = decode_audio(data, spec, limits)
    length = spec.window_samples
    if length is None:
        return PreparedAudio(((sound.samples_S, sound.duration_s),), spec, of_video)
    windows = []
    for start in range(0, len(sound.samples_S), length):
        piece_S = sound.samples_S[start : start + length]
        rest_s = sound.duration_s - start / spec.sampling_rate
        windows.append(
            (np.pad(piece_S, (0, length - len(piece_S))), min(rest_s, length / spec.sampling_rate))
        )
    return PreparedAudio(tuple(windows), spec, of_video)


@dataclass(frozen=True)
class PreparedVideo:
    """`numbers` of the frames to sample, ascending; they are all that is kept of the video."""

    data: bytes
    opened: OpenedVideo
    numbers: list[int]
    shape_THWC: tuple[int, int, int, int]  # with temporal padding
    recipe: VideoRecipe
    limits: MediaLimits
    sound: PreparedAudio | None
    resize: Resize

    @property
    def nbytes(self) -> int:
        return aligned(math.prod(self.shape_THWC)) + (0 if self.sound is None else self.sound.nbytes)

    def write(self, place: Place) -> tuple[MediaItem, ...]:
        ref, stored_THWC = place.take(self.shape_THWC, "uint8")
        self._fill(stored_THWC)
        spec, timeline = self.recipe.spec, self.opened.timeline
        num_padded, height, width, _ = self.shape_THWC
        grid = (num_padded // spec.temporal_patch_size, height // spec.patch_size, width // spec.patch_size)
        seconds_per_grid = spec.temporal_patch_size * timeline.duration_s / len(self.numbers)
        timestamps_s = self._timestamps_s()
        video = MediaItem(
            modality="video",
            bytes_digest=place.bytes_digest,
            # Positions in the prompt depend on the timing: equal pixels at other times are another item.
            pixel_digest=place.digester.of_array(stored_THWC, f"{seconds_per_grid}|{timestamps_s}"),
            num_tokens=math.prod(grid) // spec.merge_size**2,
            grid_thw=grid,
            source_size=self.opened.size,
            num_frames=len(self.numbers),
            duration_s=timeline.duration_s,
            timestamps_s=timestamps_s,
            seconds_per_grid=seconds_per_grid,
            features=ref,
        )
        return (video,) if self.sound is None else (video, *self.sound.write(place))

    def _fill(self, stored_THWC: np.ndarray) -> None:
        _, height, width, _ = self.shape_THWC
        previous: VideoFrame | None = None
        for i, frame in enumerate(decode_frames(self.data, self.opened, self.numbers, self.limits)):
            if frame is previous:
                stored_THWC[i] = stored_THWC[i - 1]
            else:
                stored_THWC[i] = resized_rgb(
                    frame,
                    self.opened.quarter_turns,
                    height,
                    width,
                    self.recipe.spec.resample,
                    self.resize,
                )
            previous = frame
        stored_THWC[len(self.numbers) :] = stored_THWC[len(self.numbers) - 1]

    def _timestamps_s(self) -> tuple[float, ...]:
        """The middle between the first and the last frame of each temporal patch."""
        times_s = [self.opened.timeline.times_s[number] for number in self.numbers]
        times_s += times_s[-1:] * (self.shape_THWC[0] - len(times_s))
        patch = self.recipe.spec.temporal_patch_size
        return tuple((times_s[i] + times_s[i + patch - 1]) / 2 for i in range(0, len(times_s), patch))


def prepare_video(
    data: bytes, recipe: VideoRecipe, limits: MediaLimits, resize: Resize = resize_by_pillow
) -> PreparedVideo:
    spec, opened = recipe.spec, open_video(data, limits)
    timeline = opened.timeline
    positions = sample_positions(len(timeline.times_s), timeline.fps, spec, recipe.frames)
    if timeline.is_uniform:
        numbers = whole_frames(positions, spec)
    else:
        numbers = [timeline.shown_at(position / timeline.fps) for position in positions.tolist()]
    height, width = frame_size(len(numbers), *opened.size, spec, recipe.budget)
    num_padded = -(-len(numbers) // spec.temporal_patch_size) * spec.temporal_patch_size
    if num_padded * height * width > limits.max_video_pixels:
        raise MediaTooLarge(
            f"{len(numbers)} frames of {width}x{height} pixels are above the limit of"
            f" {limits.max_video_pixels} pixels; ask for fewer frames or a lower max_pixels"
        )
    sound = _sound_track(data, recipe.audio, limits) if opened.has_audio and recipe.audio else None
    return PreparedVideo(data, opened, numbers, (num_padded, height, width, 3), recipe, limits, sound, resize)


def _sound_track(data: bytes, spec: AudioSpec, limits: MediaLimits) -> PreparedAudio | None:
    """None for a track without a sample: the video is then as a silent one."""
    try:
        return prepare_audio(data, spec, limits, of_video=True)
    except MediaDecodeError as error:
        if error.code == EMPTY:
            return None
        raise
