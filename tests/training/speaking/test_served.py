"""What training computes is what the server computes: the same frames from the talker, the same samples."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from contracts.media import Prompt
from contracts.messages import Speak
from contracts.params import SamplingParams
from lm_engine.config import EngineConfig
from lm_engine.memory import allocate_kv
from lm_engine.talker.engine import TalkerEngine
from lm_engine.talker.runner import TalkerRunner
from model_families.omnistage_nano.pieces import SPOKEN_PIECES, write_pieces
from model_families.omnistage_nano.pronouncing import SPOKEN_WORDS, write_words
from model_families.omnistage_nano.shipped_speech import speaking_tensors
from model_families.omnistage_nano.speech import SPEECH
from model_families.qwen3_omni_moe.vocoder import Names
from tests.model_families.talking import StubProcessor
from tests.tiny_models import build_tokenizer
from tests.training.speaking.small_front import WORDS, small_front, small_pieces
from training.speaking.convert import code2wav_name, code2wav_tensors, sections, talker_tensors
from training.speaking.decoder import new_decoder, speak
from training.speaking.prompts import TTS_BOS, TTS_EOS, TTS_PAD, Line, Prompts
from training.speaking.sampling import Speaker
from training.speaking.sizes import TINY
from training.speaking.table import TextTable
from training.speaking.talker import TalkerNet

torch.set_num_threads(1)
CPU = torch.device("cpu")
SIZES = replace(TINY, talker=replace(TINY.talker, text_width=24))
VOCABULARY = 49216
START, END = 1, 2
SYSTEM, USER, ASS, ISTANT = 9690, 4093, 520, 9531
FRAMES = 24


@pytest.fixture(scope="module")
def trained():
    torch.manual_seed(3)
    decoder, net = new_decoder(SIZES), TalkerNet(SIZES)
    for parameter in net.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return decoder, net


@pytest.fixture(scope="module")
def words():
    rows_VX = torch.randn(VOCABULARY, SIZES.talker.text_width, generator=torch.Generator().manual_seed(1))
    for token, row in {TTS_PAD: 8, TTS_BOS: 9, TTS_EOS: 10}.items():
        rows_VX[token] = rows_VX[row]
    return rows_VX.bfloat16().float()


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer(merges=[("h", "o"), ("Ġ", "s"), ("l", "d"), ("Ċ", "Ċ")]).backend_tokenizer


@pytest.fixture(scope="module")
def folder(trained, words, tokenizer, tmp_path_factory):
    decoder, net = trained
    folder = tmp_path_factory.mktemp("nano")
    tokenizer.save(str(folder / "tokenizer.json"))
    pieces = small_pieces()
    write_pieces(folder / SPOKEN_PIECES, list(zip(pieces.pieces, pieces.frames, strict=True)))
    write_words(folder / SPOKEN_WORDS, WORDS)
    tensors = speaking_tensors(talker_tensors(net) | code2wav_tensors(decoder))
    tensors["thinker.model.embed_tokens.weight"] = words
    save_file(
        {name: value.detach().contiguous() for name, value in tensors.items()}, folder / "model.safetensors"
    )
    thinker = {"thinker_config": {"text_config": {"vocab_size": VOCABULARY}}}
    thinker |= {"im_start_token_id": START, "user_token_id": USER, "assistant_token_id": ASS}
    thinker |= {"tts_pad_token_id": TTS_PAD, "tts_bos_token_id": TTS_BOS, "tts_eos_token_id": TTS_EOS}
    (folder / "config.json").write_text(
        json.dumps({"model_type": "omnistage_nano"} | thinker | sections(SIZES))
    )
    return folder


def test_the_talker_draws_the_same_frames(trained, words, tokenizer, folder):
    net = trained[1]
    text = "Hold 42 sheep, the sea, the sea, hold zz!"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    table = TextTable(torch.arange(VOCABULARY), words, CPU)
    table.rows_VX = table.rows_VX.float()
    line = Prompts(small_front(tokenizer), tokenizer).of(text)
    head = [START, ASS, ISTANT, *[TTS_PAD] * 4, TTS_BOS]
    line = Line(np.array([*head, *line.rows[line.prompt - 1 :]], np.int32), len(head) + 1)
    assert TTS_PAD in line.rows[len(head) :]
    assert line.rows[-1] == TTS_EOS
    wanted = Speaker(net, table).speak([line], temperature=0.0, max_frames=FRAMES)[0]
    assert len({tuple(frame) for frame in wanted.tolist()}) > 2  # it does not stand still
    newline = tokenizer.encode("\n", add_special_tokens=False).ids
    turns = [START, SYSTEM, *newline, 305, END, *newline, START, USER, *newline, 300, 301, END, *newline]
    served = asyncio.run(_serve(folder, [*turns, START, ASS, ISTANT, *newline], ids))
    assert served == [tuple(frame) for frame in wanted.tolist()]


async def _serve(folder, prompt, text):
    model = SPEECH.load_talker(folder, StubProcessor(), CPU, torch.float32, "reference")
    fields = {"num_blocks": 40, "context_length": 200, "max_step_tokens": 64, "max_sequences": 2}
    config = EngineConfig(**fields, eos_token_ids=(), block_size=8)
    kv = allocate_kv(model.config.decoder, config.num_blocks, 8, torch.float32, CPU)
    engine = TalkerEngine(config, model, TalkerRunner(model, kv, max_sequences=2, max_length=200))
    frames = []
    try:
        engine.add(
            Speak(
                request_id="a",
                prompt=Prompt(prompt, (), ()),
                voice="heart",
                sampling=SamplingParams(temperature=0.0),
                max_frames=FRAMES,
                granted_frames=1000,
            )
        )
        nothing = torch.zeros(0, SIZES.talker.text_width)
        engine.prompt_ready("a", {"positions": torch.zeros(0, dtype=torch.int64), "hidden": nothing}, True)
        for token in text[:-1]:
            engine.text_ready("a", {"token_ids": torch.tensor([token])}, False)
        engine.text_ready("a", {"token_ids": torch.tensor(text[-1:])}, True)
        for _ in range(100):
            if not engine.has_work():
                break
            for chunk in (await engine.step()).chunks:
                frames += [tuple(frame) for frame in chunk.tensors["codes"].tolist()]
    finally:
        engine.close()
    return frames


def test_the_vocoder_makes_the_samples_that_training_made(trained, folder):
    decoder = trained[0]
    codes_TQ = torch.randint(SIZES.codebook_size, (7, SIZES.num_groups))
    with torch.no_grad():
        learned = speak(decoder, decoder.embed(codes_TQ[None]))[0]
    served = SPEECH.load_vocoder(folder, CPU, torch.float32).decode_whole(codes_TQ)
    assert learned.shape == served.shape
    torch.testing.assert_close(served, learned, rtol=0, atol=1e-4)


def test_names_of_the_decoder_are_the_families(trained):
    names = Names(len(SIZES.upsample_rates))
    for ours in trained[0].state_dict():
        assert names.ours(code2wav_name(ours, len(SIZES.upsample_rates))) == ours
