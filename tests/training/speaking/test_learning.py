"""Talker and decoder are trained, saved and taken up again; what they are taught lies where it should."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.tiny_models import build_tokenizer
from tests.training.speaking.small_front import small_front
from training.speaking import gathering, train_talker
from training.speaking.clock import Clip, Clock, new_optimizer
from training.speaking.corpus import Corpus, CorpusFile, Words
from training.speaking.decoder import new_decoder
from training.speaking.gathering import Beside, Gathering
from training.speaking.phonetics import FRAME
from training.speaking.pointing import SOONEST
from training.speaking.prompts import COPIED, Prompts
from training.speaking.rows import EMPTY_TARGET, Batch, input_rows
from training.speaking.sizes import TINY
from training.speaking.spectra import SpectralLoss
from training.speaking.stepping import Stepper
from training.speaking.table import TextTable
from training.speaking.talker import TalkerNet
from training.speaking.train_decoder import NAME as DECODER
from training.speaking.train_decoder import Judgement, Learning, open_decoder, train_decoder
from training.speaking.train_talker import Examples, disturb, losses, open_talker
from training.speaking.weights import load_parts
from vocoder import kernels

torch.set_num_threads(1)
CPU = torch.device("cpu")
SIZES = replace(TINY, talker=replace(TINY.talker, text_width=16))
TEXTS = ("ðə sˈi.", "hˈOld ðə ʃˈip", "tˈu.", "fˈɔɹ ʃˈip, tˈu", "ðə", "hˈOld ɪt.")


@pytest.fixture(scope="module")
def prompts():
    tokenizer = build_tokenizer(merges=[("t", "h"), ("e", "a"), ("h", "o")]).backend_tokenizer
    return Prompts(small_front(tokenizer), tokenizer)


@pytest.fixture(scope="module")
def table(prompts):
    ids = sorted({*prompts.layout.tokens, *COPIED.values()} - COPIED.keys())
    rows = torch.randn(len(ids), 16, generator=torch.Generator().manual_seed(1))
    return TextTable(torch.tensor(ids), rows, CPU)


@pytest.fixture
def corpus(tmp_path):
    """A tone of a text's own; its symbols at an even pace."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    with CorpusFile(folder, 0, with_codes=True) as written:
        for number, text in enumerate(TEXTS):
            frames = 6 + 2 * number
            wave = 8000 * np.sin(np.arange(frames * FRAME) * (0.02 + 0.01 * number))
            codes = np.full((frames, SIZES.num_groups), 3 + number, np.int16)
            codes[:, SIZES.pointer] = np.arange(frames) * (len(text) + 2) // frames
            letters = ["the" if word == "ðə" else "" for word in text.split()]
            written.add(text, wave.astype(np.int16), codes, Words([text], letters))
    found = Corpus(folder)
    found.refresh()
    return found


class Steps(Clock):
    """A clock that counts steps."""

    def __init__(self, name, steps, folder):
        super().__init__(name, 1e9, folder / "log.jsonl")
        self.steps = steps
        self.seen = []

    @property
    def fraction(self):
        return min(self.step / self.steps, 1.0)

    def tick(self, figures):
        self.step += 1
        self.seen.append({name: float(value) for name, value in figures.items()})
        return self.step < self.steps


@pytest.fixture
def examples(corpus, prompts, table, monkeypatch):
    monkeypatch.setattr(gathering, "JOINED", (2,))
    made = Examples(SIZES, table, CPU)
    made.take(Gathering(prompts.layout, corpus)())
    return made


