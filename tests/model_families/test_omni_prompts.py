"""Token layout and TMRoPE positions of the omni families against `transformers`' processors and models."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import Qwen2_5OmniProcessor, Qwen3OmniMoeProcessor

from contracts.digests import ContentDigest
from contracts.errors import BadRequest
from contracts.media import MediaItem
from model_families.registry import open_family
from tests.tiny_omni import NAMES, OMNI_FAMILIES, reference_thinker

MERGE = 2
PROCESSORS = {"qwen2_5_omni": Qwen2_5OmniProcessor, "qwen3_omni_moe": Qwen3OmniMoeProcessor}


@pytest.fixture(params=OMNI_FAMILIES)
def family(request) -> str:
    return request.param


# Numbers are text tokens. ("image", rows, columns), ("audio", mel frames),
# ("video", frames, rows, columns, seconds per frame) and the same with mel frames of its sound at the end.
PLAIN = {
    "text": [7],
    "image": [3, ("image", 2, 3), 4],
    "two images": [2, ("image", 3, 1), 1, ("image", 1, 5), 2],
    "sound": [3, ("audio", 250), 4],
    "image and sounds": [1, ("audio", 90), ("image", 2, 2), 3, ("audio", 333), 1],
    "video": [2, ("video", 3, 2, 2, 1.0), 5],
    "long steps": [1, ("video", 4, 1, 2, 3.7), 2],
    "short steps": [1, ("video", 5, 3, 4, 0.1), 2],
    "videos, image, sound": [
        *[2, ("video", 2, 2, 3, 0.7), 1, ("image", 2, 2), 3, ("video", 3, 1, 2, 2 / 3)],
        *[("audio", 120), 4],
    ],
}
WITH_SOUND = {
    "sound as long": [2, ("video", 4, 2, 2, 1.0, 400), 3],
    "sound longer": [2, ("video", 2, 2, 2, 1.0, 900), 3],
    "sound shorter": [2, ("video", 6, 2, 2, 1.0, 150), 3],
    "fractions": [5, ("video", 5, 2, 1, 2 / 3, 380), 4],
    "slow frames": [1, ("video", 3, 2, 2, 4.5, 900), 2],
    "fast frames": [1, ("video", 9, 1, 1, 0.2, 310), 2],
    "large frames at the end": [1, ("video", 2, 9, 9, 1.0, 60), 2],
    "two": [1, ("video", 3, 2, 2, 1.0, 250), 2, ("video", 2, 1, 3, 0.5, 210), 4],
    "one after the other": [1, ("video", 3, 2, 2, 0.9, 250), ("video", 2, 1, 3, 0.5, 210), 4],
    "with others": [
        *[1, ("image", 2, 2), ("video", 3, 2, 2, 1.0, 250), 2, ("audio", 130)],
        *[("video", 2, 1, 3, 0.7, 333), ("image", 1, 4), 4],
    ],
}
CASES = PLAIN | WITH_SOUND


class Conversation:
    """A case as our items and token ids, and as the reference's inputs."""

    def __init__(self, family: str, opened, parts) -> None:
        self.names = NAMES[family]
        self.opened = opened
        self.audio_spec = opened.media_specs.audio
        self.ids: list[int] = []  # with placeholders
        self.items: list[MediaItem] = []
        self.expanded: list[int] = []  # as the reference's processor lays it out
        self.mels: list[int] = []
        self.image_grids: list[tuple[int, int, int]] = []
        self.video_grids: list[tuple[int, int, int]] = []
        self.seconds: list[float] = []
        self.processor = processor_of(family)
        for part in parts:
            if isinstance(part, int):
                self._both(range(1, part + 1))
            else:
                getattr(self, part[0])(*part[1:])

    def _id(self, token: str) -> int:
        (found,) = self.opened.tokenizer.encode(token, parse_special=True)
        return found

    def _both(self, ids) -> None:
        self.ids += ids
        self.expanded += ids

    def _around(self, start: str, placeholder: str, expanded: list[int], end: str) -> None:
        self.ids += [self._id(start), self._id(placeholder), self._id(end)]
        self.expanded += [self._id(start), *expanded, self._id(end)]

    def _item(self, modality, num_tokens, **more) -> None:
        digest = ContentDigest(bytes([len(self.items)]) * 16)
        self.items.append(
            MediaItem(
                modality=modality, bytes_digest=digest, pixel_digest=digest, num_tokens=num_tokens, **more
            )
        )

    def image(self, rows: int, columns: int) -> None:
        grid = (1, rows * MERGE, columns * MERGE)
        self.image_grids.append(grid)
        self._item("image", rows * columns, grid_thw=grid)
        pads = [self._id(self.names.image)] * (rows * columns)
        self._around(self.names.vision_start, self.names.image, pads, self.names.vision_end)

    def audio(self, mel_frames: int) -> None:
        self.mels.append(mel_frames)
        count = self.audio_spec.num_tokens(mel_frames)
        self._item("audio", count, num_frames=mel_frames)
        pads = [self._id(self.names.audio)] * count
        self._around(self.names.audio_start, self.names.audio, pads, self.names.audio_end)

    def video(self, frames: int, rows: int, columns: int, seconds: float, mel_frames: int = 0) -> None:
        grid = (frames, rows * MERGE, columns * MERGE)
        self.video_grids.append(grid)
        self.seconds.append(seconds)
        count = frames * rows * columns
        self._item("video", count, grid_thw=grid, seconds_per_grid=seconds)
        pads = [self._id(self.names.video)] * count
        if mel_frames:
            self.mels.append(mel_frames)
            heard = self.audio_spec.num_tokens(mel_frames)
            self._item("audio", heard, num_frames=mel_frames, of_video=True)
            text = self.processor.replace_video_with_audio_token(
                {"video_grid_thw": np.array([grid]), "video_second_per_grid": [seconds]},
                0,
                {"num_audio_tokens": np.array([heard])},
                0,
                position_id_per_seconds=self.opened.processor.expand.positions_per_s,
                seconds_per_chunk=2.0,
            )
            pads = self.opened.tokenizer.encode(text, parse_special=True)
        self._around(self.names.vision_start, self.names.video, pads, self.names.vision_end)


