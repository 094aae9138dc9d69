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
from training.hearing import features, variety
from training.hearing.ears import letter_logits, new_ears, num_rows, trained_tensors
from training.hearing.export import ears_tensors
from training.hearing.features import disturb, log_mel, num_frames
from training.hearing.prompts import said_in
from training.hearing.sentences import SHARES, Chains, Said, letters_only
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


def test_served_ears_spell_what_trained_ones_do(small, tokenizer, tmp_path, monkeypatch):
    """Through the export and the composition of the checkpoint."""
    monkeypatch.setattr(served_ears, "LEAST_CHANCE", 1e-6)  # untrained ones are sure of nothing
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
        best = letter_logits(ears.eval(), log_mel(sound_BS, lengths_B), num_frames(lengths_B)).argmax(-1)
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


def test_chains_change_nothing_of_what_is_held_out():
    chains = Chains(" i 20 it 20\ni don't 10 am 20\nit is 5\nis i 30 not 20\ndon't i 9\nam i 1\n")
    plain, chained = (Said(_Sentences(), given) for given in (None, chains))  # type: ignore[arg-type]
    assert chained.held_out(10) == plain.held_out(10)
    numbers, texts = zip(
        *(one for one, _ in zip(chained.training(0, 1), range(400), strict=False)), strict=True
    )
    known = {text for _, text in (one for one, _ in zip(plain.training(0, 1), range(500), strict=False))}
    said = [text for text in texts if text not in known]
    assert 60 < len(said) < 200
    assert len(set(numbers)) == 400
    assert all(character in LETTERS for text in said for character in text)
    assert all({"i", "it", "is", "don't", "am", "not"} >= set(text[:-1].lower().split()) for text in said)
    assert not any(is_held_out(text) for text in said)
    assert not any(" i " in text for text in said)


def _tone(hertz: float) -> np.ndarray:
    return np.sin(2 * np.pi * hertz * np.arange(16_000) / 16_000).astype(np.float32) * 0.3


def _hertz(sound: torch.Tensor) -> float:
    return float(torch.fft.rfft(sound).abs().argmax()) * features.SAMPLING_RATE / len(sound)


def test_pace_moves_pitch_and_length_alike(monkeypatch):
    monkeypatch.setattr(variety, "PACED_SHARE", 1.0)
    sound_BS = torch.from_numpy(np.stack([_tone(440.0)] * 4))
    paced_BS, lengths_B = variety.pace(sound_BS, torch.tensor([16_000, 16_000, 12_000, 9_000]))
    factors = torch.tensor([16_000, 16_000, 12_000, 9_000]) / lengths_B
    assert factors.unique().numel() > 2
    for row, length, factor in zip(paced_BS, lengths_B.tolist(), factors.tolist(), strict=True):
        low, high = variety.PACE
        assert low - 1e-3 <= factor <= high + 1e-3
        assert not row[length:].any()
        assert _hertz(row[:length]) == pytest.approx(440.0 * factor, abs=3.0)
        at = torch.arange(200, 1500)
        torch.testing.assert_close(
            row[at], 0.3 * torch.sin(2 * torch.pi * 440.0 * factor * at / 16_000), atol=0.02, rtol=0
        )


def test_throat_moves_frequencies_alone():
    sound_BS = torch.from_numpy(np.stack([_tone(1000.0)] * 3))
    lengths_B = torch.tensor([16_000] * 3)
    still = log_mel(sound_BS, lengths_B)
    torch.testing.assert_close(log_mel(sound_BS, lengths_B, torch.ones(3)), still)
    moved = log_mel(sound_BS, lengths_B, torch.tensor([1.0, 1.15, 0.87]))
    places = moved[:, :, 50].argmax(1).tolist()
    expected = [
        int(log_mel(torch.from_numpy(_tone(hertz))[None], lengths_B[:1])[0, :, 50].argmax())
        for hertz in (1000.0, 1150.0, 870.0)
    ]
    assert len(set(expected)) == 3
    assert all(abs(a - b) <= 1 for a, b in zip(places, expected, strict=True))


