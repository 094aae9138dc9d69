"""`transformers` as the oracle over conversations with pictures, sound and video.

Pictures and sounds go through its own processors. Of videos it takes our frames, which the tests of
preprocessing compare with its own.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import GenerationConfig, WhisperFeatureExtractor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from contracts.media import MediaItem, MediaOptions, MediaSource
from contracts.specs import MediaSpecs, VideoSpec
from model_families.registry import open_family
from tests.served import Served, Turn
from tests.tiny_models import PADDED_VOCAB, reference_tokenizer
from tests.tiny_omni import NAMES, reference_thinker

NEVER = PADDED_VOCAB - 1  # a row of padding, never the likeliest
RATE = 16_000


def sound(seed: int, seconds: float) -> np.ndarray:
    """Seeded chords, float32."""
    rng = np.random.default_rng(seed)
    time_s = np.arange(round(seconds * RATE)) / RATE
    waves = [np.sin(2 * np.pi * hertz * time_s + phase) for hertz, phase in rng.uniform(80, 3000, (5, 2))]
    swell = 0.5 + 0.5 * np.sin(2 * np.pi * rng.uniform(0.5, 3) * time_s)
    return (np.sum(waves, axis=0) * swell / 8).astype(np.float32)


def wav_url(samples: np.ndarray) -> str:
    from tests.preprocess.recordings import wav

    return "data:audio/wav;base64," + base64.b64encode(wav(samples, RATE, tag=3)).decode()


@dataclass(frozen=True, eq=False)
class Heard:
    """A sound of a conversation."""

    samples: np.ndarray

    def source(self) -> MediaSource:
        return MediaSource("audio", wav_url(self.samples))


@dataclass(frozen=True, eq=False)
class Seen:
    """A video of a conversation: an mp4 file."""

    data: bytes
    with_sound: bool = False
    fps: float | None = None

    def source(self) -> MediaSource:
        url = "data:video/mp4;base64," + base64.b64encode(self.data).decode()
        return MediaSource("video", url, MediaOptions(with_audio=self.with_sound, fps=self.fps))


OmniTurn = tuple[str, Sequence["str | Image.Image | Heard | Seen"]]


def served_turns(turns: Sequence[OmniTurn]) -> list[Turn]:
    return [
        (role, [p.source() if isinstance(p, (Heard, Seen)) else p for p in parts]) for role, parts in turns
    ]


class Oracle:
    """Of one checkpoint; `served` makes the frames of videos."""

    def __init__(self, folder: Path, family: str, served: Served) -> None:
        self._folder = folder
        self._names = NAMES[family]
        self._family = family
        self._served = served
        self._tokenizer = reference_tokenizer(folder)
        self._specs = open_family(folder).media_specs

    def inputs(self, turns: Sequence[OmniTurn]) -> dict[str, Any]:
        parts = [p for _, content in turns for p in content if not isinstance(p, str)]
        gathered = _Gathered()
        expansions = {"image": [], "audio": [], "video": []}
        for part in parts:
            if isinstance(part, Image.Image):
                expansions["image"].append(self._image(part, gathered))
            elif isinstance(part, Heard):
                expansions["audio"].append(self._audio(part, gathered))
            else:
                expansions["video"].append(self._video(part, gathered))
        ids = self._tokenizer.apply_chat_template(
            _messages(turns), add_generation_prompt=True, return_dict=False
        )
        queues = {self._id(getattr(self._names, kind)): iter(e) for kind, e in expansions.items()}
        expanded = [i for token in ids for i in (next(queues[token]) if token in queues else [token])]
        return {"input_ids": torch.tensor([expanded]), **gathered.tensors()}

    @torch.no_grad()
    def __call__(
        self, turns: Sequence[OmniTurn], new_tokens: int, ignore_eos: bool = False
    ) -> tuple[list[int], torch.Tensor]:
        """Greedy tokens, and the log-probabilities at each of their positions."""
        inputs = self.inputs(turns)
        thinker = reference_thinker(self._folder)
        ends = [self._id(token) for token in ("<|im_end|>", "<|endoftext|>")]
        out = thinker.generate(
            **inputs,
            attention_mask=torch.ones_like(inputs["input_ids"]),
            generation_config=GenerationConfig(
                max_new_tokens=new_tokens,
                do_sample=False,
                eos_token_id=NEVER if ignore_eos else ends,
                pad_token_id=ends[1],
                return_dict_in_generate=True,
                output_logits=True,
            ),
        )
        tokens = out.sequences[0, inputs["input_ids"].shape[1] :].tolist()
        return tokens, torch.log_softmax(torch.cat(out.logits).float(), -1)

    def _id(self, token: str) -> int:
        return self._tokenizer.convert_tokens_to_ids(token)

    def _image(self, image: Image.Image, gathered: _Gathered) -> list[int]:
        features = Qwen2VLImageProcessorPil.from_pretrained(self._folder)(images=[image], return_tensors="pt")
        gathered.pixels.append(features["pixel_values"])
        gathered.image_grids.append(features["image_grid_thw"][0].tolist())
        return [self._id(self._names.image)] * (int(features["image_grid_thw"].prod()) // 4)

    def _audio(self, heard: Heard, gathered: _Gathered) -> list[int]:
        padding = "max_length" if self._family == "qwen2_5_omni" else True
        features = _extractor(self._folder)(
            heard.samples,
            sampling_rate=RATE,
            padding=padding,
            truncation=padding is not True,
            return_attention_mask=True,
            return_tensors="pt",
        )
        count = int(features["attention_mask"].sum())
        gathered.mels.append(features["input_features"][0, :, :count])
        return [self._id(self._names.audio)] * self._num_audio_tokens(count)

    def _num_audio_tokens(self, frames: int) -> int:
        mask = torch.ones(1, frames, dtype=torch.long)
        mel = torch.zeros(1, reference_thinker(self._folder).config.audio_config.num_mel_bins, frames)
        return len(reference_thinker(self._folder).get_audio_features(mel, mask).last_hidden_state)

    def _video(self, seen: Seen, gathered: _Gathered) -> list[int]:
        items, features = resolved(self._served, seen.source(), self._specs)
        video = items[0]
        gathered.videos.append(_patches(features[0], self._specs.video, video))
        gathered.video_grids.append(video.grid_thw)
        gathered.seconds.append(video.seconds_per_grid)
        pads = [self._id(self._names.video)] * video.num_tokens
        if len(items) == 1:
            return pads
        gathered.mels.append(torch.from_numpy(features[1]))
        gathered.use_audio_in_video = True
        return self._interleaved(video, self._num_audio_tokens(features[1].shape[1]))

    def _interleaved(self, video: MediaItem, num_audio: int) -> list[int]:
        from tests.model_families.test_omni_prompts import processor_of

        config = reference_thinker(self._folder).config
        text = processor_of(self._family).replace_video_with_audio_token(
            {"video_grid_thw": np.array([video.grid_thw]), "video_second_per_grid": [video.seconds_per_grid]},
            0,
            {"num_audio_tokens": np.array([num_audio])},
            0,
            position_id_per_seconds=config.position_id_per_seconds,
            seconds_per_chunk=2.0,
        )
        return self._tokenizer(text)["input_ids"]


class _Gathered:
    def __init__(self) -> None:
        self.pixels: list[torch.Tensor] = []
        self.image_grids: list[list[int]] = []
        self.videos: list[torch.Tensor] = []
        self.video_grids: list[tuple[int, int, int]] = []
        self.seconds: list[float] = []
        self.mels: list[torch.Tensor] = []
        self.use_audio_in_video = False

    def tensors(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self.pixels:
            found |= {"pixel_values": torch.cat(self.pixels)}
            found |= {"image_grid_thw": torch.tensor(self.image_grids)}
        if self.videos:
            found |= {"pixel_values_videos": torch.cat(self.videos)}
            found |= {"video_grid_thw": torch.tensor(self.video_grids)}
            found |= {"video_second_per_grid": torch.tensor(self.seconds)}
            found |= {"use_audio_in_video": self.use_audio_in_video}
        if self.mels:
            longest = max(mel.shape[1] for mel in self.mels)
            padded = [torch.nn.functional.pad(mel, (0, longest - mel.shape[1])) for mel in self.mels]
            masks = [torch.arange(longest) < mel.shape[1] for mel in self.mels]
            found |= {"input_features": torch.stack(padded)}
            found |= {"feature_attention_mask": torch.stack(masks).long()}
        return found


def resolved(
    served: Served, source: MediaSource, specs: MediaSpecs
) -> tuple[list[MediaItem], list[np.ndarray]]:
    """The items of a source and copies of their features, by the service's own workers."""
    preprocessor = served.service.preprocessor
    assert preprocessor is not None

    async def run() -> tuple[list[MediaItem], list[np.ndarray]]:
        items, arrays = [], []
        for one in await preprocessor.resolve(source, specs):
            made = one.processed or await preprocessor.materialize(one)
            items.append(made.item)
            arrays.append(preprocessor.pool.arena.view(made.item.features).copy())
            made.lease.release()
        return items, arrays

    return served.run(run())


