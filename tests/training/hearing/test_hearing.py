"""What training of the ears computes is what the server computes; held-out sentences are never trained on."""

from __future__ import annotations

import json
from random import Random

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from contracts.specs import AudioSpec
from encoder_pool.model import EncoderInput
from model_families.default_model import omni
from model_families.omnistage_nano import ears as served_ears
from model_families.omnistage_nano.letters import LETTERS, NUM_LETTERS, read_letters, spell
from model_families.qwen2_5_omni.audio_encoder import Qwen25OmniAudioConfig
from preprocess import mel
from training.hearing import ears as trained_ears
from training.hearing import features
from training.hearing.ears import letter_logits, new_ears, num_rows, trained_tensors
from training.hearing.export import ears_tensors
from training.hearing.features import disturb, log_mel, num_frames
from training.hearing.sentences import Said, letters_only
from training.hearing.train import collate, grouped, letters_loss, rate_groups
from training.speaking.corpus import Corpus
from training.speaking.sentences import is_held_out

torch.set_num_threads(1)
CPU = torch.device("cpu")
SPEC = AudioSpec(tokens="qwen2_5_omni", num_mels=80, tail="zeros", max_samples=480_000)
SHORT = (11_000, 9_873, 16_001)


@pytest.fixture
def small(monkeypatch):
    """Ears of Whisper's kind, small, for training and serving alike."""
    monkeypatch.setitem(omni.EARS, "d_model", 32)
    monkeypatch.setitem(omni.EARS, "encoder_attention_heads", 2)
    monkeypatch.setitem(omni.EARS_MORE, "encoder_ffn_dim", 48)
    config = msgspec.convert({**omni.EARS, **omni.EARS_MORE, "output_dim": 16}, Qwen25OmniAudioConfig)
    monkeypatch.setattr(trained_ears, "CONFIG", config)
    return config


@pytest.fixture
def tokenizer() -> Tokenizer:
    words = Tokenizer(
        models.WordLevel({"[UNK]": 0, **{letter: 1 + n for n, letter in enumerate(LETTERS)}}, "[UNK]")
    )
    words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return words


def _whisper(path, config):
    generator = torch.Generator().manual_seed(1)
    width, inner = config.d_model, config.encoder_ffn_dim
    shapes = {
        "conv1.weight": (width, 80, 3),
        "conv2.weight": (width, width, 3),
        "layer_norm.weight": (width,),
    }
    shapes |= {f"{name}.bias": (width,) for name in ("conv1", "conv2", "layer_norm")}
    for layer in range(omni.WHISPER_LAYERS):
        for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
            shapes[f"layers.{layer}.self_attn.{part}.weight"] = (width, width)
            if part != "k_proj":
                shapes[f"layers.{layer}.self_attn.{part}.bias"] = (width,)
        shapes |= {f"layers.{layer}.fc1.weight": (inner, width), f"layers.{layer}.fc2.weight": (width, inner)}
        shapes |= {f"layers.{layer}.fc1.bias": (inner,), f"layers.{layer}.fc2.bias": (width,)}
        for norm in ("self_attn_layer_norm", "final_layer_norm"):
            shapes |= {f"layers.{layer}.{norm}.{kind}": (width,) for kind in ("weight", "bias")}
    tensors = {
        f"model.encoder.{name}": torch.randn(shape, generator=generator) * shape[-1] ** -0.5
        for name, shape in shapes.items()
    }
    save_file(tensors, path)
    return path


def _sounds() -> list[np.ndarray]:
    random = np.random.default_rng(3)
    return [(random.standard_normal(n) * np.hanning(n) * 0.3).astype(np.float32) for n in SHORT]


def _side_by_side(sounds):
    rows = torch.zeros(len(sounds), max(SHORT))
    for row, sound in zip(rows, sounds, strict=True):
        row[: len(sound)] = torch.from_numpy(sound)
    return rows, torch.tensor(SHORT)


def _mel(sound):
    out = np.zeros((80, SPEC.num_frames(len(sound))), np.float32)
    mel.log_mel(sound, SPEC, out)
    return torch.from_numpy(out)


def test_features_are_those_of_preprocessing():
    found = log_mel(*_side_by_side(_sounds()))
    for row, sound in zip(found, _sounds(), strict=True):
        expected = _mel(sound)
        torch.testing.assert_close(row[:, : expected.shape[1]], expected, atol=2e-4, rtol=0)
        assert not row[:, expected.shape[1] :].any()


