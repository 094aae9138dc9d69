"""Spoken answers of a served checkpoint, and of `transformers` over the same prompt."""

from __future__ import annotations

import base64
import io
import warnings
import wave
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import WhisperFeatureExtractor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from contracts.conversation import Conversation, MediaPart, Message, TextPart
from contracts.media import MediaSource
from contracts.params import SamplingParams
from stages.service import AudioChunk, Event, GenerationRequest, PromptReady, SpeechOptions
from tests.served import Served, data_url
from tests.tiny_omni import CODEC_EOS, CODEC_PAD, reference_omni
from vocoder.pool import VocoderPool

RATE = 16_000


def greedy_talker(seed: int) -> SamplingParams:
    """As the references are when they do not sample; `seed` is for what their vocoders draw."""
    return SamplingParams(temperature=0.0, repetition_penalty=1.05, seed=seed)


@dataclass(frozen=True, eq=False)
class Sound:
    """16-bit mono."""

    samples: np.ndarray

    @property
    def url(self) -> str:
        buffer = io.BytesIO()
        with wave.open(buffer, "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(RATE)
            file.writeframes(self.samples.astype("<i2").tobytes())
        return "data:audio/wav;base64," + base64.b64encode(buffer.getvalue()).decode()

    @property
    def floats(self) -> np.ndarray:
        return (self.samples / 32768.0).astype(np.float32)


def sound(seed: int, seconds: float) -> Sound:
    rng = np.random.default_rng(seed)
    time_s = np.arange(int(seconds * RATE)) / RATE
    tones = sum(np.sin(2 * np.pi * f * time_s + f) for f in rng.uniform(100, 3000, 4))
    return Sound((3000 * tones + rng.normal(0, 300, len(time_s))).astype(np.int16))


Turns = Sequence[tuple[str, Sequence[Any]]]


def spoken_conversation(turns: Turns) -> Conversation:
    def part(given: Any) -> TextPart | MediaPart:
        if isinstance(given, str):
            return TextPart(given)
        if isinstance(given, Sound):
            return MediaPart(MediaSource("audio", given.url))
        return MediaPart(MediaSource("image", data_url(given)))

    messages = tuple(Message(role=role, parts=tuple(map(part, parts))) for role, parts in turns)
    return Conversation(messages=messages)


@dataclass
class SpokenAnswer:
    request_id: str = ""
    prompt: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    finish: str | None = None
    pcm: bytes = b""
    audio_finish: str | None = None
    num_cached_tokens: int | None = None

    def take(self, event: Event) -> None:
        if isinstance(event, PromptReady):
            self.request_id, self.prompt = event.request_id, event.prompt_token_ids
        elif isinstance(event, AudioChunk):
            assert self.audio_finish is None, "audio after its end"
            self.pcm += event.samples
            self.audio_finish = event.finish_reason
        else:
            if event.num_cached_tokens is not None:
                self.num_cached_tokens = event.num_cached_tokens
            for delta in event.deltas:
                self.tokens += delta.token_ids
                self.finish = delta.finish_reason

    @property
    def samples(self) -> torch.Tensor:
        return torch.frombuffer(bytearray(self.pcm), dtype=torch.float32) if self.pcm else torch.empty(0)


async def speak(
    served: Served,
    turns: Turns,
    *,
    voice: str | None = None,
    talker: SamplingParams | None = None,
    verbatim: str | None = None,
    **sampling: Any,
) -> SpokenAnswer:
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 8, **sampling})
    options = SpeechOptions(voice=voice, sampling=talker or greedy_talker(5), verbatim=verbatim)
    request = GenerationRequest(input=spoken_conversation(turns), sampling=params, speech=options)
    answer = SpokenAnswer()
    async for event in served.service.generate(request):
        answer.take(event)
    return answer