def processor_of(family: str):
    """The reference's layout without its image, video and audio halves."""
    names = NAMES[family]
    made = PROCESSORS[family].__new__(PROCESSORS[family])
    made.video_processor = SimpleNamespace(merge_size=MERGE)
    made.video_token, made.audio_token = names.video, names.audio
    made.audio_bos_token, made.audio_eos_token = names.audio_start, names.audio_end
    return made


def their_positions(folder, case: Conversation):
    ids = torch.tensor([case.expanded])

    def grids(given):
        return torch.tensor(given) if given else None

    return reference_thinker(folder).get_rope_index(
        ids,
        grids(case.image_grids),
        grids(case.video_grids),
        torch.ones_like(ids),
        any(item.of_video for item in case.items),
        torch.tensor(case.mels) if case.mels else None,
        torch.tensor(case.seconds) if case.seconds else None,
    )


@pytest.mark.parametrize("name", CASES)
def test_tokens_and_positions_equal_transformers(family, tiny_omni, name):
    opened = open_family(tiny_omni(family))
    case = Conversation(family, opened, CASES[name])
    prompt = opened.layout(case.ids, case.items)
    assert prompt.token_ids == case.expanded
    positions, delta = opened.positions(prompt)
    theirs, their_delta = their_positions(tiny_omni(family), case)
    np.testing.assert_allclose(positions, theirs[:, 0].numpy(), rtol=1e-6, atol=0)
    assert delta == pytest.approx(float(their_delta), abs=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_every_row_of_every_item_has_its_place(family, tiny_omni, name):
    opened = open_family(tiny_omni(family))
    case = Conversation(family, opened, CASES[name])
    prompt = opened.layout(case.ids, case.items)
    taken = [0] * len(case.items)
    for span in prompt.spans:
        taken[span.item_index] += span.length
        (token,) = set(prompt.token_ids[span.offset : span.end])
        kind = case.items[span.item_index].modality
        assert token == case._id(getattr(case.names, kind))
    assert taken == [item.num_tokens for item in case.items]
    assert [s.offset for s in prompt.spans] == sorted(s.offset for s in prompt.spans)


def test_random_videos_with_sound(family, tiny_omni):
    opened = open_family(tiny_omni(family))
    rng = np.random.default_rng(3)
    for _ in range(60):
        video = ("video", *rng.integers(1, 7, 3).tolist(), round(float(rng.uniform(0.1, 3.0)), 2))
        parts = [int(rng.integers(1, 9)), (*video, int(rng.integers(30, 900))), int(rng.integers(1, 9))]
        case = Conversation(family, opened, parts)
        prompt = opened.layout(case.ids, case.items)
        assert prompt.token_ids == case.expanded, parts
        theirs, their_delta = their_positions(tiny_omni(family), case)
        positions, delta = opened.positions(prompt)
        np.testing.assert_allclose(positions, theirs[:, 0].numpy(), rtol=1e-6, atol=0, err_msg=str(parts))
        assert delta == pytest.approx(float(their_delta), abs=1e-4)


def test_the_same_frames_at_another_pace_are_not_the_same_prefix(family, tiny_omni):
    opened = open_family(tiny_omni(family))
    digests = set()
    for seconds in (1.0, 0.5):
        case = Conversation(family, opened, [1, ("video", 2, 2, 2, seconds), 1])
        digests.add(opened.layout(case.ids, case.items).spans[0].digest)
    assert len(digests) == 2


def test_items_must_fit_their_placeholders(family, tiny_omni):
    opened = open_family(tiny_omni(family))
    case = Conversation(family, opened, [1, ("image", 2, 2), ("audio", 90), 1])
    with pytest.raises(BadRequest, match="2 media placeholders but 1 items"):
        opened.layout(case.ids, case.items[:1])
    with pytest.raises(BadRequest, match="placeholder 0 of the prompt is for image, its item is audio"):
        opened.layout(case.ids, case.items[::-1])
