"""`python -m model_families.whisper.convert SOURCE OUT`: a CTranslate2 Whisper folder as a Hugging Face
one."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from model_families.whisper.config import WhisperConfig, WhisperGeneration
from model_families.whisper.ctranslate2 import read_model

HEAD_WIDTH = 64  # of every published Whisper
MAX_INITIAL_TIMESTAMP = 50  # one second
SAMPLING_RATE, N_FFT, HOP_LENGTH, CHUNK_S = 16_000, 400, 160, 30
END = "<|endoftext|>"


class _SourceConfig(msgspec.Struct, frozen=True):
    suppress_ids: tuple[int, ...] = ()
    suppress_ids_begin: tuple[int, ...] = ()
    alignment_heads: tuple[tuple[int, int], ...] | None = None


def convert(source: Path, out: Path) -> None:
    """Writes config, generation config, preprocessor, tokenizer and safetensors. Raises UnknownFormat."""
    out.mkdir(parents=True, exist_ok=True)
    theirs = read_model(source / "model.bin")
    config = _config_of(theirs)
    save_file(_Renamer(theirs, config.d_model).run(config), out / "model.safetensors", {"format": "pt"})
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    shutil.copyfile(source / "tokenizer.json", out / "tokenizer.json")
    generation = _generation_of(
        tokenizer, msgspec.json.decode((source / "config.json").read_bytes(), type=_SourceConfig)
    )
    _write(out / "generation_config.json", generation)
    identity = {
        "model_type": "whisper",
        "architectures": ["WhisperForConditionalGeneration"],
        "dtype": "float16",
        "decoder_start_token_id": generation.decoder_start_token_id,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), generation.eos_token_id),
    }
    _write(out / "config.json", {**msgspec.to_builtins(config), **identity})
    extractor = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": config.num_mel_bins}
    measures = {
        "sampling_rate": SAMPLING_RATE,
        "n_fft": N_FFT,
        "hop_length": HOP_LENGTH,
        "chunk_length": CHUNK_S,
    }
    _write(out / "preprocessor_config.json", extractor | measures)
    specials = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), END)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    _write(out / "tokenizer_config.json", settings | specials)


def _write(path: Path, content: object) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=2))


def _config_of(theirs: Mapping[str, Tensor]) -> WhisperConfig:
    vocab_size, width = theirs["decoder/embeddings/weight"].shape

    def layers(side: str) -> int:
        return len(
            {name.split("/")[1] for name in theirs if name.startswith(f"{side}/layer_")} - {"layer_norm"}
        )

    return WhisperConfig(
        vocab_size=vocab_size,
        num_mel_bins=theirs["encoder/conv1/weight"].shape[1],
        d_model=width,
        encoder_layers=layers("encoder"),
        encoder_attention_heads=max(1, width // HEAD_WIDTH),
        encoder_ffn_dim=theirs["encoder/layer_0/ffn/linear_0/weight"].shape[0],
        decoder_layers=layers("decoder"),
        decoder_attention_heads=max(1, width // HEAD_WIDTH),
        decoder_ffn_dim=theirs["decoder/layer_0/ffn/linear_0/weight"].shape[0],
        max_source_positions=theirs["encoder/position_encodings/encodings"].shape[0],
        max_target_positions=theirs["decoder/position_encodings/encodings"].shape[0],
    )


def _generation_of(tokenizer: Tokenizer, source: _SourceConfig) -> WhisperGeneration:
    """English-only models number their special tokens one lower, so that ids come from the tokenizer. Those
    models have the language tokens, too, and were never taught them."""

    def id_of(token: str) -> int:
        found = tokenizer.token_to_id(token)
        assert found is not None, f"the tokenizer lacks {token}"
        return int(found)

    start, translate = id_of("<|startoftranscript|>"), id_of("<|translate|>")
    multilingual = id_of(END) > 50_256
    languages = (
        {str(tokenizer.id_to_token(i)): i for i in range(start + 1, translate)} if multilingual else {}
    )
    tasks = {task: id_of(f"<|{task}|>") for task in ("transcribe", "translate")} if multilingual else {}
    return WhisperGeneration(
        eos_token_id=id_of(END),
        decoder_start_token_id=start,
        no_timestamps_token_id=id_of("<|notimestamps|>"),
        suppress_tokens=source.suppress_ids or None,
        begin_suppress_tokens=source.suppress_ids_begin or None,
        is_multilingual=multilingual,
        lang_to_id=languages,
        task_to_id=tasks,
        prev_sot_token_id=id_of("<|startofprev|>"),
        max_initial_timestamp_index=MAX_INITIAL_TIMESTAMP,
        alignment_heads=source.alignment_heads,
    )


class _Renamer:
    """CTranslate2 stacks projections of one input; keys have a bias of zeros there and none here."""

    def __init__(self, theirs: Mapping[str, Tensor], width: int) -> None:
        self._theirs = theirs
        self._width = width
        self._ours: dict[str, Tensor] = {}

    def run(self, config: WhisperConfig) -> dict[str, Tensor]:
        for index in range(config.encoder_layers):
            self._layer("encoder", index)
        for index in range(config.decoder_layers):
            self._layer("decoder", index)
            prefix, theirs = f"model.decoder.layers.{index}.", f"decoder/layer_{index}/attention/"
            self._attention(prefix + "encoder_attn", theirs, [("q",), ("k", "v")])
            self._norm(prefix + "encoder_attn_layer_norm", theirs + "layer_norm")
        for side in ("encoder", "decoder"):
            self._norm(f"model.{side}.layer_norm", f"{side}/layer_norm")
            positions = self._theirs[f"{side}/position_encodings/encodings"]
            self._ours[f"model.{side}.embed_positions.weight"] = positions
        for convolution in ("conv1", "conv2"):
            self._linear(f"model.encoder.{convolution}", f"encoder/{convolution}")
        self._ours["model.decoder.embed_tokens.weight"] = self._theirs["decoder/embeddings/weight"]
        return {name: tensor.contiguous() for name, tensor in self._ours.items()}

    def _layer(self, side: str, index: int) -> None:
        prefix, theirs = f"model.{side}.layers.{index}.", f"{side}/layer_{index}/"
        self._attention(prefix + "self_attn", theirs + "self_attention/", [("q", "k", "v")])
        self._norm(prefix + "self_attn_layer_norm", theirs + "self_attention/layer_norm")
        self._linear(prefix + "fc1", theirs + "ffn/linear_0")
        self._linear(prefix + "fc2", theirs + "ffn/linear_1")
        self._norm(prefix + "final_layer_norm", theirs + "ffn/layer_norm")

    def _attention(self, ours: str, theirs: str, stacks: list[tuple[str, ...]]) -> None:
        for number, names in enumerate(stacks):
            weight = self._theirs[f"{theirs}linear_{number}/weight"]
            bias = self._theirs[f"{theirs}linear_{number}/bias"]
            parts = zip(names, torch.split(weight, self._width), torch.split(bias, self._width), strict=True)
            for name, weight_part, bias_part in parts:
                self._ours[f"{ours}.{name}_proj.weight"] = weight_part
                if name == "k":
                    assert not torch.any(bias_part), "keys have no bias"
                else:
                    self._ours[f"{ours}.{name}_proj.bias"] = bias_part
        self._linear(f"{ours}.out_proj", f"{theirs}linear_{len(stacks)}")

    def _linear(self, ours: str, theirs: str) -> None:
        self._ours[f"{ours}.weight"] = self._theirs[f"{theirs}/weight"]
        self._ours[f"{ours}.bias"] = self._theirs[f"{theirs}/bias"]

    def _norm(self, ours: str, theirs: str) -> None:
        self._ours[f"{ours}.weight"] = self._theirs[f"{theirs}/gamma"]
        self._ours[f"{ours}.bias"] = self._theirs[f"{theirs}/beta"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    convert(arguments.source, arguments.out)


if __name__ == "__main__":
    main()
