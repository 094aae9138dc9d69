"""Tiny seeded Qwen3-ASR checkpoints, and `transformers` as the oracle over them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from model_families.qwen3_asr.transcription import TEXT_MARK
from tests.tiny_models import PADDED_VOCAB, build_tokenizer, randomise
from tests.tiny_omni import NAMES, OMNI_MERGES, chat_template

RATE = 16_000
NUM_MELS = 16


def build_tiny_qwen3_asr(directory: Path, seed: int = 0) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    names = NAMES["qwen3_omni_moe"]
    tokenizer = build_tokenizer(
        (*names.special_tokens, TEXT_MARK), OMNI_MERGES, chat_template("qwen3_omni_moe"), names.named_tokens
    )
    tokenizer.save_pretrained(directory)
    end, pad = (tokenizer.convert_tokens_to_ids(t) for t in ("<|im_end|>", "<|endoftext|>"))
    config = transformers.Qwen3ASRConfig(
        audio_config={
            **{"num_mel_bins": NUM_MELS, "encoder_layers": 2, "encoder_attention_heads": 2},
            **{"encoder_ffn_dim": 48, "d_model": 32, "output_dim": 64, "n_window_infer": 200},
            **{"downsample_hidden_size": 8},
        },
        text_config={
            **{"model_type": "qwen3", "vocab_size": PADDED_VOCAB, "hidden_size": 64, "head_dim": 16},
            **{"intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4},
            **{"num_key_value_heads": 2, "max_position_embeddings": 4096, "tie_word_embeddings": True},
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        },
        audio_token_id=tokenizer.convert_tokens_to_ids(names.audio),
        pad_token_id=pad,
        eos_token_id=[end, pad],
    )
    config.dtype = torch.float32
    model = transformers.Qwen3ASRForConditionalGeneration(config).to(torch.float32).eval()
    randomise(model, seed, num_live_rows=len(tokenizer))
    model.generation_config = transformers.GenerationConfig(eos_token_id=[end, pad], pad_token_id=pad)
    model.save_pretrained(directory)
    transformers.Qwen3ASRFeatureExtractor(feature_size=NUM_MELS).save_pretrained(directory)
    return directory


@torch.no_grad()
def reference_answer(folder: Path, samples: np.ndarray, prefix: str, max_new_tokens: int) -> list[int]:
    """Greedy float32 tokens; `prefix`: how the answer is begun for the model."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model: Any = transformers.Qwen3ASRForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    extractor = transformers.Qwen3ASRFeatureExtractor.from_pretrained(folder)
    features = extractor(
        samples, sampling_rate=RATE, padding="longest", return_tensors="pt", return_attention_mask=True
    )
    mask = features["attention_mask"].long()
    num_tokens = int(_num_rows(int(mask.sum())))
    audio = NAMES["qwen3_omni_moe"].audio
    messages = [{"role": "user", "content": [{"type": "audio"}]}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False) + prefix
    ids = tokenizer(text.replace(audio, audio * num_tokens), return_tensors="pt").input_ids
    out = model.eval().generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        input_features=features["input_features"],
        input_features_mask=mask,
        max_new_tokens=max_new_tokens,
        do_sample=False,
    )
    return out[0, ids.shape[1] :].tolist()


def _num_rows(num_frames: int) -> int:
    whole, rest = divmod(num_frames, 100)
    for _ in range(3):
        rest = (rest - 1) // 2 + 1
    return whole * 13 + rest
