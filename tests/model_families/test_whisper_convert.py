"""CTranslate2 → Hugging Face: a tiny model written in their form comes back as it was."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from model_families.whisper.config import read_generation, read_whisper_config
from model_families.whisper.convert import convert
from model_families.whisper.ctranslate2 import UnknownFormat, read_model
from tests.tiny_whisper import build_tiny_whisper

_STACKED = {"self_attn": ("self_attention", ("qkv",)), "encoder_attn": ("attention", ("q", "kv"))}


def ctranslate2_names(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same weights under CTranslate2's names."""
    made: dict[str, torch.Tensor] = {}
    for side in ("encoder", "decoder"):
        prefix = f"model.{side}."
        made[f"{side}/position_encodings/encodings"] = weights[prefix + "embed_positions.weight"]
        _norm(made, f"{side}/layer_norm", weights, prefix + "layer_norm")
        for index in range(2):
            _layer(made, f"{side}/layer_{index}/", weights, f"{prefix}layers.{index}.", side == "decoder")
    for name in ("conv1", "conv2"):
        _linear(made, f"encoder/{name}", weights, f"model.encoder.{name}")
    made["decoder/embeddings/weight"] = weights["model.decoder.embed_tokens.weight"]
    return made


def _layer(
    made: dict[str, torch.Tensor], theirs: str, weights: dict[str, torch.Tensor], ours: str, crosses: bool
) -> None:
    for ours_name, (name, stacks) in list(_STACKED.items())[: 1 + crosses]:
        attention, source = f"{theirs}{name}/", f"{ours}{ours_name}."
        for number, stack in enumerate(stacks):
            parts = [f"{source}{letter}_proj" for letter in stack]
            made[f"{attention}linear_{number}/weight"] = torch.cat([weights[p + ".weight"] for p in parts])
            zeros = torch.zeros(weights[parts[0] + ".weight"].shape[0])
            made[f"{attention}linear_{number}/bias"] = torch.cat(
                [weights.get(p + ".bias", zeros) for p in parts]
            )
        _linear(made, f"{attention}linear_{len(stacks)}", weights, source + "out_proj")
        _norm(made, f"{attention}layer_norm", weights, f"{ours}{ours_name}_layer_norm")
    _linear(made, f"{theirs}ffn/linear_0", weights, ours + "fc1")
    _linear(made, f"{theirs}ffn/linear_1", weights, ours + "fc2")
    _norm(made, f"{theirs}ffn/layer_norm", weights, ours + "final_layer_norm")


def _linear(made: dict[str, torch.Tensor], theirs: str, weights: dict[str, torch.Tensor], ours: str) -> None:
    made[theirs + "/weight"], made[theirs + "/bias"] = weights[ours + ".weight"], weights[ours + ".bias"]


def _norm(made: dict[str, torch.Tensor], theirs: str, weights: dict[str, torch.Tensor], ours: str) -> None:
    made[theirs + "/gamma"], made[theirs + "/beta"] = weights[ours + ".weight"], weights[ours + ".bias"]


def binary(tensors: dict[str, torch.Tensor], version: int = 6, specification: str = "WhisperSpec") -> bytes:
    def name(text: str) -> bytes:
        return struct.pack("<H", len(text) + 1) + text.encode() + b"\0"

    parts = [struct.pack("<I", version), name(specification), struct.pack("<II", 3, len(tensors) + 1)]
    parts += [
        name("num_heads"),
        struct.pack("<BBI", 0, 2, 2),
        b"\2\0",
    ]  # an int16 scalar of the configuration
    for key, tensor in tensors.items():
        data = tensor.half().numpy().tobytes()
        parts += [name(key), struct.pack(f"<B{tensor.ndim}I", tensor.ndim, *tensor.shape)]
        parts += [struct.pack("<BI", 4, len(data)), data]
    parts += [struct.pack("<I", 1), name("decoder/projection/weight"), name("decoder/embeddings/weight")]
    return b"".join(parts)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_whisper(tmp_path_factory.mktemp("whisper"), multilingual=False)


def test_a_converted_model_is_the_model(tiny: Path, tmp_path: Path) -> None:
    weights = load_file(tiny / "model.safetensors")
    (tmp_path / "model.bin").write_bytes(binary(ctranslate2_names(weights)))
    (tmp_path / "tokenizer.json").write_bytes((tiny / "tokenizer.json").read_bytes())
    given = {"suppress_ids": [5, 17], "suppress_ids_begin": [32], "alignment_heads": [[1, 1]]}
    (tmp_path / "config.json").write_text(json.dumps(given))
    convert(tmp_path, tmp_path / "out")
    made = load_file(tmp_path / "out" / "model.safetensors")
    assert made.keys() == weights.keys() - {"proj_out.weight"}
    for name, tensor in made.items():
        torch.testing.assert_close(tensor, weights[name].half())
    ours, theirs = read_whisper_config(tmp_path / "out"), read_whisper_config(tiny)
    assert ours.window_frames == theirs.window_frames
    assert (ours.vocab_size, ours.d_model, ours.decoder_layers) == (theirs.vocab_size, theirs.d_model, 2)
    generation, expected = read_generation(tmp_path / "out"), read_generation(tiny)
    assert generation.suppress_tokens == (5, 17)
    assert generation.no_timestamps_token_id == expected.no_timestamps_token_id
    assert not generation.is_multilingual


def test_what_is_no_such_file_is_named(tiny: Path, tmp_path: Path) -> None:
    whole = binary({"encoder/conv1/weight": torch.zeros(2, 3, 3)})
    cases = {
        "version": binary({}, version=5),
        "TransformerSpec": binary({}, specification="TransformerSpec"),
        "ends early": whole[:-9],
    }
    for reason, content in cases.items():
        (tmp_path / "model.bin").write_bytes(content)
        with pytest.raises(UnknownFormat, match=reason):
            read_model(tmp_path / "model.bin")
