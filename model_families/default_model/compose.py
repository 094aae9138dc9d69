"""Composes a Qwen2.5-VL checkpoint from a Llama decoder and a vision tower: the trained one, or a drawn
one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
)

SAMPLING = {"do_sample": True, "temperature": 0.2, "top_p": 0.9}  # as SmolLM2's card has it: at 1 it babbles
VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
ROW_MULTIPLE = 64
SEED = 20250101
MAX_LOGIT_DIFFERENCE = 1e-4
PATCH_SIZE, TEMPORAL_PATCH_SIZE = 14, 2
IMAGE_MEAN = (0.48145466, 0.4578275, 0.40821073)
IMAGE_STD = (0.26862954, 0.26130258, 0.27577711)
PREPROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": PATCH_SIZE,
    "temporal_patch_size": TEMPORAL_PATCH_SIZE,
    "merge_size": 2,
    "min_pixels": 56 * 56,
    "max_pixels": 448 * 448,  # at most 256 tokens an image
    "image_mean": IMAGE_MEAN,
    "image_std": IMAGE_STD,
}
# The trained tower: every layer attends to the whole picture, of 64 to 100 tokens.
TRAINED_PIXELS = {"min_pixels": 224 * 224, "max_pixels": 280 * 280}
TRAINED_DEPTH = 8
TRAINED_TOWER: dict[str, int | list[int]] = {
    "depth": TRAINED_DEPTH,
    "hidden_size": 320,
    "intermediate_size": 832,
    "num_heads": 5,
    "fullatt_block_indexes": list(range(TRAINED_DEPTH)),
}
DRAWN_TOWER: dict[str, int | list[int]] = {
    "depth": 4,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_heads": 3,
    "fullatt_block_indexes": [1, 3],
}
_HERE = Path(__file__).parent


def compose(
    llama: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    directory: Path,
    tower: Mapping[str, Tensor] | None = None,
) -> None:
    """Writes the checkpoint folder (bfloat16). `llama` is in float32; the tokenizer gets the vision tokens.
    Without the trained `tower` (names from `visual.` on) a random one is drawn, which sees nothing.

    A Qwen2.5-VL decoder with zero q/k/v biases computes what a Llama decoder does: text has the same position
    on its three axes. The text logits are compared before anything is written.
    """
    tokenizer.add_special_tokens({"extra_special_tokens": list(VISION_TOKENS)})
    tokenizer.chat_template = (_HERE / "chat_template.jinja").read_text()
    shape = DRAWN_TOWER if tower is None else TRAINED_TOWER
    model = Qwen2_5_VLForConditionalGeneration(_config(llama.config, tokenizer, shape)).float().eval()
    _copy_decoder(llama, model)
    if tower is None:
        _draw_tower(model)
    else:
        model.model.load_state_dict({**model.model.state_dict(), **tower})
    check_text_logits(llama, model)
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    model.generation_config = GenerationConfig(**ids, pad_token_id=tokenizer.pad_token_id, **SAMPLING)
    tokenizer.save_pretrained(directory)
    model.to(torch.bfloat16).save_pretrained(directory)
    preprocessor = PREPROCESSOR if tower is None else PREPROCESSOR | TRAINED_PIXELS
    (directory / "preprocessor_config.json").write_text(json.dumps(preprocessor, indent=2) + "\n")


def _config(
    llama: LlamaConfig, tokenizer: PreTrainedTokenizerBase, tower: Mapping[str, int | list[int]]
) -> Qwen2_5_VLConfig:
    head_dim = llama.hidden_size // llama.num_attention_heads
    assert head_dim == llama.head_dim, "Qwen2.5-VL has no head size of its own"
    quarter = head_dim // 8  # a quarter of the rotated half for time, the rest for rows and columns
    text = {
        "vocab_size": -(-len(tokenizer) // ROW_MULTIPLE) * ROW_MULTIPLE,
        "hidden_size": llama.hidden_size,
        "intermediate_size": llama.intermediate_size,
        "num_hidden_layers": llama.num_hidden_layers,
        "num_attention_heads": llama.num_attention_heads,
        "num_key_value_heads": llama.num_key_value_heads,
        "hidden_act": llama.hidden_act,
        "max_position_embeddings": llama.max_position_embeddings,
        "rms_norm_eps": llama.rms_norm_eps,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": llama.rope_parameters["rope_theta"],
            "mrope_section": [quarter, (head_dim // 2 - quarter) // 2, (head_dim // 2 - quarter) // 2],
        },
    }
    vision = {
        **tower,
        "patch_size": PATCH_SIZE,
        "temporal_patch_size": TEMPORAL_PATCH_SIZE,
        "window_size": 112,
        "out_hidden_size": llama.hidden_size,
    }
    names = dict(zip(("vision_start", "vision_end", "image", "video"), VISION_TOKENS, strict=True))
    token_ids = {f"{k}_token_id": tokenizer.convert_tokens_to_ids(v) for k, v in names.items()}
    return Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True, **token_ids)


@torch.no_grad()
def _copy_decoder(llama: LlamaForCausalLM, model: Qwen2_5_VLForConditionalGeneration) -> None:
    weights = dict(llama.model.state_dict())
    words = weights.pop("embed_tokens.weight")
    decoder = model.model.language_model
    missing, unexpected = decoder.load_state_dict(weights, strict=False)
    biases = [name for name in missing if name.endswith(("q_proj.bias", "k_proj.bias", "v_proj.bias"))]
    assert not unexpected, unexpected
    assert set(missing) - set(biases) == {"embed_tokens.weight"}, missing
    for name in biases:
        decoder.get_parameter(name).zero_()
    rows = decoder.embed_tokens.weight
    rows[: len(words)] = words
    rows[len(words) :] = words.mean(0)  # new tokens and padding: as likely as the average word, so never said


@torch.no_grad()
def _draw_tower(model: Qwen2_5_VLForConditionalGeneration) -> None:
    """Random weights that keep the scale from layer to layer, and embeddings that lie among the words.

    Words share a large mean: an image is drawn around it, as far from it as words are. Around zero, the
    language model would take an image for nothing and end its answer at once.
    """
    tower: nn.Module = model.model.visual
    generator = torch.Generator().manual_seed(SEED)
    for name, parameter in sorted(tower.named_parameters()):
        if parameter.ndim > 1:
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise / parameter[0].numel() ** 0.5)
        else:
            parameter.fill_(1.0 if name.endswith("weight") else 0.0)  # norms and biases
    grid = torch.tensor([[1, 16, 16]])
    noise = torch.randn(256, 3 * TEMPORAL_PATCH_SIZE * PATCH_SIZE**2, generator=generator)
    drawn: Tensor = tower(noise, grid_thw=grid).pooler_output
    words = model.model.language_model.embed_tokens.weight
    mean = words.mean(0)
    tower.get_parameter("merger.mlp.2.weight").mul_((words - mean).std() / drawn.std())
    tower.get_parameter("merger.mlp.2.bias").copy_(mean)


@torch.no_grad()
def check_text_logits(llama: LlamaForCausalLM, model: Qwen2_5_VLForConditionalGeneration) -> None:
    generator = torch.Generator().manual_seed(SEED)
    vocabulary = llama.config.vocab_size
    token_ids = torch.randint(vocabulary, (1, 48), generator=generator)
    difference = (llama(token_ids).logits - model(token_ids).logits[..., :vocabulary]).abs().max().item()
    assert difference <= MAX_LOGIT_DIFFERENCE, f"text logits differ by {difference}"