def test_what_recordings_do_stays_within_the_sound(monkeypatch):
    for share in ("BESIDE_SHARE", "CLIPPED_SHARE", "DULL_SHARE", "THIN_SHARE"):
        monkeypatch.setattr(variety, share, 1.0)
    sound_BS, lengths_B = _side_by_side(_sounds())
    for change in (variety.beside, variety.recorded):
        changed = change(sound_BS, lengths_B)
        assert torch.isfinite(changed).all()
        for row, before, length in zip(changed, sound_BS, lengths_B.tolist(), strict=True):
            assert not torch.allclose(row[:length], before[:length], atol=1e-4)
            assert not row[length:].any()


def test_nothing_is_changed_where_no_share_is(monkeypatch):
    for share in (
        "BESIDE_SHARE",
        "CLIPPED_SHARE",
        "DULL_SHARE",
        "THIN_SHARE",
        "MASKED_SHARE",
        "CODED_SHARE",
        "PACED_SHARE",
        "HASTE_SHARE",
    ):
        monkeypatch.setattr(variety, share, 0.0)
    sound_BS, lengths_B = _side_by_side(_sounds())
    paced_BS, same_B = variety.pace(sound_BS, lengths_B)
    assert torch.equal(same_B, lengths_B)
    for changed in (paced_BS, variety.beside(sound_BS, lengths_B), variety.recorded(sound_BS, lengths_B)):
        torch.testing.assert_close(changed, sound_BS, atol=1e-5, rtol=0)
    mel = log_mel(sound_BS, lengths_B)
    same, frames_B = variety.hurried(mel, num_frames(lengths_B))
    assert torch.equal(frames_B, num_frames(lengths_B))
    assert torch.equal(variety.masked(same, frames_B), mel)


def test_haste_shortens_and_keeps_frequencies(monkeypatch):
    monkeypatch.setattr(variety, "HASTE_SHARE", 1.0)
    sound_BS = torch.from_numpy(np.stack([_tone(1000.0)] * 4))
    mel = log_mel(sound_BS, torch.tensor([16_000] * 4))
    hurried, frames_B = variety.hurried(mel, torch.tensor([100, 100, 90, 80]))
    assert (frames_B != torch.tensor([100, 100, 90, 80])).any()
    for row, frames in zip(hurried, frames_B.tolist(), strict=True):
        torch.testing.assert_close(
            row[:, 10 : frames - 15], mel[0, :, 50:51].expand(-1, frames - 25), atol=0.02, rtol=0
        )
        assert not row[:, frames:].any()


def test_masks_hide_a_little_and_leave_what_is_behind_the_end(monkeypatch):
    monkeypatch.setattr(variety, "MASKED_SHARE", 1.0)
    monkeypatch.setattr(variety, "CODED_SHARE", 0.0)
    sound_BS, lengths_B = _side_by_side(_sounds())
    mel, frames_B = log_mel(sound_BS, lengths_B), num_frames(lengths_B)
    masked = variety.masked(mel, frames_B)
    for row, before, frames in zip(masked, mel, frames_B.tolist(), strict=True):
        hidden = (row[:, :frames] != before[:, :frames]).float().mean()
        assert 0.01 < hidden < 0.6
        assert not row[:, frames:].any()


def test_dropout_is_of_training_alone(small, tokenizer, tmp_path):
    ears = new_ears(_whisper(tmp_path / "w.safetensors", small), tokenizer)
    sound_BS, lengths_B = _side_by_side(_sounds())
    mel, frames_B = log_mel(sound_BS, lengths_B), num_frames(lengths_B)
    with torch.no_grad():
        once, again = (letter_logits(ears.eval(), mel, frames_B) for _ in range(2))
        trained = letter_logits(ears.train(), mel, frames_B)
    assert torch.equal(once, again)
    assert not torch.allclose(trained, once)


def test_shares_of_voices_are_shares():
    assert sum(SHARES.values()) == pytest.approx(1.0)


def test_prompts_are_those_said_as_they_are_written():
    lines = ["; a comment: this is none", "one: Press 2 now, please...", "two: press two now, please"]
    lines += ["three: Enter # to exit", "four: [beep] who is it now", "five: The IAX is up", "six: Hello."]
    assert said_in(lines) == {"one": "Press two now, please"}
