"""omnistage-nano out of its parts: a checkpoint that sees gets ears and a voice, and opens as its family."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, configuration_utils

from contracts.digests import ContentDigest
from contracts.errors import EngineError
from contracts.media import MediaItem
from lm_engine.model import AdapterRanks
from model_families.census import take_census
from model_families.default_model.adapter import join_adapter
from model_families.default_model.build import parts_of_seeing
from model_families.default_model.omni import EARS, EARS_MORE, NEW_TOKENS, TTS_ROWS, make_omni
from model_families.default_model.shipped import (
    PACKED,
    SPEAKING,
    has_mark,
    read_packed,
    read_shipped,
    write_packed,
    write_shipped,
)
from model_families.omnistage_nano.ears import HEARD_PAIRS, HEARD_WORDS, read_lexicon
from model_families.omnistage_nano.letters import NUM_LETTERS
from model_families.omnistage_nano.pieces import SPOKEN_PIECES
from model_families.omnistage_nano.pronouncing import SPOKEN_WORDS
from model_families.registry import open_family
from training.speaking.convert import code2wav_tensors, sections, talker_tensors
from training.speaking.decoder import new_decoder
from training.speaking.sizes import TINY
from training.speaking.talker import TalkerNet

torch.set_num_threads(1)
CPU = torch.device("cpu")
TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.content is string -%}{{- message.content -}}{%- else -%}
{%- for part in message.content -%}
            {%- if part.type == 'image' -%}
                {{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
            {%- elif part.type == 'text' -%}
                {{- part.text -}}
            {%- endif -%}
{%- endfor -%}{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


def little_whisper(folder):
    """An encoder of Whisper tiny.en's shape."""
    width, inner = EARS["d_model"], EARS_MORE["encoder_ffn_dim"]
    shapes = {"conv1": (width, EARS["num_mel_bins"], 3), "conv2": (width, width, 3), "layer_norm": (width,)}
    for layer in range(EARS["encoder_layers"]):
        for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
            shapes[f"layers.{layer}.self_attn.{part}"] = (width, width)
        shapes |= {f"layers.{layer}.fc1": (inner, width), f"layers.{layer}.fc2": (width, inner)}
        shapes |= {f"layers.{layer}.{n}": (width,) for n in ("self_attn_layer_norm", "final_layer_norm")}
    tensors = {}
    for name, shape in shapes.items():
        tensors[f"model.encoder.{name}.weight"] = torch.randn(shape) * 0.02
        if "k_proj" not in name:
            tensors[f"model.encoder.{name}.bias"] = torch.zeros(shape[0])
    tensors["model.encoder.embed_positions.weight"] = torch.zeros(1500, width)
    tensors["model.decoder.embed_tokens.weight"] = torch.zeros(2, width)
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def parts(tiny, tmp_path_factory):
    """What sees, and the folder made of it."""
    folder = tmp_path_factory.mktemp("nano_parts")
    seeing = tiny("qwen2_5_vl", num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True)
    width = json.loads((seeing / "config.json").read_text())["text_config"]["hidden_size"]
    sizes = replace(TINY, talker=replace(TINY.talker, text_width=width))
    torch.manual_seed(2)
    speaking = folder / "speaking.safetensors"
    write_shipped(speaking, talker_tensors(TalkerNet(sizes)) | code2wav_tensors(new_decoder(sizes)))
    speaking.with_suffix(".json").write_text(json.dumps(sections(sizes)))
    seen = folder / "seeing"
    seen.mkdir()
    for path in seeing.iterdir():
        (seen / path.name).write_bytes(path.read_bytes())
    (seen / "chat_template.jinja").write_text(TEMPLATE)
    whisper = folder / "whisper"
    whisper.mkdir()
    hearing = folder / "hearing.safetensors"
    heard = {f"audio_tower.spell.{kind}": value for kind, value in _letters().items()}
    write_shipped(hearing, heard)
    write_packed(folder / (HEARD_WORDS + PACKED), ["the", "it"])
    write_packed(folder / (HEARD_PAIRS + PACKED), ["it the 9"])
    for name in (SPOKEN_WORDS, SPOKEN_PIECES):
        shutil.copy(SPEAKING.with_name(name), folder)
    make_omni(seen, folder / "omni", whisper=little_whisper(whisper), speaking=speaking, hearing=hearing)
    make_omni(seen, folder / "neither", whisper=whisper)
    return seen, folder / "omni", folder / "neither"


