"""Queued decode steps: the same tokens as steps that the interpreter runs, in any mixture with them."""

from __future__ import annotations

import shutil
import sys

import numpy as np
import pytest
import torch

from contracts.errors import EngineError
from contracts.params import SamplingParams
from lm_engine.decoder import Decoder
from lm_engine.layers.reference import ReferenceKernels
from lm_engine.model import AdapterRanks, MoeConfig, RopeConfig
from lm_engine.native import native_kernels
from lm_engine.native.kernels import NativeKernels
from lm_engine.runner import Runner
from tests.lm_engine.random_decoder import RandomSource, tiny_config
from tests.lm_engine.stepping import TIMEOUT_S, Host, greedy

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("gcc") is None, reason="the native kernels need Linux and gcc"
)
STOPS = (0, 5, 11)
MROPE = RopeConfig(theta=1e4, inv_freq=(1.0, 0.5, 0.1, 0.01), attention_scaling=1.5, mrope_section=(2, 1, 1))


@pytest.fixture(autouse=True, params=[1, 2], ids=["1 thread", "2 threads"])
def threads(request: pytest.FixtureRequest):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def native_decoder(dtype=torch.float32, **changes) -> Decoder:
    kernels = native_kernels(torch.device("cpu"), dtype)
    assert isinstance(kernels, NativeKernels)
    return Decoder(tiny_config(**changes), RandomSource(dtype), kernels)


class Steps(Host):
    """The harness around the decoder itself, its steps queued or not."""

    def __init__(self, decoder: Decoder, queued: bool) -> None:
        super().__init__(decoder)
        self.runner.close()
        self.runner = Runner(
            decoder, decoder.attention, self.kv, max_sequences=8, max_length=128, cuda_graphs=queued
        )
        assert (self.runner._decodes is not None) == queued
        self.num_queued = 0
        if self.runner._decodes is not None:
            self._count(self.runner._decodes)

    def _count(self, decodes) -> None:
        submit = decodes.submit

        def counting(*args):
            self.num_queued += 1
            return submit(*args)

        decodes.submit = counting


def prompt(length, seed=0):
    return np.random.default_rng(seed).integers(0, 97, length).tolist()


KINDS = [
    greedy(),
    greedy(min_tokens=6),
    greedy(logit_bias=((3, 4.0), (9, -50.0))),
    greedy(min_tokens=30, logit_bias=((5, 100.0),)),
    greedy(),
]


@pytest.mark.parametrize(
    ("dtype", "changes"),
    [
        (torch.float32, {}),
        (torch.bfloat16, {"qkv_bias": True}),
        (torch.bfloat16, {"vocab_size": 9001, "tie_embeddings": True}),
        (torch.float32, {"rope": MROPE, "qk_norm": True}),
        (torch.float32, {"windows": (None, 6)}),
    ],
    ids=str,
)
def test_queued_decodes_draw_what_plain_ones_draw(dtype, changes):
    """All steps are submitted before any result is known; prompts that end in the middle of a block."""
    decoder, results = native_decoder(dtype, **changes), []
    for queued in (False, True):
        with Steps(decoder, queued) as host:
            for slot, kind in enumerate(KINDS):
                host.admit(slot, prompt(3 + 2 * slot, slot), sampling=kind, stop_token_ids=STOPS, delta=-slot)
            futures = [host.submit(*((slot, 3 + 2 * slot) for slot in range(5)))]
            futures += [host.submit(*((slot, 1) for slot in (1, 0, 4, 3, 2))) for _ in range(20)]
            futures += [host.submit((3, 1)) for _ in range(5)]
            results.append([future.result(TIMEOUT_S) for future in futures])
            assert host.num_queued == 25 * queued
    assert results[0] == results[1]
    assert len({token.token_id for result in results[0] for token in result.sampled}) > 5


def test_queued_decodes_behind_a_picture_draw_what_plain_ones_draw():
    """Beside those of text, and text alone."""
    decoder = native_decoder(picture_adapter=AdapterRanks(q=3, k=2, v=4, o=3, gate=2, up=1, down=5))
    results = []
    for queued, seen in ((False, True), (True, True), (True, False)):
        with Steps(decoder, queued) as host:
            for slot in range(4):
                gated_from = 2 * slot if seen and slot % 2 else None
                host.admit(slot, prompt(7, slot), gated_from=gated_from)
            futures = [host.submit(*((slot, 7) for slot in range(4)))]
            futures += [host.submit(*((slot, 1) for slot in range(4))) for _ in range(12)]
            futures += [host.submit((0, 1), (2, 1)) for _ in range(3)]
            results.append([[t.token_id for t in future.result(TIMEOUT_S).sampled] for future in futures])
            assert host.num_queued == 15 * queued
    plain, ours, unseen = results
    assert ours == plain
    assert [step[::2] for step in ours[:13]] == [step[::2] for step in unseen[:13]]
    assert ours[13:] == unseen[13:]
    assert all(ours[slot] != unseen[slot] for slot in range(5, 13))


