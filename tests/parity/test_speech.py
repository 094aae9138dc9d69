"""Spoken answers against `transformers`: the same text, the same codec frames, the same sound, whatever the
schedule."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from contracts.params import SamplingParams
from model_families.registry import open_family
from stages.service import AudioChunk, GenerationRequest, SpeechOptions
from tests.served import Served, picture
from tests.spoken import (
    Reference,
    SpokenAnswer,
    Turns,
    frames_heard,
    greedy_talker,
    reference_speech,
    sound,
    speak,
    spoken_conversation,
)
from tests.tiny_omni import CODEC_EOS, CODEC_EOS_3, CODEC_PAD, OMNI_FAMILIES, VOICES

MAX_TOKENS = 7
SEED = 5
NUM_FRAMES = {
    "qwen2_5_omni": 8,
    "qwen3_omni_moe": 14,
}  # the former's sound is one chunk: the reference knows no other
A, B = picture(1), picture(2, 112, 60)
S, T = sound(3, 0.7), sound(4, 1.3)
GREEDY = greedy_talker(SEED)
# Random weights would rather not speak at all.
ENDLESS = {
    "qwen2_5_omni": ((CODEC_EOS, -100.0), (CODEC_PAD, -100.0)),
    "qwen3_omni_moe": ((CODEC_EOS_3, -100.0),),
}

SCENARIOS: dict[str, Turns] = {
    "text": [("user", ["hello there, the answer is"])],
    "image": [("user", [A, "what is it?"])],
    "sound": [("user", ["who is it", S])],
    "all, in three turns": [
        ("user", [B, "what is it?"]),
        ("assistant", ["a thing"]),
        ("user", [T, "and this?"]),
        ("assistant", ["a noise"]),
        ("user", ["again", S, A, "in the end"]),
    ],
}


def settings(folder: Path, family: str) -> tuple[str, ...]:
    spec = open_family(folder).speech
    assert spec is not None
    return (
        "thinker.kv_memory=8MiB",
        "talker.kv_memory=8MiB",
        "preprocess.workers=1",
        f"server.max_speech_s={(NUM_FRAMES[family] - 0.5) / spec.frames_per_s}",
    )


CUT = ("thinker.long_prefill_cap=7", "thinker.max_step_visual_tokens=5", "talker.long_prefill_cap=5")


@pytest.fixture(params=OMNI_FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@cache
def expected(folder: Path, family: str, name: str, prompt: tuple[int, ...], voice: str) -> Reference:
    return reference_speech(
        folder,
        list(prompt),
        SCENARIOS[name],
        voice=voice,
        max_tokens=MAX_TOKENS,
        max_frames=NUM_FRAMES[family],
        seed=SEED,
    )


def assert_same(
    folder: Path,
    family: str,
    name: str,
    answer: SpokenAnswer,
    frames: list[tuple[int, ...]],
    voice: str = VOICES[0],
) -> None:
    reference = expected(folder, family, name, tuple(answer.prompt), voice)
    text = answer.tokens[:-1] if answer.finish == "stop" else answer.tokens
    assert text == reference.text
    assert frames == reference.frames
    assert answer.samples.shape == reference.pcm.shape
    torch.testing.assert_close(answer.samples, reference.pcm, atol=1e-4, rtol=0)


@pytest.mark.parametrize("cut", [(), CUT], ids=["one chunk", "cut"])
def test_alone_cold_and_warm(
    tiny_omni: Callable[..., Path], family: str, cut: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_omni(family)
    with (
        frames_heard(monkeypatch) as heard,
        Served(folder, *settings(folder, family), *cut) as served,
    ):
        for name, turns in SCENARIOS.items():
            for _ in ("cold", "warm"):
                answer = served.run(speak(served, turns, max_tokens=MAX_TOKENS))
                assert_same(folder, family, name, answer, heard[answer.request_id])
            assert answer.num_cached_tokens is not None
            assert answer.num_cached_tokens >= (len(answer.prompt) - 1) // 16 * 16
        served.assert_clean()


@pytest.mark.parametrize("cut", [(), CUT], ids=["one chunk", "cut"])
def test_eight_at_once(
    tiny_omni: Callable[..., Path], family: str, cut: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_omni(family)
    asked = [(name, VOICES[i % 2]) for i, name in enumerate([*SCENARIOS, *SCENARIOS])]
    asked = [(name, VOICES[(i + i // 4) % 2]) for i, (name, _) in enumerate(asked)]

    async def ask_all(served: Served) -> list[SpokenAnswer]:
        asks = (speak(served, SCENARIOS[n], voice=v, max_tokens=MAX_TOKENS) for n, v in asked)
        return list(await asyncio.gather(*asks))

    with (
        frames_heard(monkeypatch) as heard,
        Served(folder, *settings(folder, family), *cut) as served,
    ):
        for (name, voice), answer in zip(asked, served.run(ask_all(served)), strict=True):
            assert_same(folder, family, name, answer, heard[answer.request_id], voice)
        served.assert_clean()


def test_sampled_answers_are_the_same_together_as_alone(
    tiny_omni: Callable[..., Path], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight with seeds of their own, at once and each alone, cold and warm: tokens and frames bit for bit."""
    folder = tiny_omni(family)
    asked = [(name, seed) for seed in (1, 2) for name in SCENARIOS]

    async def ask(served: Served, name: str, seed: int) -> SpokenAnswer:
        talker = SamplingParams(temperature=0.9, top_k=20, seed=seed, logit_bias=ENDLESS[family])
        options = {"temperature": 0.8, "seed": seed, "max_tokens": MAX_TOKENS}
        return await speak(served, SCENARIOS[name], talker=talker, **options)

    async def ask_all(served: Served) -> list[SpokenAnswer]:
        return list(await asyncio.gather(*(ask(served, name, seed) for name, seed in asked)))

    with (
        frames_heard(monkeypatch) as heard,
        Served(folder, *settings(folder, family)) as served,
    ):
        alone = [served.run(ask(served, name, seed)) for name, seed in asked]
        together = served.run(ask_all(served))
        assert len({answer.pcm for answer in alone}) == len(asked)
        for one, other in zip(alone, together, strict=True):
            assert one.tokens == other.tokens
            assert heard[one.request_id] == heard[other.request_id]
            torch.testing.assert_close(one.samples, other.samples, atol=1e-5, rtol=0)
        served.assert_clean()


