"""A worker that dies while an answer is spoken: no sample is missing, repeated or different."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import torch

from contracts.params import SamplingParams
from model_families.registry import open_family
from stages.service import AudioChunk, GenerationRequest, SpeechOptions
from tests.faults.test_worker_death import SETTINGS
from tests.served import Served, conversation, picture
from tests.spoken import SpokenAnswer, Turns, speak
from tests.tiny_omni import CODEC_EOS_3

FAMILY = "qwen3_omni_moe"
NUM_FRAMES, WINDOW_FRAMES = 40, 8
THREE_WORKERS = """
[[worker]]
name = "ears"
stages = ["vision", "audio", "thinker"]
[[worker]]
name = "mouth"
stages = ["talker"]
[[worker]]
name = "voice"
stages = ["vocoder"]
"""
BLOWS = (
    ("talker", signal.SIGKILL),
    ("vocoder", signal.SIGKILL),
    ("thinker", signal.SIGKILL),
    ("talker", signal.SIGSTOP),
    ("vocoder", signal.SIGSTOP),
)
QUESTIONS: list[Turns] = [
    [("user", ["hello there, the answer is"])],
    [("user", [picture(1), "what is it?"])],
    [("user", ["who is in the house"]), ("assistant", ["a thing"]), ("user", ["again"])],
]


def talker(seed: int) -> SamplingParams:
    return SamplingParams(temperature=0.9, top_k=20, seed=seed, logit_bias=((CODEC_EOS_3, -100.0),))


def sampling(seed: int) -> SamplingParams:
    return SamplingParams(temperature=0.8, seed=seed, max_tokens=24, ignore_eos=True)


async def struck(served: Served, index: int, stage: str, blow: int) -> SpokenAnswer:
    """Strikes the stage once the first sound is there; the talker cannot have got far beyond."""
    request = GenerationRequest(
        input=conversation(QUESTIONS[index]),
        sampling=sampling(index),
        speech=SpeechOptions(sampling=talker(index)),
    )
    answer = SpokenAnswer()
    async for event in served.service.generate(request):
        if isinstance(event, AudioChunk) and not answer.pcm:
            (worker,) = (w for w in served.service.workers() if stage in w.stages)
            os.kill(worker.pid, blow)
        answer.take(event)
    return answer


def test_speech_goes_on_over_the_death_of_a_stage(tiny_omni: Callable[..., Path], tmp_path: Path) -> None:
    """Each stage of the path in turn, killed or hanging, under three spoken answers and one written."""
    folder = tiny_omni(FAMILY)
    spec = open_family(folder).speech
    assert spec is not None
    settings = (
        *SETTINGS,
        "talker.kv_memory=8MiB",
        f"server.max_speech_s={(NUM_FRAMES - 0.5) / spec.frames_per_s}",
        f"server.audio_window_s={(WINDOW_FRAMES - 0.5) / spec.frames_per_s}",
    )

    async def ask(served: Served, index: int) -> SpokenAnswer:
        options = {"max_tokens": 24, "temperature": 0.8, "seed": index, "ignore_eos": True}
        return await speak(served, QUESTIONS[index], talker=talker(index), **options)

    async def strike(served: Served, stage: str, blow: int) -> list[SpokenAnswer]:
        (worker,) = (w for w in served.service.workers() if stage in w.stages)
        others = [ask(served, index) for index in range(1, len(QUESTIONS))]
        text = served.answer([("user", ["hello"])], max_tokens=12)
        answers = await asyncio.gather(struck(served, 0, stage, blow), *others)
        await text
        await served.worker_restarted(stage, worker.restarts + 1)
        return list(answers)

    deployment = tmp_path / "three.toml"
    deployment.write_text(THREE_WORKERS)
    with Served(folder, *settings, workers="file", deployment=deployment) as served:
        undisturbed = [served.run(ask(served, index)) for index in range(len(QUESTIONS))]
        for stage, blow in BLOWS:
            disturbed = served.run(strike(served, stage, blow))
            for one, other in zip(undisturbed, disturbed, strict=True):
                assert one.samples.numel() > WINDOW_FRAMES * spec.samples_per_frame
                assert (one.tokens, one.audio_finish) == (other.tokens, other.audio_finish), stage
                assert one.samples.shape == other.samples.shape, stage
                torch.testing.assert_close(one.samples, other.samples, atol=1e-5, rtol=0)
        served.assert_clean()
