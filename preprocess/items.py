"""From encoded bytes to items with their features in the arena: what a worker does for each recipe.

`prepare` reads as much as it takes to know the features' size; `write` makes them, in the place granted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from contracts.digests import ContentDigest, Digester
from contracts.media import FeatureRef, MediaItem
from contracts.specs import AudioSpec, ImageSpec, MediaLimits
from preprocess.arena import ArenaMapping
from preprocess.images import OpenedImage, decode_image, open_image
from preprocess.mel import Float32, log_mel
from preprocess.recipes import AudioRecipe, ImageRecipe, Recipe
from preprocess.resize import ResizedShape, resized_shape
from preprocess.sound import decode_audio

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


def prepare(recipe: Recipe, data: bytes, limits: MediaLimits) -> Prepared:
    """Raises MediaError kinds. Reads an image's header only; decodes a sound (its length is known no
    earlier)."""
    match recipe:
        case ImageRecipe(spec, budget):
            opened = open_image(data, limits.max_source_pixels)
            return PreparedImage(opened, resized_shape(*opened.size, spec, budget), spec)
        case AudioRecipe(spec):
            return prepare_audio(data, spec, limits)


@dataclass(frozen=True)
class PreparedImage:
    opened: OpenedImage
    shape: ResizedShape
    spec: ImageSpec

    @property
    def nbytes(self) -> int:
        return self.shape.nbytes

    def write(self, place: Place) -> tuple[MediaItem, ...]:
        pixels_HWC = decode_image(self.opened, self.shape, self.spec)
        ref, stored_HWC = place.take(pixels_HWC.shape, "uint8")
        stored_HWC[:] = pixels_HWC
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
