"""What the thinker tells the talker: the streams "prompt" and "text", whatever the schedule."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from contracts.errors import EngineError
from contracts.messages import Generate, Generated
from contracts.params import SamplingParams
from lm_engine import spoken
from lm_engine.config import EngineConfig
from lm_engine.engine import LMEngine
from lm_engine.memory import allocate_kv
from lm_engine.runner import Runner
from tests.lm_engine.harness import Image, embeddings_of, prompt_of
from tests.lm_engine.random_decoder import tiny_decoder

torch.set_num_threads(1)

WIDTH, BLOCK = 24, 4
PROMPT = [5, 17, 80, 3, 44, 9, 21]
LENGTHS = 12


@dataclass
class Heard:
    """What came of one request, chunk by chunk."""

    tokens: list[int] = field(default_factory=list)
    reason: str | None = None
    stop_token: int | None = None
    positions: list[int] = field(default_factory=list)
    prompt_hidden: list[torch.Tensor] = field(default_factory=list)
    text: list[int] = field(default_factory=list)
    text_hidden: list[torch.Tensor] = field(default_factory=list)
    chunks: list[tuple[str, int, bool]] = field(default_factory=list)

    def take(self, chunk) -> None:
        before = [seq for stream, seq, _ in self.chunks if stream == chunk.stream]
        assert chunk.seq == len(before), "a gap"
        assert not any(last for stream, _, last in self.chunks if stream == chunk.stream), "after the end"
        self.chunks.append((chunk.stream, chunk.seq, chunk.last))
        if chunk.stream == "prompt":
            self.positions += chunk.tensors["positions"].tolist()
            self.prompt_hidden.append(chunk.tensors["hidden"])
        else:
            self.text += chunk.tensors["token_ids"].tolist()
            if "hidden" in chunk.tensors:
                assert len(chunk.tensors["hidden"]) == len(chunk.tensors["token_ids"])
                self.text_hidden.append(chunk.tensors["hidden"])

    @property
    def ended(self) -> set[str]:
        return {stream for stream, _, last in self.chunks if last}

    @property
    def hidden(self) -> torch.Tensor:
        return torch.cat([*self.prompt_hidden, *self.text_hidden])


class Thinker:
    def __init__(self, of="all", *, layer=2, eos=(), **changes) -> None:
        self.decoder = tiny_decoder(kept_hidden_layer=layer)
        fields = {"num_blocks": 100, "context_length": 120, "max_step_tokens": 32, "max_sequences": 8}
        fields |= {"block_size": BLOCK, "embedding_width": WIDTH, "overlap": False, "spoken_hidden": of}
        self.config = EngineConfig(**(fields | {"eos_token_ids": eos} | changes))
        kv = allocate_kv(
            self.decoder.config, self.config.num_blocks, BLOCK, torch.float32, torch.device("cpu")
        )
        runner = Runner(self.decoder, self.decoder.attention, kv, max_sequences=8, max_length=120)
        positions = lambda prompt: (np.arange(len(prompt.token_ids))[None], 0)  # noqa: E731
        self.engine = LMEngine(self.config, runner, positions)
        self.heard: dict[str, Heard] = {}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.engine.close()

    def add(self, name, *parts, max_tokens=LENGTHS, speech=True, sampling=None, **fields) -> Heard:
        self.engine.add(
            Generate(
                request_id=name,
                prompt=prompt_of(*(parts or (PROMPT,))),
                sampling=sampling or SamplingParams(temperature=0.0, max_tokens=max_tokens),
                speech=speech,
                **fields,
            )
        )
        self.heard[name] = Heard()
        return self.heard[name]

    async def step(self) -> None:
        events = await self.engine.step()
        for message in events.messages:
            if isinstance(message, Generated):
                (delta,) = message.deltas
                heard = self.heard[message.request_id]
                heard.tokens += delta.token_ids
                heard.reason, heard.stop_token = delta.finish_reason, delta.stop_token_id
        for chunk in events.chunks:
            self.heard[chunk.request_id].take(chunk)
        assert self.engine.check_integrity() is None

    async def drain(self) -> None:
        for _ in range(400):
            if not self.engine.has_work():
                return
            await self.step()
        raise AssertionError("no end")

    def run(self) -> None:
        asyncio.run(self.drain())


def alone(*parts, of="all", eos=(), layer=2, **fields) -> Heard:
    with Thinker(of, eos=eos, layer=layer) as thinker:
        heard = thinker.add("alone", *parts, **fields)
        thinker.run()
        assert thinker.engine.is_idle()
    return heard


def prefilled(tokens, layer=2) -> torch.Tensor:
    """The hidden states of all tokens, computed in one step."""
    with Thinker("all", layer=layer) as thinker:
        heard = thinker.add("once", tokens, forced=())
        thinker.run()
    return heard.hidden


@pytest.mark.parametrize("layer", [1, 2])
def test_every_token_goes_with_its_hidden_state(layer):
    heard = alone(layer=layer)
    assert heard.reason == "length"
    assert heard.positions == list(range(len(PROMPT)))
    assert heard.text == heard.tokens
    assert len(heard.text) == LENGTHS, "the last one, too"
    assert heard.ended == {"prompt", "text"}
    torch.testing.assert_close(heard.hidden, prefilled([*PROMPT, *heard.tokens], layer))


def test_media_families_send_text_as_it_is_drawn():
    heard = alone(of="media")
    assert heard.text == heard.tokens == alone().tokens
    assert (heard.positions, heard.reason) == ([], "length")
    assert heard.prompt_hidden[0].shape == (0, WIDTH)
    assert not heard.text_hidden
    text_chunks = [chunk for chunk in heard.chunks if chunk[0] == "text"]
    assert len(text_chunks) == LENGTHS, "one a step, the last with the last token"


@pytest.mark.parametrize("of", ["all", "media"])
@pytest.mark.parametrize("overlap", [False, True])
def test_the_end_token_is_not_spoken(of, overlap):
    tokens = alone().tokens
    eos = next(t for i, t in enumerate(tokens) if i > 3 and t not in tokens[:i])
    end = tokens.index(eos)
    with Thinker(of, eos=(eos,), overlap=overlap) as thinker:
        heard = thinker.add("ends")
        thinker.run()
        assert thinker.engine.is_idle()
    assert (heard.tokens, heard.reason, heard.stop_token) == (tokens[: end + 1], "stop", eos)
    assert heard.text == tokens[:end]
    assert heard.ended == {"prompt", "text"}
    if of == "all":
        torch.testing.assert_close(heard.hidden, prefilled([*PROMPT, *tokens[:end]]))


@pytest.mark.parametrize("overlap", [False, True])
def test_chunks_strangers_cache_and_preemption_change_nothing(overlap):
    long = [(7 * i) % 90 for i in range(30)]
    expected = {"a": alone(long), "b": alone(), "c": alone([*long[:20], 3])}
    # Far fewer blocks than they come to need at once.
    options = {"overlap": overlap, "num_blocks": 16, "long_prefill_cap": 7}
    with Thinker("all", **options) as thinker:
        heard = {}

        async def play() -> None:
            heard["b"] = thinker.add("b")
            await thinker.step()
            heard["a"] = thinker.add("a", long)
            for _ in range(3):
                await thinker.step()
            heard["c"] = thinker.add("c", [*long[:20], 3])
            thinker.add("silent", speech=False)
            await thinker.drain()
            heard["a again"] = thinker.add("a again", long)
            await thinker.drain()

        asyncio.run(play())
        stats = thinker.engine.stats()
        assert stats["num_preemptions_total"] > 0
        assert stats["prefix_cache_hits_total"] > 0
        assert thinker.engine.is_idle()
    assert not thinker.heard["silent"].chunks
    for name, found in heard.items():
        want = expected[name[0]]
        assert (found.text, found.reason) == (want.text, want.reason)
        torch.testing.assert_close(found.hidden, want.hidden)


def test_positions_of_media_only():
    parts = ([1, 2], Image("cat", 5), [3], Image("dog", 4, (True, False, True, True)), [4, 5])
    with Thinker("media", layer=1) as thinker:
        heard = thinker.add("sees", *parts)
        asyncio.run(thinker.drain())
        prompt = prompt_of(*parts)
        for i, item in enumerate(prompt.items):
            rows = embeddings_of(item)[:, :1].expand(-1, WIDTH) * 0.1 + i
            thinker.engine.embeddings_ready("sees", i, rows)
        thinker.run()
        assert thinker.engine.is_idle()
    assert heard.positions == [2, 3, 4, 5, 6, 8, 10, 11]
    assert heard.prompt_hidden[0].shape == (8, WIDTH)
    assert len({tuple(row) for row in heard.prompt_hidden[0].tolist()}) == 8


@pytest.mark.parametrize("of", ["all", "media"])
def test_a_forced_answer_is_one_prefill(of):
    given = [9, 60, 2, 33]
    with Thinker(of) as thinker:
        heard = thinker.add("forced", forced=tuple(given), sampling=SamplingParams(seed=4, max_tokens=1))
        thinker.run()
        assert thinker.engine.stats()["num_steps_total"] == 1
        assert thinker.engine.is_idle()
    assert (heard.tokens, heard.reason, heard.stop_token) == ([], "stop", None)
    assert heard.text == given
    assert heard.ended == {"prompt", "text"}
    if of == "all":
        torch.testing.assert_close(heard.hidden, prefilled([*PROMPT, *given]))


@pytest.mark.parametrize("of", ["all", "media"])
@pytest.mark.parametrize("count", [3, LENGTHS])
def test_a_replay_tells_all_again_and_answers_only_the_rest(of, count):
    expected = alone(of=of)
    heard = alone(of=of, resume=(tuple(expected.tokens[:count]),))
    assert heard.tokens == expected.tokens[count:]
    assert (heard.text, heard.reason, heard.ended) == (expected.text, "length", {"prompt", "text"})
    torch.testing.assert_close(heard.hidden, expected.hidden)


@pytest.mark.parametrize("of", ["all", "media"])
def test_a_replay_of_an_answer_that_had_ended(of):
    tokens = alone().tokens
    eos = next(t for i, t in enumerate(tokens) if i > 3 and t not in tokens[:i])
    done = tokens[: tokens.index(eos) + 1]
    heard = alone(of=of, eos=(eos,), resume=(tuple(done),))
    assert (heard.tokens, heard.reason, heard.stop_token) == ([], "stop", eos)
    assert heard.text == done[:-1]
    assert heard.ended == {"prompt", "text"}


@pytest.mark.parametrize("of", ["all", "media"])
def test_stop_from_outside_ends_the_text_and_abort_says_nothing(of):
    tokens = alone().tokens
    with Thinker(of, overlap=True) as thinker:

        async def play() -> None:
            stopped, aborted = thinker.add("stopped"), thinker.add("aborted")
            for _ in range(6):
                await thinker.step()
            thinker.engine.stop_sample("stopped", 0)
            thinker.engine.abort("aborted")
            count = len(aborted.chunks)
            await thinker.drain()
            assert stopped.ended == {"prompt", "text"}
            assert stopped.text == tokens[: len(stopped.text)] != []
            assert len(aborted.chunks) == count
            assert thinker.engine.is_idle()

        asyncio.run(play())


def test_a_long_prompt_goes_in_pieces(monkeypatch):
    whole = alone()
    monkeypatch.setattr(spoken, "MAX_CHUNK_BYTES", 3 * WIDTH * 4)
    heard = alone()
    pieces = [chunk for chunk in heard.chunks if chunk[0] == "prompt"]
    assert pieces == [("prompt", 0, False), ("prompt", 1, False), ("prompt", 2, True)]
    assert heard.positions == whole.positions
    torch.testing.assert_close(heard.hidden, whole.hidden)


def test_who_does_not_speak_says_so():
    with Thinker(None) as thinker, pytest.raises(EngineError, match="does not speak"):
        thinker.add("mute")
