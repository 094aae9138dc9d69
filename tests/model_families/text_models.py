"""Tiny seeded text models, made through transformers' own classes and saved as checkpoints."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

import model_families.llama.decoder
import model_families.llama.weights
import model_families.qwen2.decoder
import model_families.qwen2.weights
import model_families.qwen2_5_vl.decoder
import model_families.qwen2_5_vl.weights
import model_families.qwen2_vl.decoder
import model_families.qwen2_vl.weights
import model_families.qwen3.decoder
import model_families.qwen3.weights
import model_families.qwen3_vl.decoder
import model_families.qwen3_vl.weights
import model_families.qwen3_vl_moe.decoder
import model_families.qwen3_vl_moe.weights
from lm_engine.decoder import Decoder
from lm_engine.model import DecoderConfig, Kernels
from model_families.checkpoint import Checkpoint, read_config
from model_families.decoder_weights import load_decoder
from model_families.text_config import CheckpointConfig

TEXT = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "bos_token_id": None,
    "eos_token_id": None,
}
MROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
INTERLEAVED = {**MROPE, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
SMALL_VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
VISION = {
    "qwen2_vl": {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2},
    "qwen2_5_vl": {**SMALL_VISION, "fullatt_block_indexes": [0]},
    "qwen3_vl": {**SMALL_VISION, "deepstack_visual_indexes": [0, 0], "num_position_embeddings": 16},
    "qwen3_vl_moe": {**SMALL_VISION, "deepstack_visual_indexes": [0, 0], "num_position_embeddings": 16},
}
CLASSES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    "qwen2_vl": (transformers.Qwen2VLConfig, transformers.Qwen2VLForConditionalGeneration),
    "qwen2_5_vl": (transformers.Qwen2_5_VLConfig, transformers.Qwen2_5_VLForConditionalGeneration),
    "qwen3_vl": (transformers.Qwen3VLConfig, transformers.Qwen3VLForConditionalGeneration),
    "qwen3_vl_moe": (transformers.Qwen3VLMoeConfig, transformers.Qwen3VLMoeForConditionalGeneration),
}
FAMILIES = tuple(CLASSES)
QWEN3_VL = ("qwen3_vl", "qwen3_vl_moe")
# The second of three layers is dense.
EXPERTS = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "mlp_only_layers": [1],
    "tie_word_embeddings": False,
}
VL_FAMILIES = tuple(VISION)


@dataclass
class Tiny:
    """The reference model and its saved folder."""

    family: str
    reference: torch.nn.Module
    folder: Path

    @property
    def text_model(self) -> torch.nn.Module:
        return self.reference.model.language_model if self.family in VISION else self.reference.model

    def reference_logits(self, inputs_embeds_TH: torch.Tensor, positions_AT: torch.Tensor, **more):
        positions = positions_AT[:, None] if len(positions_AT) == 3 else positions_AT
        with torch.inference_mode():
            hidden = self.text_model(
                inputs_embeds=inputs_embeds_TH[None], position_ids=positions, use_cache=False, **more
            ).last_hidden_state
            return self.reference.lm_head(hidden)[0]

    def embed(self, token_ids: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return self.text_model.embed_tokens(torch.tensor(token_ids))


def make_tiny(family: str, folder: Path, seed: int = 0, **text) -> Tiny:
    config_class, model_class = CLASSES[family]
    settings = {**TEXT, **text}
    tie = settings.pop("tie_word_embeddings", False)
    if family == "qwen3_vl_moe":
        settings = {**EXPERTS, **settings}
    if family in ("qwen3", *QWEN3_VL):
        settings.setdefault("head_dim", 16)
    if family in VISION:
        settings.setdefault("rope_parameters", dict(INTERLEAVED if family in QWEN3_VL else MROPE))
        config = config_class(text_config=settings, vision_config=VISION[family], tie_word_embeddings=tie)
    else:
        config = config_class(**settings, tie_word_embeddings=tie)
    torch.manual_seed(seed)
    reference = model_class._from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            # Wide enough that logits differ by units, biases and norms away from their neutral start.
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.3 if parameter.dim() == 1 else 0.15)
    reference.save_pretrained(folder)
    return Tiny(family, reference, folder)


def config_of(family: str, folder: Path) -> DecoderConfig:
    module = getattr(model_families, family).decoder
    kind = module.Qwen3VLConfig if family in QWEN3_VL else CheckpointConfig
    return module.decoder_config(read_config(folder, kind))


def load_tiny(
    family: str, folder: Path, dtype: torch.dtype = torch.float32, kernels: Kernels = "reference"
) -> Decoder:
    text_name = getattr(model_families, family).weights.text_name
    with Checkpoint(folder) as checkpoint:
        return load_decoder(
            checkpoint,
            config_of(family, folder),
            text_name,
            device=torch.device("cpu"),
            dtype=dtype,
            kernels=kernels,
        )


def edit_config(folder: Path, change) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))
