"""A config.json that somebody edited: `plan` refuses it by file and field; `serve` never shows a
traceback."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from api.cli import main
from contracts.errors import EngineError
from stages.launch import serve_service
from stages.options import ServeOptions

ABSENT = object()
Edit = tuple[str, object, str]  # field, value, what the refusal says beside "config.json"

TEXT_EDITS: list[Edit] = [
    ("num_attention_heads", 0, "num_attention_heads"),
    ("num_key_value_heads", 3, "num_attention_heads 4 is no multiple of num_key_value_heads 3"),
    ("num_key_value_heads", -2, "num_key_value_heads"),
    ("head_dim", 15, "head_dim"),
    ("hidden_size", 128, "(vocab_size, hidden_size)"),
    ("hidden_size", "64", "hidden_size"),
    ("hidden_size", ABSENT, "lacks hidden_size"),
    ("vocab_size", 321, "(vocab_size, hidden_size)"),
    ("intermediate_size", 48, "(intermediate_size, hidden_size)"),
    ("num_hidden_layers", 2, "num_hidden_layers"),
    ("num_hidden_layers", 4, "num_hidden_layers"),
    ("layer_types", ["full_attention"], "layer_types names 1 layers, num_hidden_layers is 3"),
    ("layer_types", ["mamba"] * 3, "layer_types"),
    ("rms_norm_eps", 0, "rms_norm_eps"),
    ("rope_parameters", {"rope_type": "yarn", "factor": "two"}, "rope_parameters.factor"),
    ("rope_parameters", {"rope_type": "linear"}, "lack factor"),
    ("max_position_embeddings", 0, "max_position_embeddings"),
    ("use_cache", "often", "use_cache"),  # only transformers reads it, with the tokenizer
    ("model_type", 3, "model_type"),
]
VISION_EDITS: list[Edit] = [
    ("vision_config.num_heads", 0, "vision_config.num_heads"),
    ("vision_config.num_heads", 3, "hidden_size 32 is no multiple of num_heads 3"),
    ("vision_config.patch_size", "16", "vision_config.patch_size"),
    ("vision_config.spatial_merge_size", 0, "vision_config.spatial_merge_size"),
    ("text_config", ABSENT, "lacks hidden_size"),
    ("text_config.num_attention_heads", 0, "text_config.num_attention_heads"),
    ("text_config.hidden_size", 128, "(vocab_size, hidden_size)"),
]
LOADED_EDITS: list[Edit] = [  # what only the tower's own weights contradict
    ("vision_config.hidden_size", 64, "config.json needs"),
    ("vision_config.depth", 5, "depth"),
]
SPEECH_EDITS: list[Edit] = [
    ("code2wav_config.num_attention_heads", 3, "num_attention_heads 3 is no multiple"),
    ("code2wav_config.decoder_dim", 3, "decoder_dim"),
    ("talker_config.text_config.num_attention_heads", 0, "num_attention_heads"),
    ("thinker_config.audio_config.d_model", -1, "audio_config.d_model"),
]
TOKEN2WAV_EDITS: list[Edit] = [
    ("token2wav_config.dit_config.repeats", 7, "no multiple of repeats 7"),
    ("token2wav_config.dit_config.enc_channels", [], "enc_channels"),
    ("token2wav_config.bigvgan_config.upsample_rates", [5], "upsample_kernel_sizes"),
    ("thinker_config.text_config.num_attention_heads", 8, "mrope_section"),
]


def edited(folder: Path, into: Path, path: str, value: object) -> Path:
    shutil.copytree(folder, into)
    config = into / "config.json"
    whole: dict[str, Any] = json.loads(config.read_text())
    section, (*parents, field) = whole, path.split(".")
    for name in parents:
        section = section[name]
    if value is ABSENT:
        del section[field]
    else:
        section[field] = value
    config.write_text(json.dumps(whole))
    return into


def refusal_of_plan(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["plan", str(folder)]) == 1, "planned"
    return capsys.readouterr().err


def check(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], edits: list[Edit]) -> None:
    for index, (path, value, words) in enumerate(edits):
        error = refusal_of_plan(edited(folder, tmp_path / str(index), path, value), capsys)
        assert "config.json" in error, (path, value)
        assert words in error, (path, value, error)
        assert "Traceback" not in error


def test_text(tiny: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check(tiny("llama"), tmp_path, capsys, TEXT_EDITS)


def test_vision(tiny: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check(tiny("qwen3_vl"), tmp_path, capsys, VISION_EDITS)


def test_speech(tiny_omni: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check(tiny_omni("qwen3_omni_moe"), tmp_path / "3", capsys, SPEECH_EDITS)
    check(tiny_omni("qwen2_5_omni"), tmp_path / "2_5", capsys, TOKEN2WAV_EDITS)


def test_json_that_is_none(
    tiny: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = edited(tiny("llama"), tmp_path / "model", "use_cache", True)
    for text in ("", "[]", '{"model_type": "llama",', "null"):
        (folder / "config.json").write_text(text)
        assert "config.json" in refusal_of_plan(folder, capsys)


@pytest.mark.parametrize("edit", [TEXT_EDITS[4], *LOADED_EDITS], ids=lambda edit: str(edit[0]))
def test_serve_refuses_too(tiny: Callable[[str], Path], tmp_path: Path, edit: Edit) -> None:
    """An EngineError is what the command prints as one line."""

    async def serve(folder: Path) -> None:
        async with serve_service(ServeOptions(model=folder, dtype="float32")):
            raise AssertionError("it serves")

    path, value, words = edit
    family = "qwen3_vl" if path.startswith("vision_config") else "llama"
    with pytest.raises(EngineError) as caught:
        asyncio.run(serve(edited(tiny(family), tmp_path / "model", path, value)))
    assert words in caught.value.message
    assert "config.json" in caught.value.message
