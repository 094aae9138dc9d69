"""Tiny seeded Whisper checkpoints, whose window is one second, and `transformers` as the oracle over them."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.tiny_models import MERGES, randomise

WINDOW_POSITIONS = 50
WINDOW_FRAMES = 2 * WINDOW_POSITIONS
MAX_TOKENS = 24
LANGUAGES = ("en", "de", "fr")
NUM_MELS = 80


def build_tiny_whisper(directory: Path, seed: int = 0, *, multilingual: bool = True) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer(multilingual)
    tokenizer.save_pretrained(directory)
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in _specials(multilingual)}
    config = transformers.WhisperConfig(
        vocab_size=len(tokenizer),
        num_mel_bins=NUM_MELS,
        d_model=32,
        encoder_layers=2,
        encoder_attention_heads=2,
        encoder_ffn_dim=48,
        decoder_layers=2,
        decoder_attention_heads=2,
        decoder_ffn_dim=48,
        max_source_positions=WINDOW_POSITIONS,
        max_target_positions=MAX_TOKENS,
        bos_token_id=ids["<|endoftext|>"],
        eos_token_id=ids["<|endoftext|>"],
        pad_token_id=ids["<|endoftext|>"],
        decoder_start_token_id=ids["<|startoftranscript|>"],
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    model = transformers.WhisperForConditionalGeneration(config).to(torch.float32).eval()
    randomise(model, seed, num_live_rows=len(tokenizer))
    with torch.no_grad():  # so that answers depend on the sound and end within the bound
        model.model.encoder.layer_norm.weight.mul_(3)
        model.proj_out.weight[ids["<|endoftext|>"]] *= 1.5
    model.generation_config = _generation(ids, multilingual)
    model.save_pretrained(directory)
    transformers.WhisperFeatureExtractor(feature_size=NUM_MELS, chunk_length=1).save_pretrained(directory)
    return directory


def _specials(multilingual: bool) -> list[str]:
    times = [f"<|{i * 0.02:.2f}|>" for i in range(WINDOW_POSITIONS + 1)]
    languages = [f"<|{code}|>" for code in LANGUAGES] if multilingual else []
    return [
        *("<|endoftext|>", "<|startoftranscript|>", *languages, "<|translate|>", "<|transcribe|>"),
        *("<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>", *times),
    ]


def _tokenizer(multilingual: bool) -> PreTrainedTokenizerFast:
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in MERGES)]
    core = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, list(MERGES)))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(s, normalized=False, special=True) for s in _specials(multilingual)])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|endoftext|>", clean_up_tokenization_spaces=False
    )


def _generation(ids: dict[str, int], multilingual: bool) -> transformers.GenerationConfig:
    many: dict[str, Any] = {}
    if multilingual:
        many["lang_to_id"] = {f"<|{code}|>": ids[f"<|{code}|>"] for code in LANGUAGES}
        many["task_to_id"] = {task: ids[f"<|{task}|>"] for task in ("transcribe", "translate")}
    return transformers.GenerationConfig(
        eos_token_id=ids["<|endoftext|>"],
        bos_token_id=ids["<|endoftext|>"],
        pad_token_id=ids["<|endoftext|>"],
        decoder_start_token_id=ids["<|startoftranscript|>"],
        no_timestamps_token_id=ids["<|notimestamps|>"],
        prev_sot_token_id=ids["<|startofprev|>"],
        suppress_tokens=[5, 17, 40, ids["<|startoflm|>"], ids["<|startofprev|>"], ids["<|nospeech|>"]],
        begin_suppress_tokens=[32, ids["<|endoftext|>"]],
        max_initial_timestamp_index=10,
        max_length=MAX_TOKENS,
        is_multilingual=multilingual,
        return_timestamps=False,
        **many,
    )


@lru_cache(maxsize=4)
def reference_whisper(folder: Path) -> Any:
    return transformers.WhisperForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def reference_transcription(folder: Path, features: torch.Tensor, **options: Any) -> Any:
    """Greedy float32 by `transformers` over [mels, frames]: the tokens, or with timestamps the segments."""
    out = reference_whisper(folder).generate(
        features[None], do_sample=False, return_segments=bool(options.get("return_timestamps")), **options
    )
    return out["segments"][0] if options.get("return_timestamps") else out[0].tolist()
