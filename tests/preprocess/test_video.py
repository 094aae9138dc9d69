"""Videos: every container, true times, broken and lying files, limits before decoding, sound tracks."""

from __future__ import annotations

import io
import struct

import av
import msgspec
import numpy as np
import pytest
import torch
from PIL import Image

from contracts.digests import Digester
from contracts.errors import MediaDecodeError, MediaTooLarge
from contracts.media import MediaItem, MediaOptions
from contracts.specs import AudioSpec, MediaLimits, VideoSpec
from preprocess.arena import Arena, ArenaMapping
from preprocess.items import Place, prepare_video
from preprocess.recipes import VideoRecipe
from preprocess.resize import pixel_budget
from preprocess.sampling import frame_budget
from preprocess.video import open_video, resized_rgb, timeline_of
from tests.preprocess.films import QWEN2_VIDEO, QWEN3_VIDEO, TINY_VIDEO, film, level_of, moving
from tests.preprocess.recordings import QWEN3_OMNI, tone

LIMITS = MediaLimits()
DIGESTER = Digester(bytes(16))
EVERY_FRAME = {"fps": 1000.0}


def made(
    data: bytes,
    spec: VideoSpec = TINY_VIDEO,
    audio: AudioSpec | None = None,
    limits: MediaLimits = LIMITS,
    **options: object,
) -> tuple[list[MediaItem], list[np.ndarray]]:
    """The items and copies of their features."""
    given = MediaOptions(**options)
    frames = frame_budget(spec, given, limits.max_video_frames)
    recipe = VideoRecipe(spec, frames, pixel_budget(spec, given), audio)
    prepared = prepare_video(data, recipe, limits)
    arena = Arena(prepared.nbytes)
    try:
        pages = ArenaMapping(arena.fd, arena.name, arena.size, writable=True)
        items = prepared.write(Place(pages, 0, prepared.nbytes, b"b" * 16, DIGESTER))
        return list(items), [arena.view(item.features).copy() for item in items if item.features]
    finally:
        arena.close()


def numbers_of(pixels_THWC: np.ndarray, num_frames: int) -> list[int]:
    """The frames of `moving`, read off their brightness."""
    levels = np.array([level_of(i, num_frames) for i in range(num_frames)])
    return [int(np.abs(levels - frame.mean()).argmin()) for frame in pixels_THWC]


FILES = {
    "mp4 h264": {"container": "mp4", "codec": "libx264"},
    "mov h264 b-frames": {"container": "mov", "codec": "libx264", "options": {"bf": "3"}},
    "mkv h265": {"container": "matroska", "codec": "libx265", "options": {"x265-params": "log-level=none"}},
    "webm vp8": {"container": "webm", "codec": "libvpx"},
    "webm vp9": {"container": "webm", "codec": "libvpx-vp9"},
    "avi mpeg4": {"container": "avi", "codec": "mpeg4"},
    "avi mjpeg": {"container": "avi", "codec": "mjpeg", "pixel_format": "yuvj420p"},
    "mpeg ts": {"container": "mpegts", "codec": "libx264"},
    "flv": {"container": "flv", "codec": "libx264"},
    "gif": {"container": "gif", "codec": "gif", "pixel_format": "rgb8"},
    "raw h264": {"container": "h264", "codec": "libx264", "options": {"bf": "0"}},
}


@pytest.mark.parametrize("name", FILES)
def test_containers_give_the_frames_asked_for(name):
    data = film(moving(20), fps=10, **FILES[name])
    (item,), (pixels,) = made(data, fps=5.0)
    assert (item.num_frames, item.grid_thw[0]) == (10, 5)
    found = numbers_of(pixels, 20)
    slack = 1 if name == "gif" else 0  # its colours are coarse
    assert all(abs(a - b) <= slack for a, b in zip(found, range(0, 20, 2), strict=True)), found
    assert item.duration_s == pytest.approx(2.0)
    assert item.timestamps_s == pytest.approx([0.1, 0.5, 0.9, 1.3, 1.7])
    assert item.seconds_per_grid == pytest.approx(0.4)
    assert item.source_size == (64, 48)
    assert item.num_tokens == np.prod(item.grid_thw) // 4
    assert pixels.shape == (10, item.grid_thw[1] * 4, item.grid_thw[2] * 4, 3)


def test_time_stamps_are_of_the_source_not_of_the_sampling():
    """300 frames at 30 fps, 2 fps sampled: the last stamp is near 10 s."""
    data = film(moving(300, 16, 16), fps=30, codec="mpeg4")
    (item,), _ = made(data, msgspec.structs.replace(TINY_VIDEO, rule="qwen3_vl"))
    assert item.num_frames == 20
    assert item.timestamps_s[-1] == pytest.approx((283 + 299) / 2 / 30)
    assert item.seconds_per_grid == pytest.approx(1.0)