def test_queued_and_other_steps_follow_each_other_in_any_order():
    """Prompts join, a row draws at random for a while, sequences end and their slots are taken again."""
    decoder, results = native_decoder(), []
    for queued in (False, True):
        with Steps(decoder, queued) as host:
            futures = []
            host.admit(0, prompt(6))
            futures += [host.submit((0, 6)), host.submit((0, 1)), host.submit((0, 1))]
            host.admit(1, prompt(9, 1), sampling=SamplingParams(temperature=1.0), seed=4)
            futures += [host.submit((0, 1), (1, 9)), host.submit((0, 1), (1, 1)), host.submit((0, 1))]
            host.release(1)
            futures += [host.submit((0, 1)), host.submit((0, 1))]
            host.admit(1, prompt(5, 2))
            futures += [host.submit((0, 1), (1, 2)), host.submit((1, 2)), host.submit((1, 1), (0, 1))]
            host.release(0)
            host.admit(0, prompt(7, 3))
            futures += [host.submit((0, 7), (1, 1)), host.submit((0, 1), (1, 1))]
            results.append([future.result(TIMEOUT_S) for future in futures])
            assert host.num_queued == 7 * queued
    assert results[0] == results[1]


def test_positions_of_a_prompt_and_positions_between_whole_numbers():
    """The prompt's last token may be a decode of its own; a fraction's turns are in no table."""
    decoder = native_decoder(rope=MROPE)
    positions = np.stack([np.arange(7), np.arange(7) // 2, np.arange(7) % 3])
    for shift, num_queued in ((0, 4), (0.5, 0)):
        results = []
        for queued in (False, True):
            with Steps(decoder, queued) as host:
                host.admit(0, prompt(7), positions=positions + shift, delta=-3)
                futures = [host.submit((0, 6)), *(host.submit((0, 1)) for _ in range(4))]
                results.append([future.result(TIMEOUT_S) for future in futures])
                assert host.num_queued == num_queued * queued
        assert results[0] == results[1]


def test_logits_that_are_not_finite_fail_their_row_alone():
    decoder = native_decoder(vocab_size=9001)
    decoder.embedding_VH[90] = torch.nan
    with Steps(decoder, queued=True) as host:
        host.admit(0, prompt(4))
        host.admit(1, [1, 2, 90])
        host.step((0, 4), (1, 2))
        result = host.step((0, 1), (1, 1))
        assert host.num_queued == 1
        assert result.failed_slots == (1,)
        assert host.step((0, 1)).failed_slots == ()


def test_forbidding_every_token_fails_the_row():
    """As where nothing is queued: the largest logit is infinite."""
    decoder = native_decoder(vocab_size=8)
    for queued in (False, True):
        with Steps(decoder, queued) as host:
            host.admit(0, [1, 2, 3], sampling=greedy(min_tokens=9), stop_token_ids=tuple(range(8)))
            host.step((0, 2))
            assert host.step((0, 1)).failed_slots == (0,)


class TwinSource(RandomSource):
    """Token 8000 has the logit of token 10."""

    def take(self, name, shape):
        weight = super().take(name, shape)
        if name == "lm_head.weight":
            weight[8000] = weight[10]
        return weight


def test_the_first_of_equals_is_drawn():
    kernels = native_kernels(torch.device("cpu"), torch.float32)
    decoder = Decoder(tiny_config(vocab_size=9001), TwinSource(), kernels)
    with Steps(decoder, queued=True) as host:
        host.admit(0, prompt(5), sampling=greedy(logit_bias=((10, 200.0), (8000, 200.0))))
        host.step((0, 5))
        assert [host.step((0, 1)).sampled[0].token_id for _ in range(3)] == [10] * 3
        assert host.num_queued == 3


def test_closing_runs_what_is_queued():
    host = Steps(native_decoder(), queued=True)
    host.admit(0, prompt(5))
    futures = [host.submit((0, 5)), *(host.submit((0, 1)) for _ in range(12))]
    host.runner.close()
    assert [len(future.result(0).sampled) for future in futures] == [1] * 13
    host.runner.close()


def test_a_step_without_memory_fails_its_future(monkeypatch):
    with Steps(native_decoder(), queued=True) as host:
        host.admit(0, prompt(5))
        host.step((0, 5))

        def fail(status):
            raise EngineError("native kernels: out of memory")

        with monkeypatch.context() as patch:
            patch.setattr("lm_engine.native.decodes.check", fail)
            future = host.submit((0, 1))
            with pytest.raises(EngineError, match="out of memory"):
                future.result(TIMEOUT_S)
        assert len(host.step((0, 1)).sampled) == 1


def test_only_what_is_all_in_c_is_queued():
    sparse = MoeConfig(num_experts=4, num_chosen=2, intermediate_size=16, normalise=True)
    decoders = [
        Decoder(tiny_config(), RandomSource(), ReferenceKernels()),
        native_decoder(moe=sparse),
        native_decoder(kept_hidden_layer=1),
    ]
    for decoder in decoders:
        Steps(decoder, queued=False).runner.close()
        with Host(decoder) as host:
            runner = Runner(decoder, decoder.attention, host.kv, max_sequences=8, max_length=128)
            assert runner._decodes is None
            runner.close()