def test_served_ears_spell_what_trained_ones_do(small, tokenizer, tmp_path):
    """Through the export and the composition of the checkpoint."""
    whisper = _whisper(tmp_path / "model.safetensors", small)
    ears = new_ears(whisper, tokenizer)
    for name, parameter in ears.named_parameters():
        if name.startswith(trained_ears.TRAINED):
            torch.nn.init.normal_(parameter, std=0.2)
    shipped = tmp_path / "hearing.safetensors"
    save_file({n: t.contiguous() for n, t in ears_tensors(trained_tensors(ears)).items()}, shipped)
    stored = omni._ears(tmp_path, shipped)
    words = torch.randn(NUM_LETTERS + 1, small.output_dim)
    folder = tmp_path / "made"
    folder.mkdir()
    tensors = {f"thinker.{name}": value.float().contiguous() for name, value in stored.items()}
    save_file(tensors | {served_ears.WORDS: words}, folder / "model.safetensors")
    text = {"vocab_size": len(words)}
    audio = {**omni.EARS, **omni.EARS_MORE, "output_dim": small.output_dim}
    thinker = {"thinker_config": {"audio_config": audio, "text_config": text}}
    (folder / "config.json").write_text(json.dumps(thinker))
    tokenizer.save(str(folder / "tokenizer.json"))

    mels = [_mel(sound) for sound in _sounds()]
    items = [EncoderInput("audio", m, (0, 0, 0), SPEC.num_tokens(m.shape[1])) for m in mels]
    specs = served_ears.MediaSpecs(audio=SPEC)
    found = served_ears.load_ears(folder, specs, CPU, torch.float32).encode(items)
    with torch.no_grad():
        texts = served_ears.open_ears(folder, specs, CPU, torch.float32).spelled(mels)

    sound_BS, lengths_B = _side_by_side(_sounds())
    with torch.no_grad():
        best = letter_logits(ears, log_mel(sound_BS, lengths_B), num_frames(lengths_B)).argmax(-1)
    assert best.unique().numel() > 3
    for rows, letters, count in zip(found, best, num_rows(num_frames(lengths_B)).tolist(), strict=True):
        text = read_letters(letters[:count].tolist())
        ids = tokenizer.encode(text).ids[: len(rows)]
        assert ids
        assert text in texts
        torch.testing.assert_close(rows[-len(ids) :], words[ids])
        assert not rows[: -len(ids)].any()


def test_a_step_changes_what_is_trained_alone(small, tokenizer, tmp_path):
    ears = new_ears(_whisper(tmp_path / "w.safetensors", small), tokenizer)
    before = {name: value.clone() for name, value in ears.state_dict().items()}
    (tmp_path / "0.jsonl").write_text('["Hi.", 0, 9600]\n["No, no.", 9600, 12800]\n')
    np.random.default_rng(1).integers(-9000, 9000, 22_400).astype(np.int16).tofile(tmp_path / "0.pcm")
    corpus = Corpus(tmp_path, features.SAMPLING_RATE)
    corpus.refresh()
    (group,) = grouped(corpus.utterances, 100.0, Random(0))
    groups = rate_groups(ears)
    assert all(group["params"] for group in groups)
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    for _ in range(2):  # the grown layers pass on at first: what is inside them moves a step later
        loss = letters_loss(ears, collate(corpus, group, Random(1)), varied=True)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert torch.isfinite(loss)
    for name, value in ears.state_dict().items():
        moved = not torch.equal(value, before[name])
        assert moved == name.startswith(trained_ears.TRAINED), name


def test_rooms_leave_silence_behind_the_end():
    sound_BS, lengths_B = _side_by_side(_sounds())
    heard = disturb(sound_BS, lengths_B)
    assert torch.isfinite(heard).all()
    assert not torch.equal(heard, sound_BS)
    for row, length in zip(heard, lengths_B.tolist(), strict=True):
        assert not row[length:].any()


def test_letters_come_back():
    text = "Hello, all three: no."
    assert (
        letters_only("It's 2:30, 2,204 dogs (really)!")
        == "It's two thirty, two thousand two hundred four dogs really!"
    )
    assert (
        read_letters([n for letter in spell(letters_only(text)) for n in (letter, letter, 0)])
        == "Hello, all three no."
    )
    assert read_letters([0, 0]) == ""


class _Sentences:
    def sentence(self, index: int) -> str:
        return f"Sentence number {index} is short."


def test_held_out_sentences_are_not_trained_on():
    said = Said(_Sentences())  # type: ignore[arg-type]
    held = said.held_out(20)
    training = said.training(0, 1)
    trained = {text for _, text in (next(training) for _ in range(3000))}
    assert len(set(held)) == 20
    assert not trained & set(held)
    assert all(is_held_out(text) for text in held)
    assert all(character in LETTERS for text in (*held, *trained) for character in text)