def test_every_stage_in_a_process_of_its_own_says_the_same(
    tiny_omni: Callable[..., Path], family: str
) -> None:
    folder = tiny_omni(family)
    limits = settings(folder, family)
    with Served(folder, *limits) as served:
        here = [served.run(speak(served, turns)) for turns in SCENARIOS.values()]
    with Served(folder, *limits, workers="per-stage") as served:
        there = [served.run(speak(served, turns)) for turns in SCENARIOS.values()]
        served.assert_clean()
    for one, other in zip(here, there, strict=True):
        assert one.tokens == other.tokens
        torch.testing.assert_close(one.samples, other.samples, atol=1e-5, rtol=0)


def test_a_given_text_sounds_as_if_it_had_been_sampled(
    tiny_omni: Callable[..., Path], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_omni(family)
    with (
        frames_heard(monkeypatch) as heard,
        Served(folder, *settings(folder, family)) as served,
    ):
        for turns in SCENARIOS.values():
            sampled = served.run(speak(served, turns, max_tokens=MAX_TOKENS))
            words = sampled.tokens[:-1] if sampled.finish == "stop" else sampled.tokens
            with monkeypatch.context() as context:  # the tiny tokenizer does not give these tokens back
                context.setattr(served.service, "_forced", lambda speech, words=words: tuple(words))
                spoken = served.run(speak(served, turns, verbatim="those words"))
            assert (spoken.tokens, spoken.finish) == ([], "stop")
            assert heard[spoken.request_id] == heard[sampled.request_id]
            torch.testing.assert_close(spoken.samples, sampled.samples, atol=1e-5, rtol=0)
        plain = served.run(speak(served, SCENARIOS["text"], verbatim=" the house is here"))
        assert plain.pcm
        served.assert_clean()


def test_a_listener_who_leaves_frees_every_stage(tiny_omni: Callable[..., Path], family: str) -> None:
    async def leave(served: Served, name: str) -> None:
        sampling = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
        request = GenerationRequest(
            input=spoken_conversation(SCENARIOS[name]),
            sampling=sampling,
            speech=SpeechOptions(sampling=GREEDY),
        )
        events = served.service.generate(request)
        async for event in events:
            if isinstance(event, AudioChunk):
                break
        await events.aclose()

    async def leave_all(served: Served) -> None:
        await asyncio.gather(*(leave(served, name) for name in [*SCENARIOS, *SCENARIOS]))

    folder = tiny_omni(family)
    limits = (*settings(folder, family)[:3], "server.max_speech_s=20")
    with Served(folder, *limits) as served:
        served.run(leave_all(served))
        served.assert_clean()


def test_a_listener_who_does_not_listen_stops_the_talker(tiny_omni: Callable[..., Path]) -> None:
    """Its own talker, not the others': they speak to their ends meanwhile."""
    folder = tiny_omni("qwen3_omni_moe")
    spec = open_family(folder).speech
    assert spec is not None
    window = 4
    limits = (
        *settings(folder, "qwen3_omni_moe")[:3],
        f"server.max_speech_s={59.5 / spec.frames_per_s}",
        f"server.audio_window_s={(window - 0.5) / spec.frames_per_s}",
    )
    talker = SamplingParams(temperature=0.0, logit_bias=ENDLESS["qwen3_omni_moe"])
    request = GenerationRequest(
        input=spoken_conversation(SCENARIOS["text"]),
        sampling=SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True),
        speech=SpeechOptions(sampling=talker),
    )

    async def main(served: Served) -> None:
        deaf = served.service.generate(request)
        heard = 0
        async for event in deaf:
            if isinstance(event, AudioChunk):
                heard = len(event.samples) // 4
                break
        other = await speak(served, SCENARIOS["text"], talker=talker, max_tokens=12, ignore_eos=True)
        assert other.samples.numel() > 50 * spec.samples_per_frame
        made = -(-other.samples.numel() // spec.samples_per_frame)
        bound = made + window + heard // spec.samples_per_frame + 1
        for _ in range(20):  # each a round through every stage, whose figures come with it
            await served.service.check_integrity()
            assert served.stats("talker")["frames_total"] <= bound
        await deaf.aclose()

    with Served(folder, *limits) as served:
        served.run(main(served))
        served.assert_clean()