@contextmanager
def frames_heard(patch: pytest.MonkeyPatch) -> Iterator[dict[str, list[tuple[int, ...]]]]:
    """Codec frames by request id, as they reach the vocoder of this process."""
    heard: dict[str, list[tuple[int, ...]]] = {}
    take = VocoderPool.frames

    def listen(pool: Any, request_id: str, codes_KQ: torch.Tensor, last: bool) -> bool:
        heard.setdefault(request_id, []).extend(tuple(row) for row in codes_KQ.tolist())
        return bool(take(pool, request_id, codes_KQ, last))

    with patch.context() as context:
        context.setattr(VocoderPool, "frames", listen)
        yield heard


@dataclass(frozen=True)
class Reference:
    """`text`: what is spoken. `frames` are cut at the bound that was asked for."""

    text: list[int]
    frames: list[tuple[int, ...]]
    pcm: torch.Tensor


@torch.no_grad()
def reference_speech(
    folder: Path, prompt: list[int], turns: Turns, *, voice: str, max_tokens: int, max_frames: int, seed: int
) -> Reference:
    """What `transformers` says. It leaves the last token that its thinker draws unspoken, the end token or
    not,
    so it gets one more. Qwen2.5-Omni's prompt is padded by one token: without padding `generate` drops the
    mask, and the talker, which asks for the mask (as of transformers 5.24), then leaves out its start codes.
    `seed`: of the noise that its vocoder draws.
    """
    model = reference_omni(folder)
    two_five = hasattr(model, "token2wav")
    inputs = {"input_ids": torch.tensor([[0] * two_five + prompt]), **_media_inputs(folder, turns, two_five)}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    inputs["attention_mask"][:, :two_five] = 0
    if not two_five:  # its talker counts a sound's tokens by a configuration that it has not (5.24)
        model.talker.config.audio_config = model.config.thinker_config.audio_config
    kept: dict[str, Any] = {}
    thinker, vocoder = model.thinker.generate, model.token2wav if two_five else model.code2wav
    sounding = "forward" if two_five else "chunked_decode"
    decode = getattr(vocoder, sounding)

    def think(**arguments: Any) -> Any:
        kept["thought"] = thinker(**arguments)
        return kept["thought"]

    def sounds(codes: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        kept["codes"] = codes
        torch.manual_seed(seed)
        return decode(codes, *arguments, **options)

    model.thinker.generate = think
    setattr(vocoder, sounding, sounds)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns of its own arguments
            _, pcm = model.generate(
                **inputs,
                speaker=voice,
                thinker_max_new_tokens=max_tokens + 1,
                thinker_do_sample=False,
                talker_do_sample=False,
                talker_max_new_tokens=max_frames + (not two_five),
                **({"talker_eos_token_id": [CODEC_PAD, CODEC_EOS]} if two_five else {}),
            )
    finally:
        del model.thinker.generate
        setattr(vocoder, sounding, decode)
    text = kept["thought"].sequences[0, inputs["input_ids"].shape[1] : -1].tolist()
    codes = kept["codes"]
    rows = codes.reshape(-1, 1) if two_five else codes[0].T
    return Reference(text, [tuple(row) for row in rows.tolist()], pcm.reshape(-1).float())


def _media_inputs(folder: Path, turns: Turns, two_five: bool) -> dict[str, torch.Tensor]:
    media = [part for _, parts in turns for part in parts if not isinstance(part, str)]
    inputs: dict[str, torch.Tensor] = {}
    if pictures := [part for part in media if isinstance(part, Image.Image)]:
        processor = Qwen2VLImageProcessorPil.from_pretrained(folder)
        features = processor(images=pictures, return_tensors="pt")
        inputs["thinker_pixel_values"] = features[
            "pixel_values"
        ]  # else the talker gets them, and knows them not
        inputs["image_grid_thw"] = features["image_grid_thw"]
    if sounds := [part.floats for part in media if isinstance(part, Sound)]:
        extractor = WhisperFeatureExtractor.from_pretrained(folder)
        heard = extractor(
            sounds,
            sampling_rate=RATE,
            padding="max_length" if two_five else True,
            truncation=False,
            return_attention_mask=True,
            return_tensors="pt",
        )
        inputs["input_features"] = heard["input_features"]
        inputs["feature_attention_mask"] = heard["attention_mask"]
    return inputs
