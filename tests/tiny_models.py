"""Tiny seeded checkpoints in the Hugging Face layout, and `transformers` as the oracle over them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.adapted_reference import add_adapter

transformers.utils.logging.disable_progress_bar()

FAMILIES = ("llama", "qwen2", "qwen3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
VISION_FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
MERGES = (
    *(("h", "e"), ("i", "n"), ("o", "u"), ("a", "n"), ("Ġ", "a"), ("Ġ", "t"), ("Ġt", "he"), ("r", "e")),
    *(("s", "t"), ("e", "r"), ("u", "s"), ("us", "er"), ("y", "st"), ("Ġ", "i"), ("Ġi", "n"), ("l", "l")),
    *(("he", "ll"), ("hell", "o"), ("a", "s"), ("Ċ", "Ċ"), ("Ã", "©"), ("in", "g"), ("o", "n"), ("e", "n")),
)
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PADDED_VOCAB = 320  # like the real checkpoints, more embedding rows than the tokenizer has tokens

# ChatML with image parts and tool calls.
CHAT_TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\nTools, one JSON object a line:' }}
{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}
{{- message.content }}
{%- elif message.content %}
{%- for part in message.content %}
{%- if part.type == 'image' or 'image' in part or 'image_url' in part %}
{{- '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- elif part.type == 'video' or 'video' in part %}
{{- '<|vision_start|><|video_pad|><|vision_end|>' }}
{%- elif 'text' in part %}
{{- part.text }}
{%- endif %}
{%- endfor %}
{%- endif %}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


@dataclass(frozen=True)
class _Recipe:
    model_class: str
    config_class: str
    patch_size: int = 0  # 0: no images
    interleaved_mrope: bool = False


_RECIPES = {
    "llama": _Recipe("LlamaForCausalLM", "LlamaConfig"),
    "qwen2": _Recipe("Qwen2ForCausalLM", "Qwen2Config"),
    "qwen3": _Recipe("Qwen3ForCausalLM", "Qwen3Config"),
    "qwen2_vl": _Recipe("Qwen2VLForConditionalGeneration", "Qwen2VLConfig", 14),
    "qwen2_5_vl": _Recipe("Qwen2_5_VLForConditionalGeneration", "Qwen2_5_VLConfig", 14),
    "qwen3_vl": _Recipe("Qwen3VLForConditionalGeneration", "Qwen3VLConfig", 16, True),
    "qwen3_vl_moe": _Recipe("Qwen3VLMoeForConditionalGeneration", "Qwen3VLMoeConfig", 16, True),
}


def build_tiny(
    family: str, directory: Path, seed: int = 0, *, sharded: bool = False, **overrides: Any
) -> Path:
    """Writes a complete checkpoint folder (float32) and returns it.

    `overrides` change the text configuration (`num_hidden_layers=1`), or the vision one when they start with
    `vision_` (`vision_depth=2`). `sharded`: several safetensors files and an index.
    """
    recipe = _RECIPES[family]
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(directory)
    model = _new_model(family, recipe, tokenizer, overrides)
    randomise(model, seed, num_live_rows=len(tokenizer))
    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in SPECIAL_TOKENS}
    model.generation_config = transformers.GenerationConfig(
        eos_token_id=[ids["<|im_end|>"], ids["<|endoftext|>"]], pad_token_id=ids["<|endoftext|>"]
    )
    model.save_pretrained(directory, max_shard_size="128KB" if sharded else "1GB")
    if recipe.patch_size:
        _write_preprocessor(directory, recipe)
    return directory


def build_tokenizer(
    special_tokens: Sequence[str] = SPECIAL_TOKENS,
    merges: Sequence[tuple[str, str]] = MERGES,
    chat_template: str = CHAT_TEMPLATE,
    named_tokens: Mapping[str, str] | None = None,
) -> PreTrainedTokenizerFast:
    """Byte-level BPE: 256 bytes, a few merges, special tokens, and a template; the plain Qwen ones by
    default.

    `named_tokens`: special tokens that the family's processor asks the tokenizer for (`image_token`, ...).
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, *(a + b for a, b in merges)]
    core = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, list(merges)))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in special_tokens])
    others = [s for s in special_tokens if s not in ("<|im_end|>", "<|endoftext|>")]
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=others if named_tokens is None else dict(named_tokens),
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
    )