def test_pointers_lead_through_joined_utterances(examples, prompts):
    frames = {tuple(batch.target_BLQ.shape[:2]): batch for batch in examples.batches(300)}
    assert {length for _, length in frames} <= set(train_talker.LENGTHS)
    for (count, length), batch in frames.items():
        assert count == max(300 // length, 1)
        for heard_LQ, target_LQ in zip(batch.heard_BLQ, batch.target_BLQ, strict=True):
            says = target_LQ[:, 1] != EMPTY_TARGET
            pointer = target_LQ[says, SIZES.pointer]
            row_T = torch.arange(len(pointer)) - (pointer + SOONEST)  # of the text: 0 is the prompt's last
            assert (row_T.diff() >= 0).all()
            assert row_T[0] == 0
            assert torch.equal(heard_LQ[says][1:], target_LQ[says][:-1])
            # the second text's first piece is where the first one's codes end
            change = int((target_LQ[says, 0].diff() != 0).nonzero()[0]) + 1
            assert row_T[change] > row_T[change - 1]
            assert (target_LQ[says.nonzero()[-1, 0] + 1, 0]) == SIZES.control["eos"]


def test_what_is_gathered_beside_is_what_is_gathered_here(prompts, corpus):
    wanted = Gathering(prompts.layout, corpus)
    with Beside(Gathering(prompts.layout, corpus)) as other:
        for most in (2, None):
            other.ask(most)
            here, there = wanted(most), other.take()
            assert len(here.starts) > 0
            for name in ("tokens_R", "codes_TQ", "starts"):
                assert np.array_equal(getattr(here, name), getattr(there, name))
            assert here.hours == there.hours


def test_some_words_are_given_by_their_letters(prompts, corpus, monkeypatch):
    def letters(share):
        monkeypatch.setattr(gathering, "LETTERS_SHARE", share)
        tokens = Gathering(prompts.layout, corpus)().tokens_R - prompts.layout.pieces.ids.start
        pieces = [
            prompts.layout.pieces.pieces[token]
            for token in tokens
            if 0 <= token < len(prompts.layout.pieces.pieces)
        ]
        return [piece for piece in pieces if piece.startswith("=")]

    assert letters(0.0) == []
    assert set(letters(1.0)) == {"= th", "=e"}


def test_what_is_disturbed_stays_a_code_or_nothing(examples):
    batch = next(iter(examples.batches(300)))
    torch.manual_seed(1)
    heard = disturb(batch, SIZES).heard_BLQ
    assert heard.shape == batch.heard_BLQ.shape
    assert (heard >= -1).all()
    assert (heard < SIZES.codebook_size).all()
    assert (heard[batch.heard_BLQ[..., 0] < 0] == -1).all()
    changed = (heard != batch.heard_BLQ)[batch.heard_BLQ[..., 0] >= 0].float().mean(0)
    assert 0.01 < changed[:-1].mean() < 0.15 < changed[-1] < 0.35


def test_rows_without_a_frame_teach_nothing(examples, table, tmp_path, monkeypatch):
    monkeypatch.setattr(train_talker, "RESIDUAL_SHARE", 1.0)  # all frames, and rows that have none
    net = open_talker(tmp_path / "none", SIZES, CPU)
    batch = next(iter(examples.batches(300)))
    said = batch.target_BLQ[..., 0] >= 0
    torch.manual_seed(2)
    first, others = losses(net, table, batch)
    assert others.shape == (SIZES.num_groups - 1,)
    hidden_NH = net.model(input_rows(net, table.rows_VX, batch))[said]
    wanted = torch.nn.functional.cross_entropy(net.first_logits(hidden_NH), batch.target_BLQ[said][:, 0])
    assert torch.allclose(first, wanted, atol=1e-5)
    frames = batch.target_BLQ[..., 1] >= 0
    hidden_NH = net.model(input_rows(net, table.rows_VX, batch))[frames]
    assert torch.allclose(others, net.residual_losses(hidden_NH, batch.target_BLQ[frames]), atol=1e-5)


def test_a_talker_learns_saves_and_is_taken_up(corpus, prompts, table, tmp_path):
    clock = Steps("talker", 25, tmp_path)
    train_talker.train_talker(tmp_path, corpus, SIZES, table, prompts.layout, clock, 200, recorded=True)
    assert clock.seen[-1]["next"] < 0.8 * clock.seen[0]["next"]
    again = Steps("talker", 2, tmp_path)
    train_talker.train_talker(tmp_path, corpus, SIZES, table, prompts.layout, again, 200, recorded=False)
    assert again.seen[0]["next"] < 0.8 * clock.seen[0]["next"]
    assert json.loads((tmp_path / "log.jsonl").read_text().splitlines()[0])["examples"] > 0


def test_a_decoder_learns_and_does_not_hear_the_pointer(corpus, tmp_path):
    clock = Steps("decoder", 4, tmp_path)
    train_decoder(tmp_path, corpus, SIZES, CPU, clock, batch=2, hours=1.0, judged=0.5, recorded=True)
    assert "judge" in clock.seen[-1]
    assert "judge" not in clock.seen[0]
    assert load_parts(tmp_path, DECODER)
    decoder = open_decoder(tmp_path, SIZES, CPU)
    codes = torch.randint(SIZES.codebook_size, (1, 5, SIZES.num_groups))
    other = codes.clone()
    other[..., SIZES.pointer] = (codes[..., SIZES.pointer] + 7) % SIZES.codebook_size
    assert torch.equal(decoder.embed(codes), decoder.embed(other))
    other[..., 0] = (codes[..., 0] + 7) % SIZES.codebook_size
    assert not torch.equal(decoder.embed(codes), decoder.embed(other))


def test_a_decoder_that_goes_on_is_judged_by_those_that_judged_it_before(corpus, tmp_path):
    def train(steps: int) -> list[dict[str, float]]:
        clock = Steps("decoder", steps, tmp_path)
        train_decoder(tmp_path, corpus, SIZES, CPU, clock, batch=2, hours=1.0, judged=None, recorded=True)
        return clock.seen

    assert ["judge" in figures for figures in train(4)] == [False, False, False, True]
    judges = load_parts(tmp_path, "judges")
    known = Judgement(CPU, judges).state()
    assert all(torch.allclose(known[name], value, atol=1e-3) for name, value in judges.items())
    assert ["judge" in figures for figures in train(4)] == [False, True, True, True]
    assert any(not torch.equal(value, judges[name]) for name, value in load_parts(tmp_path, "judges").items())


def test_a_step_that_is_not_recorded_is_a_plain_call():
    stepper = Stepper(lambda a, b: {"sum": a + b}, CPU, recorded=True)
    assert stepper(torch.tensor(1.0), torch.tensor(2.0))["sum"] == 3


def test_a_gradient_is_clipped_to_what_is_usual():
    weight = torch.nn.Parameter(torch.zeros(4))
    optimizer, clip = new_optimizer([weight], (0.9, 0.95), 0.0), Clip([weight])
    for _ in range(5):
        assert clip.step(optimizer, (weight * torch.ones(4)).sum()) == 2
    before = weight.detach().clone()
    assert clip.step(optimizer, (weight * torch.full((4,), torch.nan)).sum()).isnan()
    assert weight.isfinite().all()
    clip.step(optimizer, (weight * torch.full((4,), 100.0)).sum())
    assert weight.grad.norm().item() == pytest.approx(4, rel=0.03)  # a little less since that which was none
    assert not torch.equal(weight, before)


@pytest.fixture
def no_values():
    """Tensors have shapes and no values: whatever asks for one, and so would wait for a GPU, raises."""
    return FakeTensorMode()


def test_a_step_of_the_talker_asks_for_no_value(no_values):
    with no_values:
        net = TalkerNet(SIZES)
        optimizer, clip = (
            new_optimizer(list(net.parameters()), (0.9, 0.95), 0.05),
            Clip(list(net.parameters())),
        )
        codes = (2, 48, SIZES.num_groups)
        text, opening = (torch.zeros(2, 48, dtype=torch.int64) for _ in range(2))
        batch = Batch(text, opening, *(torch.zeros(codes, dtype=torch.int64) for _ in range(2)))
        fake = TextTable.__new__(TextTable)
        fake.rows_VX = torch.zeros(9, 16)
        first, others = losses(net, fake, disturb(batch, SIZES))
        clip.step(optimizer, first + others.mean())


def test_a_step_of_the_decoder_asks_for_no_value(no_values, monkeypatch):
    monkeypatch.setattr(torch.nn.Module, "to", lambda module, _: module)  # is there, and may not be moved so
    with no_values:
        learning = Learning(new_decoder(SIZES), CPU)
        sound = torch.zeros(2, 6 * FRAME)
        codes = torch.zeros(2, 6, SIZES.num_groups, dtype=torch.int64)
        learning.by_spectra(sound, codes)
        learning.judged(sound, codes)


def test_silence_teaches_no_more_than_speech():
    generator = torch.Generator().manual_seed(1)
    hiss = 1e-3 * torch.randn(1, 6 * FRAME, generator=generator)
    tone = 0.1 * torch.sin(torch.arange(6 * FRAME) * 0.06)[None]
    found = {}
    for name, true, made in (("silence", torch.zeros_like(tone), hiss), ("speech", tone, 0.7 * tone + hiss)):
        made = made.clone().requires_grad_()
        loss = SpectralLoss()(made, true)
        loss.backward()
        found[name] = loss.item(), made.grad.norm().item()
    assert found["silence"][0] < 2 * found["speech"][0]
    assert found["silence"][1] < 4 * found["speech"][1]


def test_what_is_trained_goes_without_the_server_s_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have no gradient: on a GPU the first step of training ended with them."""
    monkeypatch.setattr(kernels, "_has_triton", lambda: True)
    with FakeTensorMode():
        x_BCT = torch.empty(1, 2, 3, device="cuda")
        assert kernels.takes(x_BCT)
        x_BCT.requires_grad_()
        assert not kernels.takes(x_BCT)
        with torch.inference_mode():
            assert kernels.takes(x_BCT)
