"""Talkers against `transformers`: the same codec frames, greedy, whatever the batch and however text
comes."""

from __future__ import annotations

import asyncio
import dataclasses
from functools import lru_cache

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from contracts.errors import BadRequest, EngineError
from contracts.media import Prompt
from contracts.messages import EmbeddingsNeeded, Generate, Generated, Speak
from contracts.params import SamplingParams
from lm_engine.config import EngineConfig
from lm_engine.engine import LMEngine
from lm_engine.memory import allocate_kv
from lm_engine.runner import Runner
from lm_engine.talker.engine import TalkerEngine
from lm_engine.talker.runner import TalkerRunner
from model_families.qwen2_5_omni import talker as qwen2_5
from model_families.qwen2_5_omni.speakers import read_speakers
from model_families.qwen3_omni_moe import talker as qwen3
from model_families.registry import open_family
from tests.model_families.talking import Spoken, StubProcessor, prompt_of, speak
from tests.tiny_omni import OMNI_FAMILIES, VOICES, reference_omni

torch.set_num_threads(1)

LOADERS = {"qwen2_5_omni": qwen2_5.load_talker, "qwen3_omni_moe": qwen3.load_talker}
SAMPLING = {"qwen2_5_omni": qwen2_5.SAMPLING, "qwen3_omni_moe": qwen3.SAMPLING}
CPU = torch.device("cpu")
MAX_FRAMES = 12
GREEDY = SamplingParams(temperature=0.0, repetition_penalty=1.05)
KEPT_LAYER = {"qwen2_5_omni": 3, "qwen3_omni_moe": 1}

CONVERSATIONS = [
    [("user", "hello")],
    [("user", "what is in <image> here")],
    [("system", "be good"), ("user", "hi <image> there"), ("assistant", "yes"), ("user", "and <image>?")],
    [("user", "one"), ("assistant", "two"), ("user", "three"), ("assistant", "four"), ("user", "five")],
]