def _new_model(family: str, recipe: _Recipe, tokenizer: Any, overrides: dict[str, Any]) -> Any:
    vision = {k.removeprefix("vision_"): v for k, v in overrides.items() if k.startswith("vision_")}
    text: dict[str, Any] = {
        "vocab_size": PADDED_VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "bos_token_id": tokenizer.convert_tokens_to_ids("<|endoftext|>"),
        "eos_token_id": tokenizer.convert_tokens_to_ids("<|im_end|>"),
        "tie_word_embeddings": family == "qwen2",
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    if family in ("qwen3", "qwen3_vl", "qwen3_vl_moe"):
        text["head_dim"] = 16
    if family == "qwen3_vl_moe":  # the second layer is dense
        text |= {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        text["mlp_only_layers"] = [1]
    text |= {k: v for k, v in overrides.items() if not k.startswith("vision_")}
    config_class = getattr(transformers, recipe.config_class)
    if not recipe.patch_size:
        config = config_class(**text)
    else:
        text["rope_parameters"] = {"mrope_section": [2, 3, 3], **text["rope_parameters"]}
        if recipe.interleaved_mrope:
            text["rope_parameters"]["mrope_interleaved"] = True
        config = config_class(
            text_config=text,
            vision_config=_vision_config(family, text["hidden_size"]) | vision,
            tie_word_embeddings=text.pop("tie_word_embeddings"),
            image_token_id=tokenizer.convert_tokens_to_ids("<|image_pad|>"),
            video_token_id=tokenizer.convert_tokens_to_ids("<|video_pad|>"),
            vision_start_token_id=tokenizer.convert_tokens_to_ids("<|vision_start|>"),
            vision_end_token_id=tokenizer.convert_tokens_to_ids("<|vision_end|>"),
        )
    config.dtype = torch.float32
    return getattr(transformers, recipe.model_class)(config).to(torch.float32).eval()


def _vision_config(family: str, text_width: int) -> dict[str, Any]:
    common = {"depth": 4, "num_heads": 2, "spatial_merge_size": 2, "temporal_patch_size": 2}
    if family == "qwen2_vl":
        return common | {"embed_dim": 32, "hidden_size": text_width, "mlp_ratio": 2, "patch_size": 14}
    common |= {"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": text_width}
    if family == "qwen2_5_vl":  # windows of 2x2 merged patches: an 84x112 image has four, two of them cut off
        return common | {"patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1, 3]}
    return common | {"patch_size": 16, "num_position_embeddings": 36, "deepstack_visual_indexes": [0, 2]}


@torch.no_grad()
def randomise(model: Any, seed: int, num_live_rows: int | None, gain: float = 1.4) -> None:
    """Random weights wide enough that greedy text varies; norms near one; biases not zero.

    Rows of the output head past the tokenizer's vocabulary (`num_live_rows`) stay zero, so that they are
    never
    the likeliest.
    """
    generator = torch.Generator().manual_seed(seed)
    seen: set[int] = set()
    for name, parameter in sorted(model.named_parameters()):
        if id(parameter) in seen:
            continue
        seen.add(id(parameter))
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim == 1:
            is_scale = name.endswith("weight")  # a norm's; everything else of one dimension is a bias
            parameter.copy_(1 + 0.1 * noise if is_scale else 0.1 * noise)
        elif "embed_tokens" in name or "pos_embed" in name:
            parameter.copy_(0.3 * noise)
        else:  # stacked experts lie [expert, output, input]
            fan_in = parameter.shape[-1] if "experts" in name else parameter[0].numel()
            parameter.copy_(noise * gain / fan_in**0.5)
    if num_live_rows is not None:
        model.get_output_embeddings().weight[num_live_rows:] = 0


def _write_preprocessor(directory: Path, recipe: _Recipe) -> None:
    """Both spellings of the pixel bounds occur in published checkpoints; qwen3_vl uses `size`."""
    factor = 2 * recipe.patch_size
    bounds = (2 * factor) ** 2, (4 * factor) ** 2
    config: dict[str, Any] = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": recipe.patch_size,
        "temporal_patch_size": 2,
        "merge_size": 2,
    }
    if recipe.interleaved_mrope:
        config |= {"size": {"shortest_edge": bounds[0], "longest_edge": bounds[1]}}
        config |= {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
    else:
        config |= {"min_pixels": bounds[0], "max_pixels": bounds[1]}
        config |= {"image_mean": [0.48145466, 0.4578275, 0.40821073]}
        config |= {"image_std": [0.26862954, 0.26130258, 0.27577711]}
    (directory / "preprocessor_config.json").write_text(json.dumps(config, indent=2))


# --- the oracle ---------------------------------------------------------------------------------------------
@lru_cache(maxsize=8)
def reference_model(folder: Path) -> Any:
    config = json.loads((folder / "config.json").read_text())
    kind = getattr(transformers, config["architectures"][0])
    model = kind.from_pretrained(folder, dtype=torch.float32).eval()
    if config.get("one_position_per_token"):
        model.model.get_rope_index = _positions_of_text
    add_adapter(model, folder)
    return model


def _positions_of_text(input_ids: torch.Tensor, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Of one conversation whose pictures are read like text, in place of rows and columns: what
    `transformers` does not know of the default model's eyes."""
    count = input_ids.shape[1]
    return torch.arange(count).expand(3, 1, count), torch.zeros(1, 1, dtype=torch.long)


@lru_cache(maxsize=8)
def reference_tokenizer(folder: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(folder)


def reference_inputs(
    folder: Path, messages: list[dict[str, Any]], images: list[Image.Image]
) -> dict[str, Any]:
    """What the family's processor makes of a conversation (Hugging Face message dicts) and its images."""
    tokenizer = reference_tokenizer(folder)
    token_ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    if not images:
        return {"input_ids": torch.tensor([token_ids])}
    processor = Qwen2VLImageProcessorPil.from_pretrained(folder)
    features = processor(images=images, return_tensors="pt")
    pad = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    counts = iter((features["image_grid_thw"].prod(-1) // processor.merge_size**2).tolist())
    expanded = [i for token in token_ids for i in ([pad] * next(counts) if token == pad else [token])]
    assert next(counts, None) is None, "more images than placeholders"
    input_ids = torch.tensor([expanded])
    return {
        "input_ids": input_ids,
        "mm_token_type_ids": (input_ids == pad).int(),
        "pixel_values": features["pixel_values"],
        "image_grid_thw": features["image_grid_thw"],
    }


@torch.no_grad()
def reference_generate(
    folder: Path, messages: list[dict[str, Any]], images: list[Image.Image], max_new_tokens: int
) -> list[int]:
    """Greedy float32 continuation by `transformers`, without the prompt; the end token included."""
    inputs = reference_inputs(folder, messages, images)
    out = reference_model(folder).generate(
        **inputs,
        attention_mask=torch.ones_like(inputs["input_ids"]),
        max_new_tokens=max_new_tokens,
        do_sample=False,
    )
    return out[0, inputs["input_ids"].shape[1] :].tolist()


@torch.no_grad()
def reference_logits(folder: Path, messages: list[dict[str, Any]], images: list[Image.Image]) -> torch.Tensor:
    """[prompt length, vocabulary] float32 logits of the whole prompt."""
    inputs = reference_inputs(folder, messages, images)
    return reference_model(folder)(**inputs, attention_mask=torch.ones_like(inputs["input_ids"])).logits[0]
