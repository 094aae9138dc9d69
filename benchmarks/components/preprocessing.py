"""Images and seconds of sound on one core: the pool's work against the family's transformers processor.

    python -m benchmarks.components.preprocessing [--seconds 3] [--sizes 1024x1024,1920x1080]

Every row starts from the same encoded bytes and decodes them. Ours hands over resized uint8 pixels, because
rescale, normalise and patchify run on the encoder's device; the row "ours + patchify" does them on the same
core too, for a like-for-like result. "decode alone" (Pillow to RGB) is the floor that neither can pass.
Sound: log-mel features of 30 s (128 mels, as the omni families take) from the same samples on both sides; the
row "ours + decode" starts from an MP3 file of 48 kHz stereo instead, which it decodes, mixes and resamples.
Unlike the rest of this package it imports the code it measures: there is no HTTP in between.
"""

from __future__ import annotations

import argparse
import io
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import av
import numpy as np
import PIL
import torch
import transformers
from PIL import Image

from contracts.digests import Digester
from contracts.media import MediaOptions
from contracts.specs import AudioSpec, ImageSpec, MediaLimits
from preprocess.images import decode_image, open_image
from preprocess.mel import log_mel
from preprocess.patches import patchify
from preprocess.resampling import Resize, choose_resize, compile_resize, resize_by_pillow
from preprocess.resize import pixel_budget, resized_shape
from preprocess.sound import decode_audio

MAX_SOURCE_PIXELS = 100_000_000
SPECS = {
    "Qwen2-VL": ImageSpec(
        patch_size=14, merge_size=2, temporal_patch_size=2, min_pixels=3136, max_pixels=28 * 28 * 16384
    ),
    "Qwen3-VL": ImageSpec(
        patch_size=16,
        merge_size=2,
        temporal_patch_size=2,
        min_pixels=65536,
        max_pixels=16777216,
        image_mean=(0.5, 0.5, 0.5),
        image_std=(0.5, 0.5, 0.5),
    ),
}


@dataclass(frozen=True)
class Case:
    family: str
    format_name: str
    width: int
    height: int
    data: bytes