def _letters():
    generator = torch.Generator().manual_seed(2)
    width = EARS["d_model"]
    return {"weight": torch.randn(NUM_LETTERS, width, generator=generator), "bias": torch.zeros(NUM_LETTERS)}


def test_all_of_it_loads(parts):
    family = open_family(parts[1])
    assert family.name == "omnistage_nano"
    assert family.speech is not None
    assert (family.speech.sample_rate, family.speech.frames_per_s) == (24_000, 12.5)
    assert family.speech.voices == ("heart",)
    assert family.media_specs.modalities == ("image", "audio", "video")
    assert family.spoken_of("Hello 😀") == "Hello 😀"
    assert family.spoken_of("😀") == ""
    family.check_weights()
    family.load_decoder(CPU, torch.float32, "reference")
    for stage in ("vision", "audio"):
        assert family.load_encoder(stage, CPU, torch.float32).embedding_width == 64
    assert family.load_talker(CPU, torch.float32, "reference").config.residual.temperature < 1
    vocoder = family.load_vocoder(CPU, torch.float32)
    pcm = vocoder.decode_whole(torch.zeros(3, TINY.num_groups, dtype=torch.int64))
    assert pcm.shape == (3 * 1920 - vocoder.withheld,)


def test_its_tokenizer_is_read_without_a_warning(parts, monkeypatch):
    """transformers knows no such model."""
    warnings = []
    monkeypatch.setattr(
        configuration_utils.logger, "warning", lambda message, *_, **__: warnings.append(message)
    )
    tokenizer = open_family(parts[1]).tokenizer
    assert warnings == []
    text = "What is in this picture? <|audio_start|>"
    reference = AutoTokenizer.from_pretrained(parts[1])
    assert tokenizer.encode(text, parse_special=True) == reference(text).input_ids
    assert warnings, "the reference has been asked"


def test_a_talker_that_learned_something_else_is_refused(parts, tmp_path):
    shutil.copytree(parts[1], tmp_path / "older")
    config = json.loads((parts[1] / "config.json").read_text())
    del config["spelling"]
    (tmp_path / "older" / "config.json").write_text(json.dumps(config))
    with pytest.raises(EngineError, match="build it anew"):
        open_family(tmp_path / "older").load_talker(CPU, torch.float32, "reference")


def test_what_was_not_trained_is_neither_taken_nor_given(parts):
    family = open_family(parts[2])
    assert family.speech is None
    assert family.media_specs.modalities == ("image", "video")
    family.check_weights()
    assert [stage.name for stage in family.pipeline.stages][-1] == "thinker"
    turn = {"role": "user", "content": [{"type": "audio"}, {"type": "text", "text": "hi"}]}
    template = AutoTokenizer.from_pretrained(parts[2])
    assert "audio_pad" not in template.apply_chat_template([turn], tokenize=False)
    assert family.load_encoder("audio", CPU, torch.float32).embedding_width == 64