@lru_cache(maxsize=8)
def references(family, folder) -> tuple[Spoken, ...]:
    """Eight different spoken answers."""
    model, tokenizer = reference_omni(folder), AutoTokenizer.from_pretrained(folder)
    answers = []
    for i in range(8):
        turns = CONVERSATIONS[i % 4]
        turns = [*turns[:-1], ("user", turns[-1][1] + " now" * (i // 4))]
        prompt = prompt_of(turns, tokenizer, family, seed=i)
        frames, tokens = MAX_FRAMES - i % 3, 3 + i
        answers.append(speak(model, prompt, VOICES[i % 2], max_tokens=tokens, max_frames=frames, seed=i))
    return tuple(answers)


@pytest.fixture(params=OMNI_FAMILIES)
def family(request):
    return request.param


def load(family, folder, kernels="reference"):
    return LOADERS[family](folder, StubProcessor(), CPU, torch.float32, kernels)


class Mouth:
    """A talker engine with the thinker's part played from a reference."""

    def __init__(self, family, folder, *, kernels="reference", **changes) -> None:
        self.model, self.family = load(family, folder, kernels), family
        fields = {"num_blocks": 200, "context_length": 200, "max_step_tokens": 64, "max_sequences": 8}
        config = EngineConfig(**(fields | {"eos_token_ids": (), "block_size": 8} | changes))
        kv = allocate_kv(self.model.config.decoder, config.num_blocks, 8, torch.float32, CPU)
        runner = TalkerRunner(self.model, kv, max_sequences=8, max_length=config.context_length)
        self.engine = TalkerEngine(config, self.model, runner)
        self.frames: dict[str, list[tuple[int, ...]]] = {}
        self.reasons: dict[str, str | None] = {}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.engine.close()

    def add(self, name, spoken, sampling=GREEDY) -> None:
        self.frames[name] = []
        self.engine.add(
            Speak(
                request_id=name,
                prompt=spoken.prompt,
                voice=spoken.voice,
                sampling=sampling,
                max_frames=len(spoken.frames) + spoken.ended,
                granted_frames=1000,
            )
        )

    def see(self, name, spoken) -> None:
        """What the thinker sends of its prompt: all positions, or those of media."""
        positions = np.arange(len(spoken.prompt.token_ids))
        if self.family == "qwen3_omni_moe":
            spans = [positions[s.offset : s.end] for s in spoken.prompt.spans]
            positions = np.concatenate([positions[:0], *spans])
        positions = torch.from_numpy(positions)
        hidden = spoken.layers_LPX[KEPT_LAYER[self.family]][positions]
        self.engine.prompt_ready(name, {"positions": positions, "hidden": hidden}, True)

    def hear(self, name, spoken, start=0, end=None, last=True) -> None:
        tensors = {"token_ids": torch.tensor(spoken.text[start:end], dtype=torch.int64)}
        if self.model.config.text_hidden:
            tensors["hidden"] = spoken.text_hidden_KX[start:end]
        self.engine.text_ready(name, tensors, last)

    def say(self, name, spoken, **fields) -> None:
        self.add(name, spoken, **fields)
        self.see(name, spoken)
        self.hear(name, spoken)

    async def drain(self) -> None:
        for _ in range(500):
            if not self.engine.has_work():
                return
            await self.step()
        raise AssertionError("no end")

    async def step(self) -> None:
        events = await self.engine.step()
        assert not events.messages, events.messages
        for chunk in events.chunks:
            self.frames[chunk.request_id] += map(tuple, chunk.tensors["codes"].tolist())
            self.reasons[chunk.request_id] = chunk.meta.get("finish")
        assert self.engine.check_integrity() is None

    def check(self, name, spoken) -> None:
        assert self.frames[name] == spoken.frames
        assert self.reasons[name] == ("stop" if spoken.ended else "length")


def test_the_references_differ(family, tiny_omni):
    found = references(family, tiny_omni(family))
    assert len({tuple(spoken.frames) for spoken in found}) == 8
    assert max(len(set(spoken.frames)) for spoken in found) > 4, "the same frame over and over proves little"


@pytest.mark.parametrize("kernels", ["reference", "native"])
def test_each_alone(family, tiny_omni, kernels):
    with Mouth(family, tiny_omni(family), kernels=kernels) as mouth:
        for i, spoken in enumerate(references(family, tiny_omni(family))):
            mouth.say(str(i), spoken)
            asyncio.run(mouth.drain())
            mouth.check(str(i), spoken)


@pytest.mark.parametrize("overlap", [False, True])
def test_eight_at_once_in_chunks_with_text_that_comes_by_and_by(family, tiny_omni, overlap):
    found = references(family, tiny_omni(family))

    async def play(mouth) -> None:
        for i, spoken in enumerate(found):
            mouth.add(str(i), spoken)
            mouth.hear(str(i), spoken, 0, 1, last=False)
            mouth.see(str(i), spoken)
            await mouth.step()
        for start in range(1, 12):
            for i, spoken in enumerate(found):
                if start + i % 2 <= len(spoken.text):
                    end = start + 1
                    mouth.hear(str(i), spoken, start, end, last=end > len(spoken.text))
            await mouth.drain()
        for name, reason in tuple(mouth.reasons.items()):
            if reason is None:
                mouth.engine.text_ready(name, _nothing(mouth), True)
        await mouth.drain()

    with Mouth(family, tiny_omni(family), overlap=overlap, long_prefill_cap=7) as mouth:
        asyncio.run(play(mouth))
        for i, spoken in enumerate(found):
            mouth.check(str(i), spoken)
        assert mouth.engine.is_idle()


class Mind:
    """A thinker engine beside a mouth; its chunks go where the edge would take them."""

    def __init__(self, family, folder, mouth, **changes) -> None:
        opened = open_family(folder)
        layers = {"kept_hidden_layer": KEPT_LAYER[family]}
        kept_of = "all" if family == "qwen2_5_omni" else "media"
        opened.decoder_config = dataclasses.replace(opened.decoder_config, kept_hidden_of=kept_of, **layers)
        decoder = opened.load_decoder(CPU, torch.float32, "native")
        width = opened.decoder_config.hidden_size
        fields = {
            "num_blocks": 16,
            "context_length": 200,
            "max_step_tokens": 40,
            "max_sequences": 8,
        }  # fewer than eight need
        fields |= {"block_size": 8, "plain_embedding_width": width, "long_prefill_cap": 13}
        fields |= {"embedding_width": width * (1 + decoder.config.num_deepstack_levels)}
        config = EngineConfig(**(fields | {"eos_token_ids": (), "spoken_hidden": kept_of} | changes))
        kv = allocate_kv(decoder.config, config.num_blocks, 8, torch.float32, CPU)
        runner = Runner(decoder, decoder.attention, kv, max_sequences=8, max_length=200)
        self.engine = LMEngine(config, runner, StubProcessor().positions)
        self.mouth = mouth
        self.tokens: dict[str, list[int]] = {}
        self.pictures: dict[str, list[torch.Tensor]] = {}

    def ask(self, name, spoken, **fields) -> None:
        sampling = SamplingParams(temperature=0.0, max_tokens=len(spoken.text))
        self.tokens[name], self.pictures[name] = [], spoken.pictures
        self.engine.add(
            Generate(request_id=name, prompt=spoken.prompt, sampling=sampling, speech=True, **fields)
        )

    async def think(self) -> None:
        for _ in range(500):
            if not self.engine.has_work():
                return
            events = await self.engine.step()
            for message in events.messages:
                if isinstance(message, Generated):
                    self.tokens[message.request_id] += message.deltas[0].token_ids
                    continue
                assert isinstance(message, EmbeddingsNeeded), message
                for item in message.item_indices:
                    rows = self.pictures[message.request_id][item]
                    self.engine.embeddings_ready(message.request_id, item, rows)
            for chunk in events.chunks:
                take = {"prompt": self.mouth.engine.prompt_ready, "text": self.mouth.engine.text_ready}
                take[chunk.stream](chunk.request_id, chunk.tensors, chunk.last)
            assert self.engine.check_integrity() is None
            await self.mouth.step()
        raise AssertionError("no end")


@pytest.mark.parametrize("overlap", [False, True])
def test_thinker_and_talker_together(family, tiny_omni, overlap):
    """Eight at once through both engines, cached prefixes, preempted, in chunks; then spoken verbatim."""
    found = references(family, tiny_omni(family))

    async def play(mouth, mind) -> None:
        for name, spoken in enumerate(found):
            mouth.add(str(name), spoken)
            mind.ask(str(name), spoken)
        for name, spoken in ((f"verbatim {i}", spoken) for i, spoken in enumerate(found)):
            mouth.add(name, spoken)
        await mind.think()
        for i, spoken in enumerate(found):
            mind.ask(f"verbatim {i}", spoken, forced=tuple(spoken.text))
        await mind.think()
        await mouth.drain()

    with Mouth(family, tiny_omni(family), overlap=overlap) as mouth:
        mind = Mind(family, tiny_omni(family), mouth, overlap=overlap)
        try:
            asyncio.run(play(mouth, mind))
            assert mind.engine.is_idle()
            assert mouth.engine.is_idle()
            stats = mind.engine.stats()
            assert stats["prefix_cache_hits_total"] > 0
            assert stats["num_preemptions_total"] > 0
        finally:
            mind.engine.close()
    for i, spoken in enumerate(found):
        assert mind.tokens[str(i)] == spoken.text
        assert mind.tokens[f"verbatim {i}"] == []
        mouth.check(str(i), spoken)
        mouth.check(f"verbatim {i}", spoken)


def _nothing(mouth):
    tensors = {"token_ids": torch.zeros(0, dtype=torch.int64)}
    if mouth.model.config.text_hidden:
        tensors["hidden"] = torch.zeros(0, mouth.model.config.hidden_width)
    return tensors


def sampled(family, folder, seed, count=1):
    """The same answer `count` times at once, the last of them asked for; strangers beside it."""
    found = references(family, folder)
    defaults = SAMPLING[family]
    with Mouth(family, folder) as mouth:
        for i in range(count):
            spoken = found[3] if i == count - 1 else found[i % 3]
            mouth.say(str(i), spoken, sampling=msgspec.structs.replace(defaults, seed=seed + count - 1 - i))
        asyncio.run(mouth.drain())
    return mouth.frames[str(count - 1)]


def test_sampled_frames_depend_on_the_seed_alone(family, tiny_omni):
    folder = tiny_omni(family)
    alone = sampled(family, folder, 1)
    assert sampled(family, folder, 1) == alone
    assert sampled(family, folder, 1, count=7) == alone
    assert sampled(family, folder, 2) != alone
    groups = np.array(alone).T
    assert all(len(set(group)) > 2 for group in groups.tolist())


def test_refusals_name_what_is_wrong(family, tiny_omni):
    folder = tiny_omni(family)
    talker = load(family, folder)
    spoken = references(family, folder)[0]
    with pytest.raises(BadRequest, match="voice"):
        talker.lay_out(spoken.prompt, "Nobody")
    if family == "qwen3_omni_moe":
        with pytest.raises(BadRequest, match="turn"):
            talker.lay_out(Prompt(spoken.prompt.token_ids[:-3]), "Ada")
    else:
        (folder / "spk_dict.pt").rename(folder / "away.pt")
        with pytest.raises(EngineError, match=r"spk_dict\.pt"):
            read_speakers(folder)
        (folder / "spk_dict.pt").write_bytes(b"no pickle")
        with pytest.raises(EngineError, match="voices"):
            read_speakers(folder)
        (folder / "away.pt").rename(folder / "spk_dict.pt")
        assert tuple(read_speakers(folder)) == VOICES


def test_text_that_the_prompt_begins_is_spoken_first(tiny_omni):
    """A prompt may hold the answer's first words; the voice says them, then what the thinker writes."""
    family, folder = "qwen3_omni_moe", tiny_omni("qwen3_omni_moe")
    spoken = references(family, folder)[7]
    begun = dataclasses.replace(
        spoken, prompt=Prompt(spoken.prompt.token_ids + spoken.text[:2]), text=spoken.text[2:]
    )
    with Mouth(family, folder) as mouth:
        mouth.say("begun", begun)
        asyncio.run(mouth.drain())
        mouth.check("begun", spoken)
