"""Makes an omnistage-nano checkpoint of a Qwen2.5-VL one: ears from Whisper's encoder, a voice of our own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from model_families.default_model.shipped import PACKED, read_packed, read_shipped
from model_families.omnistage_nano.ears import HEARD_PAIRS, HEARD_WORDS
from model_families.omnistage_nano.letters import NUM_LETTERS
from model_families.omnistage_nano.pieces import SPOKEN_PIECES
from model_families.omnistage_nano.pronouncing import SPOKEN_WORDS
from model_families.omnistage_nano.shipped_speech import read_sections, speaking_tensors

NEW_TOKENS = (  # from the first id after the pictures' four
    "<|audio_start|>",
    "<|audio_end|>",
    "<|audio_pad|>",
    "<|reserved_0|>",
    "<|tts_pad|>",
    "<|tts_bos|>",
    "<|tts_eos|>",
)
SEED = 20260103
TTS_ROWS = {"<|tts_pad|>": 8, "<|tts_bos|>": 9, "<|tts_eos|>": 10}  # tokens whose rows they have: never said
WHISPER_LAYERS, GROWN_LAYERS = 4, 2
EARS = {
    "num_mel_bins": 80,
    "d_model": 384,
    "encoder_layers": WHISPER_LAYERS + GROWN_LAYERS,
    "encoder_attention_heads": 6,
}
EARS_MORE = {"encoder_ffn_dim": 1536, "max_source_positions": 1500, "n_window": 1500}
FEATURES = {
    "feature_extractor_type": "WhisperFeatureExtractor",
    "feature_size": 80,
    "sampling_rate": 16_000,
    "n_fft": 400,
    "hop_length": 160,
    "chunk_length": 30,
}


def make_omni(
    seeing: Path,
    out: Path,
    *,
    whisper: Path,
    hearing: Path | None = None,
    speaking: Path | None = None,
    one_position_per_token: bool = False,
    adapter: Mapping[str, Tensor] | None = None,
) -> None:
    """`seeing`: the composed checkpoint; `hearing`, `speaking`: shipped weights (beside the former the
    words that are known, and which follow which, beside the latter their sections of config.json); what
    there are none for, the checkpoint does not take or give. `one_position_per_token`: as the eyes were
    trained. `adapter`: low-rank weights of the language model for what stands behind a picture, names from
    `layers.` on (see `adapter.py`)."""
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(seeing)
    tokenizer.add_special_tokens(
        {"extra_special_tokens": list(NEW_TOKENS)}, replace_extra_special_tokens=False
    )
    tokenizer.save_pretrained(out)
    ids = {name: int(tokenizer.convert_tokens_to_ids(name)) for name in NEW_TOKENS}
    tensors = _thinker(load_file(seeing / "model.safetensors"), ids)
    width = tensors["thinker.model.embed_tokens.weight"].shape[1]
    tensors |= {f"thinker.{name}": value for name, value in _ears(whisper, hearing).items()}
    config = _config(json.loads((seeing / "config.json").read_text()), ids, width)
    if adapter:
        tensors |= {f"thinker.model.picture_adapter.{name}": value for name, value in adapter.items()}
        config["thinker_config"]["text_config"]["picture_adapter"] = _adapter_ranks(adapter)
    config["thinker_config"]["hears"] = hearing is not None
    config["thinker_config"]["one_position_per_token"] = one_position_per_token
    for name in (HEARD_WORDS, HEARD_PAIRS):
        if hearing is not None and (known := hearing.with_name(name + PACKED)).exists():
            (out / name).write_text(read_packed(known), encoding="ascii")
    config |= {"enable_audio_output": False} | _marks(tokenizer, ids)
    if speaking is not None:
        for name in (SPOKEN_WORDS, SPOKEN_PIECES):
            if (known := speaking.with_name(name)).exists():
                shutil.copy(known, out)
        tensors |= speaking_tensors(read_shipped(speaking))
        config |= read_sections(speaking.with_suffix(".json"))
    save_file(
        {name: value.to(torch.bfloat16).contiguous() for name, value in tensors.items()},
        out / "model.safetensors",
    )
    _write(out / "config.json", config)
    pictures = json.loads((seeing / "preprocessor_config.json").read_text())
    _write(out / "preprocessor_config.json", pictures | FEATURES)
    shutil.copy(seeing / "generation_config.json", out)
    template = (seeing / "chat_template.jinja").read_text()
    (out / "chat_template.jinja").write_text(template if hearing is None else _with_sound(template))


def _with_sound(template: str) -> str:
    """The template of pictures and videos, which takes sound as well."""
    before = "{%- elif part.type == 'text'"
    assert before in template, "the template is another one than expected"
    sound = "{%- elif part.type == 'audio' or 'audio' in part or 'audio_url' in part -%}"
    marks = "{{- '<|audio_start|><|audio_pad|><|audio_end|>' -}}"
    return template.replace(before, f"{sound}\n                {marks}\n            {before}", 1)


def _thinker(seeing: Mapping[str, Tensor], ids: Mapping[str, int]) -> dict[str, Tensor]:
    tensors = {f"thinker.{name}": value for name, value in seeing.items()}
    words = tensors["thinker.model.embed_tokens.weight"]
    for token, row in TTS_ROWS.items():
        words[ids[token]] = words[row]
    return tensors


def whisper_ears(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`audio_tower.*`: Whisper's encoder, whose positions our tower computes, and layers behind it that
    pass on
    what they are given until they are trained."""
    found = {
        name.replace("model.encoder.", "audio_tower.").replace(
            "audio_tower.layer_norm", "audio_tower.ln_post"
        ): value
        for name, value in stored.items()
        if name.startswith("model.encoder.") and "embed_positions" not in name
    }
    last = f"audio_tower.layers.{WHISPER_LAYERS - 1}."
    generator = torch.Generator().manual_seed(SEED)
    for name in sorted(name for name in found if name.startswith(last)):
        for layer in range(WHISPER_LAYERS, WHISPER_LAYERS + GROWN_LAYERS):
            shape = found[name].shape
            if "layer_norm" in name:
                value = torch.full(shape, float(name.endswith("weight")))
            elif name.endswith("bias") or "out_proj" in name or "fc2" in name:
                value = torch.zeros(shape)
            else:
                value = 0.02 * torch.randn(shape, generator=generator)
            found[f"audio_tower.layers.{layer}.{name.removeprefix(last)}"] = value
    return found