def test_pictures_are_read_like_text_where_the_eyes_were_trained_so(parts, tmp_path):
    folder = tmp_path / "reads"
    make_omni(parts[0], folder, whisper=parts[0].parent / "whisper", one_position_per_token=True)
    config = json.loads((folder / "config.json").read_text())["thinker_config"]
    digest = ContentDigest(bytes(16))
    item = MediaItem(
        modality="image", bytes_digest=digest, pixel_digest=digest, num_tokens=6, grid_thw=(1, 4, 6)
    )
    ids = [5, config["image_token_id"], 7]
    family = open_family(folder)
    positions, delta = family.positions(family.layout(ids, [item]))
    assert positions.tolist() == [list(range(8))] * 3
    assert delta == 0
    usual = open_family(parts[1])
    spread, delta = usual.positions(usual.layout(ids, [item]))
    assert spread[:, 1:7].tolist() == [[1] * 6, [1, 1, 1, 2, 2, 2], [1, 2, 3, 1, 2, 3]]
    assert delta < 0


def low_rank(num_layers, width, inner, ranks):
    """Names as `split_adapter` has them; of random values."""
    generator = torch.Generator().manual_seed(3)
    sizes = {"q_proj": (width, width), "v_proj": (width, width // 2), "down_proj": (inner, width)}
    made = {}
    for layer in range(num_layers):
        for name, rank in ranks.items():
            num_inputs, num_outputs = sizes[name]
            for side, shape in (("A", (rank, num_inputs)), ("B", (num_outputs, rank))):
                made[f"layers.{layer}.{name}.lora_{side}.weight"] = torch.randn(shape, generator=generator)
    return made


@pytest.fixture(scope="module")
def adapted(parts, tmp_path_factory):
    """The folder that sees, with an adapter of the language model."""
    seeing, folder = parts[0], tmp_path_factory.mktemp("nano_adapter") / "adapted"
    text = json.loads((seeing / "config.json").read_text())["text_config"]
    ranks = {"q_proj": 3, "v_proj": 2, "down_proj": 5}
    sizes = (text["num_hidden_layers"], text["hidden_size"], text["intermediate_size"])
    adapter = low_rank(*sizes, ranks)
    make_omni(seeing, folder, whisper=seeing.parent / "whisper", adapter=adapter)
    return folder, ranks, adapter


def test_an_adapter_goes_along_with_the_words(parts, adapted):
    folder, ranks, adapter = adapted
    config = json.loads((folder / "config.json").read_text())["thinker_config"]["text_config"]
    assert config["picture_adapter"] == ranks
    stored = load_file(folder / "model.safetensors")
    for name, value in adapter.items():
        assert torch.equal(stored[f"thinker.model.picture_adapter.{name}"], value.bfloat16())
    family = open_family(folder)
    assert family.decoder_config.picture_adapter == AdapterRanks(q=3, v=2, down=5)
    family.check_weights()
    low_rank = family.load_decoder(CPU, torch.float32, "reference").layers[1].adapter
    assert low_rank.output is None
    assert low_rank.gate_up is None
    a, b = (adapter[f"layers.1.down_proj.lora_{side}.weight"].bfloat16().float() for side in "AB")
    x = torch.randn(2, a.shape[1])
    torch.testing.assert_close(low_rank.down(x, torch.ones(2, 1)), x @ a.T @ b.T)
    counted = sum(value.numel() for value in adapter.values())
    assert take_census(folder).of("thinker") == take_census(parts[2]).of("thinker") + counted


def test_shipped_eyes_and_adapter_come_apart(adapted, tmp_path):
    _, _, adapter = adapted
    tower = {"visual.blocks.0.norm.weight": torch.ones(4)}
    for shipped in (join_adapter(adapter, num_layers(adapter)), {}):
        write_shipped(tmp_path / "seeing", tower | shipped)
        eyes, found = parts_of_seeing(read_shipped(tmp_path / "seeing"), num_layers(adapter))
        assert eyes.keys() == tower.keys()
        assert found.keys() == (adapter.keys() if shipped else set())
        for name, value in found.items():
            torch.testing.assert_close(value, adapter[name], atol=0.05, rtol=0)


def num_layers(adapter):
    return len({name.split(".")[1] for name in adapter})


def test_without_one_nothing_is_asked_for(parts):
    assert "picture_adapter" not in (parts[1] / "config.json").read_text()
    assert open_family(parts[1]).decoder_config.picture_adapter is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q_proj": 4}, r"q_proj.lora_A.weight has shape .* needs \[4, 64\] \(picture_adapter, "),
        ({"o_proj": 2}, r"picture_adapter.layers.0.o_proj.lora_A.weight.*\(picture_adapter\)"),
        ({"down_proj": 0}, "has no use for 6 tensors: thinker.model.picture_adapter.layers.0.down_proj"),
        ({"z_proj": 2}, "unknown field `z_proj`"),
        ({"v_proj": -1}, "v_proj"),
    ],
)  # fmt: skip
def test_an_adapter_of_another_shape_than_the_config_is_named(adapted, tmp_path, changes, message):
    folder, ranks, _ = adapted
    shutil.copytree(folder, tmp_path / "other")
    config = json.loads((folder / "config.json").read_text())
    config["thinker_config"]["text_config"]["picture_adapter"] = ranks | changes
    (tmp_path / "other" / "config.json").write_text(json.dumps(config))
    with pytest.raises(EngineError, match=message):
        open_family(tmp_path / "other").check_weights()


def test_marks_stand_beside_the_weights(tmp_path):
    write_shipped(tmp_path / "marked", {"a": torch.ones(2)}, {"read": "yes"})
    write_shipped(tmp_path / "plain", {"a": torch.ones(2)})
    assert has_mark(tmp_path / "marked", "read")
    assert not has_mark(tmp_path / "plain", "read")
    assert read_shipped(tmp_path / "marked").keys() == {"a"}


def test_the_same_lines_are_packed_into_the_same_bytes(tmp_path, monkeypatch):
    write_packed(tmp_path / "one", ["it 1", "the 2"])
    monkeypatch.setattr(time, "time", lambda: 2e9)
    write_packed(tmp_path / "two", iter(["it 1", "the 2"]))
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    assert read_packed(tmp_path / "one") == "it 1\nthe 2\n"


def test_what_the_ears_know_of_words_goes_with_them(parts):
    lexicon = read_lexicon(parts[1])
    assert lexicon is not None
    assert lexicon.whole("it") is not None
    assert lexicon.after("it") is not None
    assert read_lexicon(parts[2]) is None


def test_words_stay_what_they_were(parts):
    seeing, omni = (load_file(folder / "model.safetensors") for folder in parts[:2])
    name = next(name for name in seeing if name.endswith("embed_tokens.weight"))
    words = seeing[name].bfloat16()
    tokenizer = AutoTokenizer.from_pretrained(parts[1])
    ids = dict(zip(NEW_TOKENS, tokenizer.convert_tokens_to_ids(list(NEW_TOKENS)), strict=True))
    found = omni["thinker.model.embed_tokens.weight"]
    assert torch.equal(found[: ids["<|audio_start|>"]], words[: ids["<|audio_start|>"]])
    for token, row in TTS_ROWS.items():
        assert torch.equal(found[ids[token]], words[row])


def test_the_template_takes_sound(parts):
    tokenizer = AutoTokenizer.from_pretrained(parts[1])
    turn = {"role": "user", "content": [{"type": "audio"}, {"type": "text", "text": "hi"}]}
    text = tokenizer.apply_chat_template([turn], tokenize=False)
    assert "<|audio_start|><|audio_pad|><|audio_end|>hi" in text


def test_shipped_weights_come_back_with_the_names_they_had(tmp_path):
    tensors = {"a.weight": torch.randn(4, 6), "a.bias": torch.ones(4), "layer.scale": torch.full((4,), 0.5)}
    write_shipped(tmp_path / "w.safetensors", tensors)
    found = read_shipped(tmp_path / "w.safetensors")
    assert found.keys() == tensors.keys()
    for name, value in tensors.items():
        torch.testing.assert_close(found[name], value, rtol=0.02, atol=0.02)
