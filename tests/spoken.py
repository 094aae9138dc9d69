"""Spoken answers of a served checkpoint, and of `transformers` over the same prompt."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from contracts.params import SamplingParams
from stages.service import AudioChunk, Event, GenerationRequest, PromptReady, SpeechOptions
from tests.omni_oracle import NEVER, OmniTurn, served_turns
from tests.served import Served, conversation
from tests.tiny_omni import CODEC_EOS, CODEC_PAD, reference_omni
from vocoder.pool import VocoderPool

Turns = list[OmniTurn]


def greedy_talker(seed: int) -> SamplingParams:
    """As the references are when they do not sample; `seed` is for what their vocoders draw."""
    return SamplingParams(temperature=0.0, repetition_penalty=1.05, seed=seed)


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
    request = GenerationRequest(input=conversation(served_turns(turns)), sampling=params, speech=options)
    answer = SpokenAnswer()
    async for event in served.service.generate(request):
        answer.take(event)
    return answer


class FramesHeard(dict[str, list[tuple[int, ...]]]):
    """Codec frames by request id. `more` is set when some come, on the vocoder's thread."""

    def __init__(self) -> None:
        super().__init__()
        self.more = threading.Event()


@contextmanager
def frames_heard(patch: pytest.MonkeyPatch) -> Iterator[FramesHeard]:
    """As they reach the vocoder of this process."""
    heard = FramesHeard()
    take = VocoderPool.frames

    def listen(pool: Any, request_id: str, codes_KQ: torch.Tensor, last: bool) -> bool:
        heard.setdefault(request_id, []).extend(tuple(row) for row in codes_KQ.tolist())
        heard.more.set()
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
    folder: Path,
    inputs: dict[str, Any],
    *,
    voice: str,
    max_tokens: int,
    max_frames: int,
    seed: int,
    ignore_eos: bool = False,
) -> Reference:
    """What `transformers` says. It leaves the last token that its thinker draws unspoken, the end token or
    not,
    so it gets one more. `inputs`: see `Oracle.inputs`. `seed`: of the noise that its vocoder draws."""
    model = reference_omni(folder)
    two_five = hasattr(model, "token2wav")
    arguments = _arguments(model, inputs, two_five)
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
                **arguments,
                speaker=voice,
                thinker_max_new_tokens=max_tokens + 1,
                thinker_do_sample=False,
                talker_do_sample=False,
                talker_max_new_tokens=max_frames + (not two_five),
                **({"talker_eos_token_id": [CODEC_PAD, CODEC_EOS]} if two_five else {}),
                **({"thinker_eos_token_id": NEVER} if ignore_eos else {}),
            )
    finally:
        del model.thinker.generate
        setattr(vocoder, sounding, decode)
    text = kept["thought"].sequences[0, arguments["input_ids"].shape[1] : -1].tolist()
    codes = kept["codes"]
    rows = codes.reshape(-1, 1) if two_five else codes[0].T
    return Reference(text, [tuple(row) for row in rows.tolist()], pcm.reshape(-1).float())


def _arguments(model: Any, inputs: dict[str, Any], two_five: bool) -> dict[str, Any]:
    """Ways around transformers 5.24, in which

    - Qwen2.5-Omni's `generate` drops a mask without padding, and its talker, which asks for the mask, then
      leaves out its start codes: the prompt is padded by one token;
    - talkers get pixels, which they do not know, unless these are named as the thinker's;
    - Qwen3-Omni's talker counts a sound's tokens by a configuration that it has not, and is not told that a
      video's sound lies among its frames.
    """
    given = dict(inputs)
    if two_five:
        given["input_ids"] = torch.nn.functional.pad(given["input_ids"], (1, 0))
    else:
        model.talker.config.audio_config = model.config.thinker_config.audio_config
        given["talker_use_audio_in_video"] = given.get("use_audio_in_video", False)
    given["attention_mask"] = torch.ones_like(given["input_ids"])
    given["attention_mask"][:, :two_five] = 0
    for name in ("pixel_values", "pixel_values_videos"):
        if name in given:
            given[f"thinker_{name}"] = given.pop(name)
    return given