def _ears(whisper: Path, hearing: Path | None) -> dict[str, Tensor]:
    """What was trained takes the place of what it grew out of."""
    found = whisper_ears(load_file(whisper / "model.safetensors"))
    found["audio_tower.spell.weight"] = torch.zeros(NUM_LETTERS, EARS["d_model"])
    found["audio_tower.spell.bias"] = torch.zeros(NUM_LETTERS)
    shipped = {} if hearing is None else read_shipped(hearing)
    assert shipped.keys() <= found.keys(), shipped.keys() - found.keys()
    return found | shipped


def _config(seeing: Mapping[str, Any], ids: Mapping[str, int], width: int) -> dict[str, Any]:
    thinker = {name: value for name, value in seeing.items() if name not in ("architectures", "model_type")}
    thinker["model_type"] = "qwen2_5_omni_thinker"
    thinker["text_config"] = thinker["text_config"] | {"tie_word_embeddings": True}
    thinker["audio_config"] = {**EARS, **EARS_MORE, "output_dim": width, "activation_function": "gelu"}
    thinker |= {
        "audio_start_token_id": ids["<|audio_start|>"],
        "audio_end_token_id": ids["<|audio_end|>"],
        "audio_token_id": ids["<|audio_pad|>"],
        "position_id_per_seconds": 25,
        "seconds_per_chunk": 2,
    }
    return {
        "architectures": ["OmnistageNanoForConditionalGeneration"],
        "model_type": "omnistage_nano",
        "dtype": "bfloat16",
        "thinker_config": thinker,
    }


def _adapter_ranks(adapter: Mapping[str, Tensor]) -> dict[str, int]:
    """Of the first layer's projections: all layers have the same."""
    first, last = "layers.0.", ".lora_A.weight"
    return {
        name.removeprefix(first).removesuffix(last): len(value)
        for name, value in adapter.items()
        if name.startswith(first) and name.endswith(last)
    }


def _marks(tokenizer: PreTrainedTokenizerBase, ids: Mapping[str, int]) -> dict[str, int]:
    """How the talker finds the turns: by the first token of a role."""

    def first(text: str) -> int:
        return int(tokenizer(text, add_special_tokens=False).input_ids[0])

    return {
        "im_start_token_id": first("<|im_start|>"),
        "user_token_id": first("user\n"),
        "assistant_token_id": first("assistant\n"),
        "tts_pad_token_id": ids["<|tts_pad|>"],
        "tts_bos_token_id": ids["<|tts_bos|>"],
        "tts_eos_token_id": ids["<|tts_eos|>"],
    }


def _write(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