def photograph(width: int, height: int) -> Image.Image:
    """Seeded: smooth shapes and sensor-like noise, so that JPEG and PNG sizes are those of photographs."""
    rng = np.random.default_rng(7)
    coarse = Image.fromarray(rng.integers(0, 256, (24, 32, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), np.float32)
    noisy = smooth + rng.normal(0, 4, smooth.shape)
    return Image.fromarray(noisy.clip(0, 255).astype(np.uint8))


def cases(sizes: list[tuple[int, int]]) -> list[Case]:
    made = []
    for family in SPECS:
        for width, height in sizes:
            for format_name in ("JPEG", "PNG"):
                buffer = io.BytesIO()
                photograph(width, height).save(buffer, format_name)
                made.append(Case(family, format_name, width, height, buffer.getvalue()))
    return made


def reference(spec: ImageSpec) -> transformers.BaseImageProcessor:
    """Both families use this class; without torchvision it is its own Pillow backend."""
    transformers.logging.set_verbosity_error()
    return transformers.Qwen2VLImageProcessor(
        patch_size=spec.patch_size,
        merge_size=spec.merge_size,
        temporal_patch_size=spec.temporal_patch_size,
        size={"shortest_edge": spec.min_pixels, "longest_edge": spec.max_pixels},
        image_mean=list(spec.image_mean),
        image_std=list(spec.image_std),
    )


def contestants(case: Case) -> dict[str, Callable[[], object]]:
    """Name → one image's work. Settles, once, that all give the same patches."""
    spec, digester = SPECS[case.family], Digester.random()
    arena, resize = np.empty(spec.max_pixels * 3, np.uint8), choose_resize("auto")
    processor = reference(spec)

    def ours(resize: Resize = resize) -> np.ndarray:
        opened = open_image(case.data, MAX_SOURCE_PIXELS)
        shape = resized_shape(*opened.size, spec, pixel_budget(spec, MediaOptions()))
        place_HWC = arena[: shape.nbytes].reshape(shape.height, shape.width, 3)
        pixels_HWC = decode_image(opened, shape, spec, resize, place_HWC)
        digester.of_array(pixels_HWC)
        return pixels_HWC

    def theirs() -> np.ndarray:
        image = Image.open(io.BytesIO(case.data))
        values: np.ndarray = processor(image, return_tensors="np")["pixel_values"]
        return values

    difference = np.abs(patchify(ours(), spec) - theirs()).max()
    assert difference < 1 / 255, difference
    return {
        "transformers": theirs,
        "ours + patchify": lambda: patchify(ours(), spec),
        "ours (uint8)": ours,
        "ours (uint8), Pillow's resize": lambda: ours(resize_by_pillow),
        "decode alone": lambda: Image.open(io.BytesIO(case.data)).convert("RGB"),
    }


SOUND_SPEC = AudioSpec(tokens="qwen3_omni")
SOUND_S = 30


def melody(rate: int) -> np.ndarray:
    """[samples] float32, seeded: gliding harmonics and noise."""
    rng = np.random.default_rng(7)
    time_s = np.arange(SOUND_S * rate) / rate
    glide = 2 * np.pi * (200 + 60 * np.sin(time_s)) * time_s
    tones = sum(np.sin(k * glide) / k for k in range(1, 6))
    return (0.1 * tones + 0.01 * rng.standard_normal(len(time_s))).astype(np.float32)


def mp3(rate: int) -> bytes:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp3") as file:
        stream = file.add_stream("libmp3lame", rate=rate, layout="stereo")
        both = np.repeat(melody(rate)[None], 2, axis=0)
        for start in range(0, both.shape[1], 1152):
            piece = np.ascontiguousarray(both[:, start : start + 1152])
            frame = av.AudioFrame.from_ndarray(piece, format="fltp", layout="stereo")
            frame.sample_rate, frame.pts = rate, start
            file.mux(stream.encode(frame))
        file.mux(stream.encode(None))
    return buffer.getvalue()


def sound_contestants() -> dict[str, Callable[[], object]]:
    """Name → the features of SOUND_S seconds. Settles, once, that both give the same."""
    samples, encoded, limits = melody(SOUND_SPEC.sampling_rate), mp3(48_000), MediaLimits()
    extractor = transformers.WhisperFeatureExtractor(feature_size=SOUND_SPEC.num_mels)

    def ours(heard: np.ndarray) -> np.ndarray:
        out = np.empty((SOUND_SPEC.num_mels, SOUND_SPEC.num_frames(len(heard))), np.float32)
        log_mel(heard, SOUND_SPEC, out)
        return out

    def theirs() -> np.ndarray:
        features: np.ndarray = extractor(
            samples, sampling_rate=SOUND_SPEC.sampling_rate, padding=True, truncation=False
        )["input_features"][0]
        return features

    difference = np.abs(ours(samples) - theirs()).max()
    assert difference < 1e-4, difference
    return {
        "transformers": theirs,
        "ours": lambda: ours(samples),
        "ours + decode": lambda: ours(decode_audio(encoded, SOUND_SPEC, limits).samples_S),
    }


def measure(work: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """Median seconds an image, the contestants taking turns so that other load meets all of them alike."""
    times: dict[str, list[float]] = {name: [] for name in work}
    deadline = time.perf_counter() + seconds * len(work)
    while time.perf_counter() < deadline or len(times["transformers"]) < 3:
        for name, call in work.items():
            start = time.process_time()  # CPU time: what the core was really given to
            call()
            times[name].append(time.process_time() - start)
    return {name: statistics.median(taken) for name, taken in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=2.0, help="for each row of each case")
    parser.add_argument("--sizes", default="1024x1024", help="comma-separated WIDTHxHEIGHT")
    arguments = parser.parse_args()
    sizes = [(int(w), int(h)) for w, h in (size.split("x") for size in arguments.sizes.split(","))]

    core = min(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    compile_resize()
    print(
        f"command: python -m benchmarks.components.preprocessing --seconds {arguments.seconds}"
        f" --sizes {arguments.sizes}"
    )
    print(
        f"python {platform.python_version()}, pillow {PIL.__version__}, numpy {np.__version__}, transformers"
        f" {transformers.__version__}; {processor_name()}, pinned to core {core}; median CPU time"
    )
    taken = measure(sound_contestants(), arguments.seconds)
    print(f"\n| sound of {SOUND_S} s | ms | x real time | x transformers |")
    print("|---|---|---|---|")
    for name, seconds in taken.items():
        ratio = taken["transformers"] / seconds
        print(f"| {name} | {1000 * seconds:.1f} | {SOUND_S / seconds:.0f} | {ratio:.2f} |")
    print("\n| family | image | bytes | work | ms/image | images/s | x transformers |")
    print("|---|---|---|---|---|---|---|")
    for case in cases(sizes):
        taken = measure(contestants(case), arguments.seconds)
        for name, seconds in taken.items():
            image = f"{case.width}x{case.height} {case.format_name}"
            print(
                f"| {case.family} | {image} | {len(case.data)} | {name} |"
                f" {1000 * seconds:.1f} | {1 / seconds:.1f} | {taken['transformers'] / seconds:.2f} |"
            )


def processor_name() -> str:
    with open("/proc/cpuinfo") as cpuinfo:
        names = [line.split(":", 1)[1].strip() for line in cpuinfo if line.startswith("model name")]
    return names[0] if names else platform.machine()


if __name__ == "__main__":
    main()
