"""The engine over a decoder with a picture adapter: whatever it does to a request, the oracle's tokens."""

from __future__ import annotations

import random

import msgspec
import numpy as np
import pytest
import torch

from contracts.media import Prompt
from lm_engine.engine import LMEngine
from lm_engine.media_layout import MediaLayout
from lm_engine.memory import allocate_kv
from lm_engine.runner import Runner
from tests.lm_engine import test_picture_adapter as adapter
from tests.lm_engine.harness import Client, Image, config_of, greedy, prompt_of

torch.set_num_threads(1)
llama = adapter.llama
PICTURES = {name: adapter.picture(seed) for seed, name in enumerate(("cat", "dog", "sun"))}
CAT, DOG, SUN = (Image(name, adapter.ROWS) for name in PICTURES)
SYSTEM = adapter.tokens_of(4, 9)


def positions(prompt: Prompt) -> tuple[np.ndarray, int]:
    return np.arange(len(prompt.token_ids))[None], 0


class SeeingClient(Client):
    """Of a real runner."""

    def __init__(self, llama, ranks, kernels, **changes) -> None:
        config = config_of(embedding_width=32, context_length=120, min_early_tokens=1, **changes)
        super().__init__(config)
        self.decoder = adapter.decoder_of(llama, ranks, kernels)
        kv = allocate_kv(
            self.decoder.config, config.num_blocks, config.block_size, torch.float32, adapter.CPU
        )
        self.runner.close()
        self.runner = Runner(
            self.decoder,
            self.decoder.attention,
            kv,
            max_sequences=config.max_sequences,
            max_length=config.context_length,
        )
        self.engine = LMEngine(config, self.runner, positions)

    def deliver(self, count=None):
        now, self.owed = self.owed, []
        for name, item in now:
            picture = self.answers[name].message.prompt.items[item]
            self.engine.embeddings_ready(name, item, rows_of(picture.pixel_digest))


def rows_of(digest):
    return next(rows for name, rows in PICTURES.items() if Image(name, 1).digest == digest)


def expected(oracle, prompt, count):
    """Of one with at most two pictures."""
    if not prompt.spans:
        return oracle.greedy(prompt.token_ids, None, None, count)
    first, last = prompt.spans[0].offset, prompt.spans[-1].end
    x_LH = oracle.llama.model.embed_tokens(torch.tensor(prompt.token_ids[first:last])).detach()
    for span in prompt.spans:
        x_LH[span.offset - first : span.end - first] = rows_of(span.digest)
    return oracle.greedy(prompt.token_ids, first, x_LH, count)


def parts(rng):
    text = lambda: [rng.randint(1, 90) for _ in range(rng.randint(1, 9))]  # noqa: E731
    kinds = [(), (CAT,), (DOG,), (SUN, CAT), (CAT,), ()]
    found = [SYSTEM]
    for image in rng.choice(kinds):
        found += [image, text()]
    return prompt_of(*found, text())


CASES = {
    "plain loop": {"overlap": False},
    "overlapped": {"overlap": True},
    "small chunks": {"overlap": True, "max_step_tokens": 11, "long_prefill_cap": 5},
    "few blocks": {"overlap": True, "num_blocks": 19},
    "no prefix cache": {"overlap": True, "prefix_cache": False},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kernels", adapter.KERNELS)
def test_every_request_ends_with_the_oracles_tokens(llama, kernels, case):
    oracle, rng = adapter.Oracle(llama, adapter.RANKS), random.Random(7)
    client = SeeingClient(llama, adapter.RANKS, kernels, **CASES[case])
    try:
        for round_number in range(2):  # the second finds what the first left in the prefix cache
            for index in range(9):
                sampling = greedy(max_tokens=12, ignore_eos=True, n=1 + (index == 4))
                client.add(f"{round_number}.{index}", parts(random.Random(rng.randint(0, 5))), sampling)
            client.run()
        known: dict[tuple[int, ...], list[int]] = {}
        for answer in client.answers.values():
            prompt = answer.message.prompt
            key = (*prompt.token_ids, *(hash(span.digest) for span in prompt.spans))
            want = known.get(key) or known.setdefault(key, expected(oracle, prompt, 12))
            assert answer.tokens == [want] * answer.message.sampling.n
        assert client.engine.is_idle()
        assert client.engine.stats()["num_preemptions_total"] > 0 or case != "few blocks"
        if case != "no prefix cache":
            assert any(answer.num_cached for answer in client.answers.values())
    finally:
        client.runner.close()


@pytest.mark.parametrize("kernels", adapter.KERNELS)
def test_text_gets_the_same_tokens_with_and_without_an_adapter(llama, kernels):
    """Beside pictures as well."""
    answers = []
    for ranks in (None, adapter.RANKS):
        client, rng = SeeingClient(llama, ranks, kernels, overlap=True), random.Random(2)
        try:
            for index in range(8):
                prompt = prompt_of(SYSTEM, [rng.randint(1, 90) for _ in range(12)])
                if index % 2:
                    prompt = prompt_of(SYSTEM, DOG, [rng.randint(1, 90) for _ in range(12)])
                client.add(f"{index}", prompt, greedy(max_tokens=15, ignore_eos=True))
            client.run()
        finally:
            client.runner.close()
        answers.append([answer.tokens for answer in client.answers.values()])
    plain, adapted = answers
    assert plain[::2] == adapted[::2]
    assert plain[1::2] != adapted[1::2]


def test_a_prompt_is_seen_from_its_first_picture_or_video_on():
    """Sound is none, nor is a row that a span's mask leaves out."""

    def first(prompt, *modalities):
        items = zip(prompt.items, modalities, strict=True)
        changed = tuple(msgspec.structs.replace(item, modality=modality) for item, modality in items)
        return MediaLayout(msgspec.structs.replace(prompt, items=changed)).first_seen

    framed = Image("framed", 5, (False, True, True, False, True))
    assert first(prompt_of([1, 2])) is None
    assert first(prompt_of([1, 2], CAT), "image") == 2
    assert first(prompt_of([1, 2], CAT), "audio") is None
    assert first(prompt_of([1], CAT, [2], DOG), "audio", "video") == 8
    assert first(prompt_of([1], framed), "video") == 2