def test_frames_are_resized_as_by_the_references_filter():
    """Within 2 of 255 of torch's antialiased bicubic (both round), the decoded frame being the same."""
    rng = np.random.default_rng(3)
    coarse = Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8))
    data = film([np.asarray(coarse.resize((160, 120), Image.Resampling.BICUBIC))] * 2, codec="mpeg4")
    with av.open(io.BytesIO(data)) as file:
        frame = next(file.decode(video=0))
    for height, width in ((56, 84), (224, 308)):
        ours = resized_rgb(frame, 0, height, width, "bicubic")
        source = torch.from_numpy(frame.to_ndarray(format="rgb24")).permute(2, 0, 1)[None]
        theirs = torch.nn.functional.interpolate(source, size=(height, width), mode="bicubic", antialias=True)
        difference = ours.astype(int) - theirs[0].permute(1, 2, 0).numpy()
        assert np.abs(difference).max() <= 2
        assert (np.abs(difference) > 1).mean() < 1e-4


def test_variable_rate_is_sampled_by_time():
    """Frames of 10 ms and of 500 ms: the film is sampled at the times asked for, not at equal numbers."""
    times_s = [i * 0.01 for i in range(10)] + [0.1 + i * 0.5 for i in range(10)]
    data = film(moving(20), times_s=times_s, container="matroska", codec="mpeg4")
    opened = open_video(data, LIMITS)
    assert opened.timeline.times_s == pytest.approx(times_s, abs=1e-3)
    (item,), (pixels,) = made(data, fps=2.0)
    numbers = numbers_of(pixels, 20)
    step_s = opened.timeline.duration_s / item.num_frames
    shown = [max(i for i, t in enumerate(times_s) if t <= k * step_s + 1e-3) for k in range(item.num_frames)]
    assert numbers == shown
    assert numbers.count(0) == 1
    assert item.timestamps_s[0] == pytest.approx((times_s[numbers[0]] + times_s[numbers[1]]) / 2, abs=1e-3)


@pytest.mark.parametrize("spec", [TINY_VIDEO, msgspec.structs.replace(TINY_VIDEO, rule="qwen3_vl")])
@pytest.mark.parametrize("num_frames", [1, 2, 3])
def test_very_short_videos(spec, num_frames):
    (item,), (pixels,) = made(film(moving(num_frames), codec="mpeg4"), spec, **EVERY_FRAME)
    assert 1 <= item.num_frames <= num_frames
    assert pixels.shape[0] == 2 * item.grid_thw[0]
    assert len(item.timestamps_s) == item.grid_thw[0]
    for padding in pixels[item.num_frames :]:
        np.testing.assert_array_equal(padding, pixels[item.num_frames - 1])


def test_num_frames_alone():
    (item,), (pixels,) = made(film(moving(20), codec="mpeg4"), num_frames=6)
    assert item.num_frames == 6
    assert numbers_of(pixels, 20) == [0, 3, 6, 10, 13, 16]
    assert len(item.timestamps_s) == item.grid_thw[0] == 3


def packet_at(data: bytes, number: int) -> int:
    """Where packet `number` of an AVI file's only track begins."""
    position = data.index(b"movi")
    for _ in range(number + 1):
        position = data.index(b"00dc", position + 4)
    return position


def broken(data: bytes, number: int) -> bytes:
    """The AVI file with packet `number` all zeros."""
    damaged, position = bytearray(data), packet_at(data, number)
    (size,) = struct.unpack_from("<I", data, position + 4)
    damaged[position + 8 : position + 8 + size] = bytes(size)
    return bytes(damaged)


def test_a_broken_frame_is_shown_as_the_one_before():
    data = film(moving(20), container="avi", codec="mjpeg", pixel_format="yuvj420p")
    (whole,), _ = made(data, **EVERY_FRAME)
    (item,), (pixels,) = made(broken(data, 7), **EVERY_FRAME)
    assert numbers_of(pixels, 20) == [*range(7), 6, *range(8, 20)]
    assert item.num_tokens == whole.num_tokens


def test_a_video_of_broken_frames_is_refused():
    data = film(moving(8), container="avi", codec="mjpeg", pixel_format="yuvj420p")
    for number in range(1, 8):
        data = broken(data, number)
    with pytest.raises(MediaDecodeError, match="most of the video's frames"):
        made(data, **EVERY_FRAME)


def test_a_file_with_fewer_frames_than_its_header_says():
    data = film(moving(20), container="avi", codec="mjpeg", pixel_format="yuvj420p")
    (item,), (pixels,) = made(data[: packet_at(data, 12)], **EVERY_FRAME)
    assert item.num_frames == 12
    assert numbers_of(pixels, 20) == [*range(12)]
    assert item.duration_s == pytest.approx(1.2)