def _patches(frames: np.ndarray, spec: VideoSpec, video: MediaItem) -> torch.Tensor:
    """uint8 [T, H, W, 3] → normalised patches as the reference's video processor orders them."""
    mean, std = (np.array(v, dtype=np.float32) * 255 for v in (spec.image_mean, spec.image_std))
    normal = (frames.astype(np.float32) - mean) / std
    grid_t, rows, columns = video.grid_thw
    size, merge, depth = spec.patch_size, spec.merge_size, spec.temporal_patch_size
    blocks = normal.reshape(grid_t, depth, rows // merge, merge, size, columns // merge, merge, size, 3)
    patches = np.transpose(blocks, (0, 2, 5, 3, 6, 8, 1, 4, 7))
    return torch.from_numpy(np.ascontiguousarray(patches).reshape(grid_t * rows * columns, -1))


def _messages(turns: Sequence[OmniTurn]) -> list[dict[str, Any]]:
    kinds = {Heard: "audio", Seen: "video"}
    return [
        {
            "role": role,
            "content": [
                {"type": "text", "text": p} if isinstance(p, str) else {"type": kinds.get(type(p), "image")}
                for p in parts
            ],
        }
        for role, parts in turns
    ]


@lru_cache(maxsize=4)
def _extractor(folder: Path) -> WhisperFeatureExtractor:
    return WhisperFeatureExtractor.from_pretrained(folder)
