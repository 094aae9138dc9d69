"""Which frames are sampled and how large they become, against values of the reference's video processors.

Those need a library that is not installed here: SAMPLED and SIZES were made with transformers 5.24.
"""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.errors import BadRequest, MediaError
from contracts.media import MediaOptions
from contracts.specs import VideoSpec
from preprocess.resize import pixel_budget
from preprocess.sampling import frame_budget, frame_size, sample_positions, whole_frames
from tests.preprocess.films import QWEN2_VIDEO, QWEN3_VIDEO

SPECS = {"qwen2_vl": QWEN2_VIDEO, "qwen3_vl": QWEN3_VIDEO}
CAPS = {"qwen2_vl": 128_000, "qwen3_vl": 768}
NUM_FRAMES = 768

SAMPLED = [
    ("qwen2_vl", 300, 30.0, {"fps": 2}, [*range(0, 300, 15)]),
    ("qwen2_vl", 14434, 29.97, {"num_frames": 8}, [0, 1804, 3608, 5412, 7217, 9021, 10825, 12629]),
    ("qwen2_vl", 33, 24.0, {"fps": 2}, [0, 8, 16, 24]),
    ("qwen2_vl", 33, 24.0, {"num_frames": 5}, [0, 8, 16, 24]),
    ("qwen2_vl", 7, 5.0, {"fps": 24}, [0, 1, 2, 3, 4, 5]),
    ("qwen2_vl", 100, 29.97, {"fps": 0.5}, [0, 25, 50, 75]),
    ("qwen3_vl", 300, 30.0, {"fps": 1}, [0, 33, 66, 100, 133, 166, 199, 233, 266, 299]),
    ("qwen3_vl", 14434, 29.97, {"num_frames": 8}, [0, 2062, 4124, 6186, 8247, 10309, 12371, 14433]),
    ("qwen3_vl", 33, 24.0, {"fps": 2}, [0, 11, 21, 32]),
    ("qwen3_vl", 33, 24.0, {"num_frames": 5}, [0, 8, 16, 24, 32]),
    ("qwen3_vl", 7, 5.0, {"fps": 24}, [0, 1, 2, 3, 4, 5, 6]),
    ("qwen3_vl", 100, 29.97, {"fps": 0.5}, [0, 33, 66, 99]),
]
SIZES = [  # rule, with the cap, frames, width, height, (height, width)
    ("qwen2_vl", False, 2, 64, 48, (280, 392)),
    ("qwen2_vl", False, 300, 1920, 1080, (560, 1008)),
    ("qwen2_vl", False, 768, 640, 480, (476, 644)),
    ("qwen2_vl", False, 5, 20, 300, (1232, 84)),
    ("qwen2_vl", True, 20, 1280, 720, (560, 1008)),
    ("qwen2_vl", True, 768, 640, 480, (420, 560)),
    ("qwen3_vl", False, 2, 64, 48, (224, 320)),
    ("qwen3_vl", False, 20, 1280, 720, (128, 256)),
    ("qwen3_vl", False, 768, 640, 480, (32, 32)),
    ("qwen3_vl", False, 5, 20, 300, (640, 64)),
    ("qwen3_vl", True, 20, 1280, 720, (256, 480)),
    ("qwen3_vl", True, 768, 640, 480, (320, 416)),
]


def sampled(rule: str, total: int, rate: float, **options: float) -> list[int]:
    spec = SPECS[rule]
    budget = frame_budget(spec, MediaOptions(**options), NUM_FRAMES)
    return whole_frames(sample_positions(total, rate, spec, budget), spec)


@pytest.mark.parametrize(("rule", "total", "fps", "options", "expected"), SAMPLED)
def test_sampled_frames_are_the_references(rule, total, fps, options, expected):
    assert sampled(rule, total, fps, **options) == expected


@pytest.mark.parametrize(("rule", "cap", "frames", "width", "height", "expected"), SIZES)
def test_sizes_are_the_references(rule, cap, frames, width, height, expected):
    spec = msgspec.structs.replace(SPECS[rule], frame_cap_tokens=CAPS[rule] if cap else None)
    assert frame_size(frames, width, height, spec, pixel_budget(spec, MediaOptions())) == expected


@settings(max_examples=200, deadline=None)
@given(
    rule=st.sampled_from(sorted(SPECS)),
    total=st.integers(1, 5000),
    fps=st.floats(0.1, 240),
    asked=st.one_of(
        st.fixed_dictionaries({"fps": st.floats(0.01, 120)}),
        st.fixed_dictionaries({"num_frames": st.integers(1, NUM_FRAMES)}),
        st.just({}),
    ),
    max_frames=st.one_of(st.none(), st.integers(1, 2000)),
)
def test_any_video_gives_ascending_frames_within_the_budget(rule, total, fps, asked, max_frames):
    numbers = sampled(rule, total, fps, max_frames=max_frames, **asked)
    assert 1 <= len(numbers) <= min(total, max_frames or NUM_FRAMES, NUM_FRAMES)
    assert numbers == sorted(set(numbers))
    assert 0 <= numbers[0] <= numbers[-1] < total


@settings(max_examples=200, deadline=None)
@given(
    rule=st.sampled_from(sorted(SPECS)),
    frames=st.integers(1, 768),
    width=st.integers(1, 4000),
    height=st.integers(1, 4000),
)
def test_any_frame_size_is_whole_patches(rule, frames, width, height):
    spec = SPECS[rule]
    if max(width, height) > 200 * min(width, height):
        with pytest.raises(MediaError, match="aspect ratio"):
            frame_size(frames, width, height, spec, pixel_budget(spec, MediaOptions()))
        return
    new_height, new_width = frame_size(frames, width, height, spec, pixel_budget(spec, MediaOptions()))
    assert new_height % spec.factor == new_width % spec.factor == 0
    assert min(new_height, new_width) >= spec.factor


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"fps": 1.0, "num_frames": 2}, "num_frames"),
        ({"num_frames": 0}, "num_frames"),
        ({"num_frames": 769}, "num_frames"),
        ({"fps": 0.0}, "fps"),
        ({"fps": float("nan")}, "fps"),
        ({"max_frames": 0}, "max_frames"),
    ],
)
def test_bad_options_are_refused_by_name(options, param):
    with pytest.raises(BadRequest) as caught:
        frame_budget(QWEN2_VIDEO, MediaOptions(**options), NUM_FRAMES)
    assert caught.value.param == param


def test_the_servers_bound_on_frames_holds():
    assert frame_budget(QWEN2_VIDEO, MediaOptions(), 16).max_frames == 16
    assert len(sample_positions(1000, 25.0, QWEN2_VIDEO, frame_budget(QWEN2_VIDEO, MediaOptions(), 16))) == 16
    with pytest.raises(BadRequest, match="between 1 and 16"):
        frame_budget(QWEN2_VIDEO, MediaOptions(num_frames=17), 16)
    tiny = VideoSpec(**{**msgspec.structs.asdict(QWEN2_VIDEO), "max_frames": 8})
    assert frame_budget(tiny, MediaOptions(max_frames=100), 16).max_frames == 8