@pytest.mark.parametrize(
    "data", [b"", b"junk" * 64, b"\xff\xd8\xff\xe0" + bytes(200), b"#EXTM3U\nhttp://127.0.0.1/x.ts\n"]
)
def test_what_is_no_video_is_refused(data):
    with pytest.raises(MediaDecodeError):
        made(data)


def test_limits_are_checked_before_decoding(monkeypatch):
    data = film(moving(20), fps=10, codec="mpeg4")

    def decoding(*_: object) -> None:
        raise AssertionError("decoded a frame")

    with monkeypatch.context() as patch:
        patch.setattr("preprocess.video._decoded", decoding)
        for limit, message in (
            ({"max_video_s": 1.9}, "2 s long; the limit is 1.9 s"),
            ({"max_source_pixels": 64 * 48 - 1}, "64x48 pixels"),
            ({"max_video_source_frames": 19}, "more than 19 frames"),
        ):
            with pytest.raises(MediaTooLarge, match=message):
                made(data, limits=MediaLimits(**limit))
    with pytest.raises(MediaTooLarge, match="fewer frames or a lower max_pixels"):
        made(data, limits=MediaLimits(max_video_pixels=1000))
    (item,), _ = made(data, limits=MediaLimits(max_video_frames=4))
    assert item.num_frames == 4


def test_a_film_lying_on_its_side_is_turned_upright():
    left_dark = np.full((48, 64, 3), 200, np.uint8)
    left_dark[:, :32] = 20
    data = bytearray(film([left_dark] * 4, codec="mpeg4"))
    matrix = data.index(b"tkhd") + 4 + 40
    quarter = (0, 1 << 16, 0, -(1 << 16), 0, 0, 48 << 16, 0, 1 << 30)  # a quarter clockwise
    struct.pack_into(">9i", data, matrix, *quarter)
    (item,), (pixels,) = made(bytes(data), num_frames=2)
    assert item.source_size == (48, 64)
    height = pixels.shape[1]
    assert pixels.shape[2] < height
    assert pixels[0, : height // 3].mean() < 60  # its left side is the top now
    assert pixels[0, -height // 3 :].mean() > 160


def test_the_sound_track_becomes_the_next_item():
    data = film(moving(20), fps=10, sound=tone(2.0), codec="mpeg4")
    (video, audio), (_, mel) = made(data, audio=QWEN3_OMNI)
    assert (video.modality, audio.modality) == ("video", "audio")
    assert audio.of_video
    assert not video.of_video
    assert video.bytes_digest == audio.bytes_digest
    assert audio.duration_s == pytest.approx(2.0, abs=0.07)
    assert mel.shape == (128, audio.num_frames)
    assert audio.num_tokens == QWEN3_OMNI.num_tokens(audio.num_frames)
    (alone,), _ = made(data)
    assert alone.pixel_digest == video.pixel_digest


@pytest.mark.parametrize("sound", [None, tone(0.0)])
def test_a_silent_video_is_a_video_alone(sound):
    data = film(moving(4), sound=sound, codec="mpeg4")
    (item,), _ = made(data, audio=QWEN3_OMNI)
    assert item.modality == "video"


def test_equal_pixels_at_other_times_are_another_item():
    slow, fast = (film(moving(8), fps=fps, codec="mpeg4") for fps in (5, 10))
    (one,), (pixels,) = made(slow, num_frames=8)
    (other,), (same_pixels,) = made(fast, num_frames=8)
    np.testing.assert_array_equal(pixels, same_pixels)
    assert one.pixel_digest != other.pixel_digest


def test_the_real_families_sizes():
    data = film(moving(8, 160, 120), fps=4, codec="mpeg4")
    (item,), (pixels,) = made(data, QWEN2_VIDEO)
    assert (item.grid_thw, pixels.shape) == ((2, 20, 28), (4, 280, 392, 3))
    (item,), (pixels,) = made(data, QWEN3_VIDEO)
    assert (item.num_frames, pixels.shape[0], item.grid_thw[0]) == (4, 4, 2)
    assert pixels.shape[1] % 32 == pixels.shape[2] % 32 == 0


def test_claimed_rates_are_checked_against_the_time_stamps():
    assert timeline_of([0, 1, 2, 3], 0.1, 1, 10.0).fps == 10.0
    honest = timeline_of([0, 1, 2, 3], 0.1, 1, 1000.0)
    assert honest.fps == pytest.approx(10.0)
    assert honest.duration_s == pytest.approx(0.4)
    thirds = timeline_of([0, 33, 67, 100, 133], 0.001, 33, 30.0)
    assert thirds.times_s[3] == 3 / 30
    assert timeline_of([7], 0.1, 0, None).duration_s == pytest.approx(1 / 24)
    assert timeline_of([0, 5], 0.1, 0, None).duration_s == pytest.approx(1.0)
