"""Spoken answers against `transformers`: the same text, the same codec frames, the same sound, whatever the
schedule."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from contracts.params import SamplingParams
from lm_engine.budgets import StepDraft
from lm_engine.engine import LMEngine, StepEvents
from lm_engine.scheduler import Scheduler
from lm_engine.sequence import Request as EngineRequest
from lm_engine.sequence import Sequence
from lm_engine.talker.scheduler import TalkerScheduler
from model_families.registry import open_family
from stages.service import AudioChunk, GenerationRequest, SpeechOptions
from stages.speech_orders import SpeechDesk
from tests.conftest import nothing_left_behind
from tests.omni_oracle import Heard, Oracle, Seen, served_turns, sound
from tests.preprocess.films import film
from tests.served import Served, Shape, conversation, meeting, picture
from tests.spoken import (
    FramesHeard,
    Reference,
    SpokenAnswer,
    Turns,
    frames_heard,
    greedy_talker,
    reference_speech,
    speak,
)
from tests.tiny_omni import CODEC_EOS, CODEC_EOS_3, CODEC_PAD, OMNI_FAMILIES, VOICES

torch.set_num_threads(1)
MAX_TOKENS = 7
SEED = 5
NUM_FRAMES = {
    "qwen2_5_omni": 8,
    "qwen3_omni_moe": 14,
}  # the former's sound is one chunk: the reference knows no other
GREEDY = greedy_talker(SEED)
# Random weights would rather not speak at all.
ENDLESS = {
    "qwen2_5_omni": ((CODEC_EOS, -100.0), (CODEC_PAD, -100.0)),
    "qwen3_omni_moe": ((CODEC_EOS_3, -100.0),),
}


def clip(seed: int, num_frames: int) -> Seen:
    """Two frames a second, and what is to be heard meanwhile."""
    frames = [np.asarray(picture(seed + i, 64, 60)) for i in range(num_frames)]
    return Seen(film(frames, fps=2, codec="mpeg4", sound=sound(seed, num_frames / 2)[None]), with_sound=True)


A, B = picture(1), picture(2, 112, 60)
S, T = Heard(sound(3, 0.7)), Heard(sound(4, 1.3))
CLIP, OTHER_CLIP = clip(10, 5), clip(30, 4)
SCENARIOS: dict[str, Turns] = {
    "text": [("user", ["hello there, the answer is"])],
    "image": [("user", [A, "what is it?"])],
    "sound": [("user", ["who is it", S])],
    "video with sound": [("user", ["see", CLIP, "what is said?"])],
    "all at once": [("user", [A, "and", OTHER_CLIP, "and", S, "well?"])],
    "three turns": [
        ("user", [B, "what is it?"]),
        ("assistant", ["a thing"]),
        ("user", [T, "and this?"]),
        ("assistant", ["a noise"]),
        ("user", ["again", S, CLIP, "in the end"]),
    ],
}
MANY = [*((name, VOICES[0]) for name in SCENARIOS), ("text", VOICES[1]), ("video with sound", VOICES[1])]
ROOM = ("thinker.kv_memory=8MiB", "talker.kv_memory=8MiB", "preprocess.workers=1")
CUT = ("thinker.long_prefill_cap=7", "thinker.max_step_visual_tokens=5", "talker.long_prefill_cap=5")


@pytest.fixture(scope="module", autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    """The servers here serve several tests."""
    with nothing_left_behind():
        yield


@pytest.fixture(scope="module", params=OMNI_FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(tiny_omni: Callable[..., Path], family: str) -> Path:
    return tiny_omni(family)


def at_most(folder: Path, num_frames: int, *, field: str = "max_speech_s") -> str:
    spec = open_family(folder).speech
    assert spec is not None
    return f"server.{field}={(num_frames - 0.5) / spec.frames_per_s}"


@pytest.fixture(scope="module")
def heard() -> Iterator[FramesHeard]:
    with pytest.MonkeyPatch.context() as patch, frames_heard(patch) as frames:
        yield frames


@pytest.fixture(scope="module")
def roomy(folder: Path, family: str) -> Iterator[Served]:
    with Served(folder, *ROOM, at_most(folder, NUM_FRAMES[family])) as served:
        yield served


@pytest.fixture(scope="module")
def cut(folder: Path, family: str) -> Iterator[Served]:
    """Prompts in many steps, of thinker and talker."""
    with Served(folder, *ROOM, *CUT, at_most(folder, NUM_FRAMES[family])) as served:
        yield served


@pytest.fixture(params=["roomy", "cut"])
def served(request: pytest.FixtureRequest) -> Served:
    found = request.getfixturevalue(request.param)
    assert isinstance(found, Served)
    return found


@pytest.fixture(scope="module")
def expected(folder: Path, family: str, roomy: Served) -> Callable[[str, str], Reference]:
    oracle = Oracle(folder, family, roomy)

    @cache
    def reference(name: str, voice: str) -> Reference:
        bounds = {"max_tokens": MAX_TOKENS, "max_frames": NUM_FRAMES[family]}
        inputs = oracle.inputs(SCENARIOS[name])
        return reference_speech(folder, inputs, voice=voice, seed=SEED, **bounds)

    return reference


def assert_same(answer: SpokenAnswer, frames: list[tuple[int, ...]], reference: Reference) -> None:
    text = answer.tokens[:-1] if answer.finish == "stop" else answer.tokens
    assert text == reference.text
    assert frames == reference.frames
    assert answer.samples.shape == reference.pcm.shape
    torch.testing.assert_close(answer.samples, reference.pcm, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", SCENARIOS)
def test_alone_cold_and_warm(served: Served, heard, expected, name: str) -> None:
    served.reset_cache()
    for state in ("cold", "warm"):
        answer = served.run(speak(served, SCENARIOS[name], max_tokens=MAX_TOKENS))
        assert_same(answer, heard[answer.request_id], expected(name, VOICES[0]))
        cached = 0 if state == "cold" else (len(answer.prompt) - 1) // 16 * 16
        assert (answer.num_cached_tokens or 0) >= cached
        assert state == "warm" or not answer.num_cached_tokens
    served.assert_clean()


def test_eight_at_once(served: Served, heard, expected) -> None:
    async def ask_all() -> list[SpokenAnswer]:
        asks = (speak(served, SCENARIOS[n], voice=v, max_tokens=MAX_TOKENS) for n, v in MANY)
        return list(await asyncio.gather(*asks))

    served.reset_cache()
    for (name, voice), answer in zip(MANY, served.run(ask_all()), strict=True):
        assert_same(answer, heard[answer.request_id], expected(name, voice))
    served.assert_clean()


def test_sampled_answers_are_the_same_together_as_alone(roomy: Served, heard, family: str) -> None:
    """Eight with seeds of their own, at once and each alone, cold and warm: tokens and frames bit for bit."""
    asked = [(name, seed) for seed, (name, _) in enumerate(MANY, 1)]

    async def ask(name: str, seed: int) -> SpokenAnswer:
        talker = SamplingParams(temperature=0.9, top_k=20, seed=seed, logit_bias=ENDLESS[family])
        options = {"temperature": 0.8, "seed": seed, "max_tokens": MAX_TOKENS}
        return await speak(roomy, SCENARIOS[name], talker=talker, **options)

    async def ask_all() -> list[SpokenAnswer]:
        return list(await asyncio.gather(*(ask(name, seed) for name, seed in asked)))

    alone = [roomy.run(ask(name, seed)) for name, seed in asked]
    with meeting(len(asked)):
        together = roomy.run(ask_all())
    assert len({answer.pcm for answer in alone}) == len(asked) == 8
    for one, other in zip(alone, together, strict=True):
        assert one.tokens == other.tokens
        assert heard[one.request_id] == heard[other.request_id]
        torch.testing.assert_close(one.samples, other.samples, atol=1e-5, rtol=0)
    roomy.assert_clean()


@contextmanager
def thinkers_held_back(frames: FramesHeard) -> Iterator[None]:
    """A thinker that has written some words of an answer waits until these are being spoken; each stage has a
    thread of its own."""
    step = LMEngine.step

    def is_silent(request: EngineRequest) -> bool:
        return request.sequences[0].num_output >= 4 and request.id not in frames

    async def held_back(engine: LMEngine) -> StepEvents:
        while any(map(is_silent, engine._scheduler.requests.values())):
            frames.more.clear()
            if any(map(is_silent, engine._scheduler.requests.values())):
                assert await asyncio.to_thread(frames.more.wait, 60), "nobody speaks"
        return await step(engine)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LMEngine, "step", held_back)
        yield


@pytest.mark.parametrize(
    "names", [("text", "sound", "video with sound"), ("image", "all at once", "three turns")], ids=" ".join
)
def test_a_thinker_preempted_while_its_talker_speaks(
    folder: Path,
    family: str,
    roomy: Served,
    heard: FramesHeard,
    monkeypatch: pytest.MonkeyPatch,
    names: tuple[str, str, str],
) -> None:
    """The KV of three prompts and of a part of their answers: whoever came last gives way, in mid speech,
    while
    the talkers, whose KV is reserved, speak on. Sound of more frames than the reference makes in one piece is
    compared with that of an answer that had room."""
    new_tokens, num_frames = 24, 24
    oracle = Oracle(folder, family, roomy)
    inputs = [oracle.inputs(SCENARIOS[name]) for name in names]
    bounds = {"max_tokens": new_tokens, "max_frames": num_frames, "ignore_eos": True}
    theirs = [reference_speech(folder, i, voice=VOICES[0], seed=SEED, **bounds) for i in inputs]
    lengths = [i["input_ids"].shape[1] for i in inputs]
    block_bytes = 4 * open_family(folder).decoder_config.kv_bytes_per_token(torch.float32)
    num_blocks = 1 + sum(-(-(length + new_tokens // 4) // 4) for length in lengths)
    tight = (
        f"thinker.kv_memory={num_blocks * block_bytes}",
        *("thinker.block_size=4", "thinker.prefix_cache=false"),
        f"thinker.max_context={max(lengths) + new_tokens}",
    )
    speaking_when_preempted: list[str] = []
    preempt = Scheduler._preempt

    def watch(scheduler: Scheduler, seq: Sequence, draft: StepDraft) -> None:
        if seq.request.id in heard:
            speaking_when_preempted.append(seq.request.id)
        preempt(scheduler, seq, draft)

    monkeypatch.setattr(Scheduler, "_preempt", watch)
    with Served(folder, *ROOM[1:], *tight, at_most(folder, num_frames)) as served:

        async def ask(name: str) -> SpokenAnswer:
            return await speak(served, SCENARIOS[name], max_tokens=new_tokens, ignore_eos=True)

        async def ask_all() -> list[SpokenAnswer]:
            with thinkers_held_back(heard), meeting(len(names)):
                return list(await asyncio.gather(*map(ask, names)))

        alone = [served.run(ask(name)) for name in names]
        assert not speaking_when_preempted
        for _ in range(5):  # which of them is speaking when room runs out is not ours to say
            for answer, undisturbed, reference in zip(served.run(ask_all()), alone, theirs, strict=True):
                assert answer.tokens == reference.text
                assert heard[answer.request_id] == reference.frames
                if family == "qwen3_omni_moe":
                    torch.testing.assert_close(answer.samples, reference.pcm, atol=1e-4, rtol=0)
                torch.testing.assert_close(answer.samples, undisturbed.samples, atol=1e-5, rtol=0)
            if speaking_when_preempted:
                break
        assert speaking_when_preempted, served.stats("thinker")["num_preemptions_total"]
        served.assert_clean()


def test_every_stage_in_a_process_of_its_own_says_the_same(folder: Path, family: str, roomy: Served) -> None:
    asked = [SCENARIOS["text"], SCENARIOS["all at once"]]
    with Served(folder, *ROOM, at_most(folder, NUM_FRAMES[family]), workers="per-stage") as apart:
        for turns in asked:
            one, other = (server.run(speak(server, turns)) for server in (roomy, apart))
            assert one.tokens == other.tokens
            torch.testing.assert_close(one.samples, other.samples, atol=1e-5, rtol=0)
        apart.assert_clean()


def test_a_given_text_sounds_as_if_it_had_been_sampled(
    roomy: Served, heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    for turns in SCENARIOS.values():
        sampled = roomy.run(speak(roomy, turns, max_tokens=MAX_TOKENS))
        words = sampled.tokens[:-1] if sampled.finish == "stop" else sampled.tokens
        with monkeypatch.context() as context:  # the tiny tokenizer does not give these tokens back
            context.setattr(roomy.service._prompts, "forced", lambda speech, words=words: tuple(words))
            spoken = roomy.run(speak(roomy, turns, verbatim="those words"))
        assert (spoken.tokens, spoken.finish) == ([], "stop")
        assert heard[spoken.request_id] == heard[sampled.request_id]
        torch.testing.assert_close(spoken.samples, sampled.samples, atol=1e-5, rtol=0)
    assert roomy.run(speak(roomy, SCENARIOS["text"], verbatim=" the house is here")).pcm
    roomy.assert_clean()


@pytest.mark.parametrize("shape", ["one", "per-stage"])
def test_a_listener_who_leaves_frees_every_stage(
    folder: Path, monkeypatch: pytest.MonkeyPatch, shape: Shape
) -> None:
    """Of answers that are sampled, and of a given text, for whose tokens alone the talker reserves KV."""
    reserved: list[int] = []
    order = SpeechDesk.order

    def watch(desk, options, sampling):
        made = order(desk, options, sampling)
        reserved.extend([made.max_frames] if options.verbatim is not None else [])
        return made

    monkeypatch.setattr(SpeechDesk, "order", watch)
    family = open_family(folder)
    assert family.speech is not None

    async def leave(served: Served, turns: Turns, verbatim: str | None) -> None:
        sampling = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
        speech = SpeechOptions(sampling=GREEDY, verbatim=verbatim)
        given = conversation(served_turns(turns))
        events = served.service.generate(GenerationRequest(input=given, sampling=sampling, speech=speech))
        async for event in events:
            if isinstance(event, AudioChunk):
                break
        await events.aclose()

    async def leave_all(served: Served) -> None:
        await asyncio.gather(*(leave(served, turns, None) for turns in SCENARIOS.values()))
        await leave(served, SCENARIOS["text"], " the house is here")

    with Served(folder, *ROOM, "server.max_speech_s=60", workers=shape) as served:
        served.run(leave_all(served))
        served.assert_clean()
        assert {worker.restarts for worker in served.service.workers()} == {0}
    num_words = len(family.tokenizer.encode(" the house is here"))
    assert reserved == [family.speech.max_frames_of(num_words)]
    assert reserved[0] < 30 * family.speech.frames_per_s


def test_a_listener_who_does_not_listen_stops_the_talker(tiny_omni: Callable[..., Path]) -> None:
    """Its own talker, not the others': they speak to their ends meanwhile."""
    folder, window = tiny_omni("qwen3_omni_moe"), 4
    spec = open_family(folder).speech
    assert spec is not None
    limits = (*ROOM, at_most(folder, 60), at_most(folder, window, field="audio_window_s"))
    talker = SamplingParams(temperature=0.0, logit_bias=ENDLESS["qwen3_omni_moe"])
    request = GenerationRequest(
        input=conversation(served_turns(SCENARIOS["text"])),
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


def test_open_answers_run_side_by_side_on_a_pool_that_holds_one_of_the_longest(
    tiny_omni: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the talker reserves follows the text: it ends, and the others need not wait for the speech."""
    folder = tiny_omni("qwen3_omni_moe")
    family = open_family(folder)
    assert family.talker_config is not None
    per_token = family.talker_config.kv_bytes_per_token(torch.float32)
    context = -(-(1 << 20) // (16 * per_token)) * 16  # in whole blocks; no talker has less than a MiB
    pool = (f"talker.max_context={context}", f"talker.kv_memory={per_token * (context + 16)}")
    (end,) = family.tokenizer.encode("<|im_end|>", parse_special=True)
    open_ended = {"max_tokens": 3000, "min_tokens": 6, "logit_bias": ((end, 100.0),)}
    talker = SamplingParams(temperature=0.0, logit_bias=ENDLESS["qwen3_omni_moe"])
    running: list[int] = []
    commit = TalkerScheduler._commit

    def watch(scheduler: TalkerScheduler, draft: object) -> object:
        running.append(scheduler.num_running)
        return commit(scheduler, draft)  # type: ignore[arg-type]

    monkeypatch.setattr(TalkerScheduler, "_commit", watch)

    async def main(served: Served) -> None:
        desk = served.service._speech
        assert desk._spec is not None
        desk._spec = msgspec.structs.replace(desk._spec, extra_s=60 / desk._spec.frames_per_s)
        desk._spec = msgspec.structs.replace(desk._spec, s_per_text_token=2 / desk._spec.frames_per_s)

        async def one() -> SpokenAnswer:
            return await speak(served, SCENARIOS["text"], talker=talker, **open_ended)

        assert desk._spec.max_frames_of(3000) > context
        alone = await one()
        assert max(running) == 1
        assert (len(alone.tokens), alone.finish, alone.audio_finish) == (7, "stop", "length")
        with meeting(4):
            together = await asyncio.gather(*(one() for _ in range(4)))
        assert max(running) >= 3
        for answer in together:
            assert answer.tokens == alone.tokens
            assert answer.samples.numel() == alone.samples.numel()
            torch.testing.assert_close(answer.samples, alone.samples, atol=1e-5, rtol=0)

    with Served(folder, "thinker.kv_memory=8MiB", *pool, "preprocess.workers=1") as served:
        served.run(main(served))
        served.assert_clean()
