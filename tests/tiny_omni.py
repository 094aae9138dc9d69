"""Tiny seeded checkpoints of the omni families, whole: thinker, talker, and what turns codes into sound."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.tiny_models import MERGES, PADDED_VOCAB, build_tokenizer, randomise

OMNI_FAMILIES = ("qwen2_5_omni", "qwen3_omni_moe")
HIDDEN = 64
MEL_BINS = 16
VOICES = ("Ada", "Bob")  # of every tiny omni checkpoint

# "user", "assistant" and "system" are one token each: the talker of Qwen3-Omni finds the turns by them.
OMNI_MERGES = (
    *MERGES,
    *(("as", "s"), ("i", "st"), ("ass", "ist"), ("an", "t"), ("assist", "ant")),
    *(("s", "yst"), ("e", "m"), ("syst", "em")),
)


@dataclass(frozen=True)
class MediaNames:
    """The special tokens of one family: how it marks where media begin, lie and end."""

    vision_start: str
    vision_end: str
    image: str
    video: str
    audio_start: str
    audio_end: str
    audio: str

    @property
    def special_tokens(self) -> tuple[str, ...]:
        plain = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
        vision = (self.vision_start, self.vision_end, self.image, self.video)
        return (*plain, *vision, self.audio_start, self.audio_end, self.audio)

    @property
    def named_tokens(self) -> dict[str, str]:
        """As the family's processor asks its tokenizer for them."""
        return {
            "image_token": self.image,
            "audio_token": self.audio,
            "video_token": self.video,
            "vision_bos_token": self.vision_start,
            "vision_eos_token": self.vision_end,
            "audio_bos_token": self.audio_start,
            "audio_eos_token": self.audio_end,
        }


NAMES = {
    "qwen2_5_omni": MediaNames(
        *("<|vision_bos|>", "<|vision_eos|>", "<|IMAGE|>", "<|VIDEO|>"),
        *("<|audio_bos|>", "<|audio_eos|>", "<|AUDIO|>"),
    ),
    "qwen3_omni_moe": MediaNames(
        *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
        *("<|audio_start|>", "<|audio_end|>", "<|audio_pad|>"),
    ),
}

_TEMPLATE = """\
{%- for message in messages %}
{%- if SYSTEM and loop.first and message.role != 'system' %}
{{- '<|im_start|>system\\nBe good.<|im_end|>\\n' }}
{%- endif %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}
{{- message.content }}
{%- elif message.content %}
{%- for part in message.content %}
{%- if part.type == 'image' or 'image' in part or 'image_url' in part %}
{{- 'VISION_START' + 'IMAGE' + 'VISION_END' }}
{%- elif part.type == 'audio' or 'audio' in part or 'audio_url' in part %}
{{- 'AUDIO_START' + 'AUDIO' + 'AUDIO_END' }}
{%- elif part.type == 'video' or 'video' in part %}
{{- 'VISION_START' + 'VIDEO' + 'VISION_END' }}
{%- elif 'text' in part %}
{{- part.text }}
{%- endif %}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def chat_template(family: str) -> str:
    """Like the published ones, without tools: Qwen2.5-Omni brings a system turn of its own."""
    names = NAMES[family]
    template = _TEMPLATE.replace("SYSTEM", "true" if family == "qwen2_5_omni" else "false")
    for field in ("vision_start", "vision_end", "audio_start", "audio_end", "image", "video", "audio"):
        template = template.replace(f"'{field.upper()}'", f"'{getattr(names, field)}'")
    return template


def build_tiny_omni(
    family: str, directory: Path, seed: int = 0, *, thinker_only: bool = False, **overrides: Any
) -> Path:
    """Writes a complete checkpoint folder (float32) and returns it.

    `overrides` change the thinker's text configuration, or another one when they start with `vision_`,
    `audio_`, `talker_` or (Qwen3-Omni) `code2wav_`. `thinker_only`: the thinker as a checkpoint of its own.
    """
    directory.mkdir(parents=True, exist_ok=True)
    names = NAMES[family]
    tokenizer = build_tokenizer(names.special_tokens, OMNI_MERGES, chat_template(family), names.named_tokens)
    tokenizer.save_pretrained(directory)
    config = _CONFIGS[family](_Ids(tokenizer, names), _Overrides(overrides))
    config.dtype = torch.float32
    model = getattr(transformers, _MODELS[family])(config).to(torch.float32).eval()
    _randomise_all(model, family, seed, len(tokenizer))
    ids = [tokenizer.convert_tokens_to_ids(t) for t in ("<|im_end|>", "<|endoftext|>")]
    saved = model.thinker if thinker_only else model
    saved.generation_config = transformers.GenerationConfig(eos_token_id=ids, pad_token_id=ids[1])
    saved.save_pretrained(directory)
    if family == "qwen2_5_omni":
        torch.save(_speakers(config), directory / "spk_dict.pt")
    _write_preprocessor(directory, family)
    return directory


class _Ids:
    def __init__(self, tokenizer: Any, names: MediaNames) -> None:
        self._tokenizer = tokenizer
        self.names = names

    def __call__(self, token: str) -> int:
        found = self._tokenizer.convert_tokens_to_ids(token)
        assert isinstance(found, int), token
        return found


class _Overrides:
    PREFIXES = ("vision_", "audio_", "talker_", "code2wav_")

    def __init__(self, given: Mapping[str, Any]) -> None:
        self._given = given

    def of(self, prefix: str) -> dict[str, Any]:
        if prefix:
            return {k.removeprefix(prefix): v for k, v in self._given.items() if k.startswith(prefix)}
        return {k: v for k, v in self._given.items() if not k.startswith(self.PREFIXES)}


# Text ids past the tokenizer, as in the published checkpoints: they have embeddings and no text.
TTS_BOS_OF_VOICE = dict(zip(VOICES, (310, 311), strict=True))
TTS_PAD, TTS_BOS, TTS_EOS = 312, 313, 314
CODES_2_5 = 64  # codes of the Qwen2.5 talker; its control tokens lie above
CODEC_PAD, CODEC_BOS, CODEC_EOS, CODEC_MASK = 68, 69, 70, 71
CODES_3 = 48  # codes of every Qwen3 code group
CODEC_VOCAB_3 = CODES_3 + 1024  # the reference suppresses the last 1024 rows, but for the end
CODEC_EOS_3 = CODES_3 + 6
NUM_CODE_GROUPS = 4
SOUND_GAIN = 0.8  # snakes and residuals add up: more would clip


def _text(ids: _Ids, layers: int, sections: dict[str, Any]) -> dict[str, Any]:
    return {
        "vocab_size": PADDED_VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 96,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "bos_token_id": ids("<|endoftext|>"),
        "eos_token_id": ids("<|im_end|>"),
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, **sections},
    }


def _tower(patch_size: int) -> dict[str, Any]:
    common = {"depth": 4, "num_heads": 2, "spatial_merge_size": 2, "temporal_patch_size": 2}
    return common | {
        "hidden_size": 32,
        "intermediate_size": 48,
        "out_hidden_size": HIDDEN,
        "patch_size": patch_size,
    }


def _ears() -> dict[str, Any]:
    return {
        "num_mel_bins": MEL_BINS,
        "encoder_layers": 2,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 48,
        "d_model": 32,
        "max_source_positions": 1500,
        "output_dim": HIDDEN,
    }


def _qwen2_5_config(ids: _Ids, overrides: _Overrides) -> Any:
    names = ids.names
    media = {
        "audio_token_index": ids(names.audio),
        "image_token_index": ids(names.image),
        "video_token_index": ids(names.video),
        "audio_start_token_id": ids(names.audio_start),
        "audio_end_token_id": ids(names.audio_end),
        "vision_start_token_id": ids(names.vision_start),
        "vision_end_token_id": ids(names.vision_end),
        "position_id_per_seconds": 25,
        "seconds_per_chunk": 2,
    }
    sections = {"mrope_section": [2, 3, 3]}
    windows = {"window_size": 56, "fullatt_block_indexes": [1, 3]}
    thinker = media | {
        "text_config": _text(ids, 3, sections) | overrides.of(""),
        "vision_config": _tower(14) | windows | overrides.of("vision_"),
        "audio_config": _ears() | {"n_window": 100} | overrides.of("audio_"),
        "user_token_id": ids("user"),
    }
    talker = (
        _text(ids, 2, sections)
        | media
        | {
            "vocab_size": 80,
            "embedding_size": HIDDEN,
            "hidden_size": 32,
            "head_dim": 16,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "intermediate_size": 48,
            "spatial_merge_size": 2,
            "tts_text_start_token_id": TTS_BOS,
            "tts_text_end_token_id": TTS_EOS,
            "tts_text_pad_token_id": TTS_PAD,
            "tts_codec_start_token_id": CODEC_BOS,
            "tts_codec_end_token_id": CODEC_EOS,
            "tts_codec_pad_token_id": CODEC_PAD,
            "tts_codec_mask_token_id": CODEC_MASK,
            "bos_token_id": None,
            "eos_token_id": None,
        }
        | overrides.of("talker_")
    )
    token2wav = {"dit_config": _dit(), "bigvgan_config": _bigvgan()}
    return transformers.Qwen2_5OmniConfig(
        thinker_config=thinker, talker_config=talker, token2wav_config=token2wav
    )


def _dit() -> dict[str, Any]:
    return {
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "head_dim": 16,
        "emb_dim": 16,
        "block_size": 6,
        "look_ahead_layers": [1],
        "look_backward_layers": [0, 2],
        "num_embeds": CODES_2_5 + 1,
        "mel_dim": 16,
        "enc_emb_dim": 8,
        "enc_dim": 8,
        "enc_channels": [16, 16, 16, 16, 48],
        "enc_attention_channels": 8,
        "enc_se_channels": 8,
    }


def _bigvgan() -> dict[str, Any]:
    return {
        "mel_dim": 16,
        "upsample_initial_channel": 32,
        "resblock_kernel_sizes": [3, 7],
        "resblock_dilation_sizes": [[1, 3, 5], [1, 3, 5]],
        "upsample_rates": [5, 2],
        "upsample_kernel_sizes": [11, 4],
    }


def _speakers(config: Any) -> dict[str, Any]:
    dit = config.token2wav_config.dit_config
    generator = torch.Generator().manual_seed(7)
    return {
        voice: {
            "bos_token": TTS_BOS_OF_VOICE[voice],
            "cond": torch.randn(1, dit.enc_emb_dim, generator=generator),
            "ref_mel": torch.randn(1, 20, dit.mel_dim, generator=generator),
        }
        for voice in VOICES
    }


def _qwen3_config(ids: _Ids, overrides: _Overrides) -> Any:
    names = ids.names
    media = {
        "audio_token_id": ids(names.audio),
        "image_token_id": ids(names.image),
        "video_token_id": ids(names.video),
        "audio_start_token_id": ids(names.audio_start),
        "audio_end_token_id": ids(names.audio_end),
        "vision_start_token_id": ids(names.vision_start),
        "vision_end_token_id": ids(names.vision_end),
        "position_id_per_seconds": 13,
        "seconds_per_chunk": 2,
    }
    sections = {"mrope_section": [2, 3, 3], "mrope_interleaved": True, "interleaved": True}
    experts = {
        "head_dim": 16,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    }
    pyramid = {"num_position_embeddings": 36, "deepstack_visual_indexes": [0, 2]}
    windows = {"n_window": 50, "n_window_infer": 200, "conv_chunksize": 8, "downsample_hidden_size": 8}
    thinker = media | {
        "text_config": _text(ids, 3, sections) | experts | overrides.of(""),
        "vision_config": _tower(16) | pyramid | overrides.of("vision_"),
        "audio_config": _ears() | windows | overrides.of("audio_"),
        "user_token_id": ids("user"),
    }
    return transformers.Qwen3OmniMoeConfig(
        thinker_config=thinker,
        talker_config=_qwen3_talker(ids, media, sections, experts, overrides.of("talker_")),
        code2wav_config=_code2wav() | overrides.of("code2wav_"),
        im_start_token_id=ids("<|im_start|>"),
        im_end_token_id=ids("<|im_end|>"),
        tts_pad_token_id=TTS_PAD,
        tts_bos_token_id=TTS_BOS,
        tts_eos_token_id=TTS_EOS,
        system_token_id=ids("system"),
        user_token_id=ids("user"),
        assistant_token_id=ids("assistant"),
    )


def _qwen3_talker(
    ids: _Ids,
    media: dict[str, Any],
    sections: dict[str, Any],
    experts: dict[str, Any],
    overrides: dict[str, Any],
) -> dict[str, Any]:
    small = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    text = (
        _text(ids, 2, sections)
        | experts
        | small
        | {
            "vocab_size": CODEC_VOCAB_3,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 20,
            "norm_topk_prob": False,
        }
    )
    predictor = (
        _text(ids, 2, {})
        | small
        | {
            "vocab_size": CODES_3,
            "num_code_groups": NUM_CODE_GROUPS,
        }
    )
    control = ("nothink_id", "think_bos_id", "think_eos_id", "pad_id", "bos_id")
    return media | {
        "text_config": text | overrides,
        "code_predictor_config": predictor,
        "num_code_groups": NUM_CODE_GROUPS,
        "thinker_hidden_size": HIDDEN,
        "accept_hidden_layer": 1,
        "spatial_merge_size": 2,
        "codec_eos_token_id": CODEC_EOS_3,
        **{f"codec_{name}": CODES_3 + i for i, name in enumerate(control)},
        "speaker_id": {voice.lower(): CODES_3 + 10 + i for i, voice in enumerate(VOICES)},
    }


def _code2wav() -> dict[str, Any]:
    return {
        "codebook_size": CODES_3,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "num_quantizers": NUM_CODE_GROUPS,
        "sliding_window": 8,
        "max_position_embeddings": 8000,
        "upsample_rates": [4, 3],
        "upsampling_ratios": [2, 2],
        "decoder_dim": 32,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }


_CONFIGS = {"qwen2_5_omni": _qwen2_5_config, "qwen3_omni_moe": _qwen3_config}
_MODELS = {
    "qwen2_5_omni": "Qwen2_5OmniForConditionalGeneration",
    "qwen3_omni_moe": "Qwen3OmniMoeForConditionalGeneration",
}


@torch.no_grad()
def _randomise_all(model: Any, family: str, seed: int, num_live_rows: int) -> None:
    """Rows that stand for no text or no code are zero in the heads, so that greedy decoding stays away."""
    randomise(model.thinker, seed, num_live_rows)
    randomise(model.talker, seed + 1, None)
    if family == "qwen2_5_omni":
        head = model.talker.codec_head.weight
        head[CODES_2_5:CODEC_EOS] = 0
        head[CODEC_EOS + 1 :] = 0
        randomise(model.token2wav, seed + 2, None, SOUND_GAIN)
        model.token2wav.code2wav_bigvgan_model.conv_post.weight.mul_(0.3)
    else:
        head = model.talker.codec_head.weight
        head[CODES_3:CODEC_EOS_3] = 0
        head[CODEC_EOS_3 + 1 :] = 0
        randomise(model.code2wav, seed + 2, None, SOUND_GAIN)
        model.code2wav.decoder[-1].conv.weight.mul_(0.1)


def _write_preprocessor(directory: Path, family: str) -> None:
    patch = 14 if family == "qwen2_5_omni" else 16
    bounds = (2 * 2 * patch) ** 2, (4 * 2 * patch) ** 2
    mean_std = (
        {
            "image_mean": [0.48145466, 0.4578275, 0.40821073],
            "image_std": [0.26862954, 0.26130258, 0.27577711],
        }
        if family == "qwen2_5_omni"
        else {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
    )
    config = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "feature_extractor_type": "WhisperFeatureExtractor",
        "patch_size": patch,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "size": {"shortest_edge": bounds[0], "longest_edge": bounds[1]},
        **mean_std,
        "feature_size": MEL_BINS,
        "sampling_rate": 16000,
        "hop_length": 160,
        "n_fft": 400,
        "chunk_length": 300,
        "n_samples": 4800000,
        "nb_max_frames": 30000,
        "padding_side": "right",
        "padding_value": 0.0,
        "return_attention_mask": True,
        "dither": 0.0,
    }
    (directory / "preprocessor_config.json").write_text(json.dumps(config, indent=2))
    video = {"size": config["size"], **mean_std}  # without it a frame would have 128 tokens or more
    (directory / "video_preprocessor_config.json").write_text(json.dumps(video, indent=2))


@lru_cache(maxsize=4)
def reference_omni(folder: Path) -> Any:
    """The whole model, or the thinker of a thinker-only checkpoint, by `transformers`."""
    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    return getattr(transformers, architecture).from_pretrained(folder, dtype=torch.float32).eval()


def reference_thinker(folder: Path) -> Any:
    model = reference_omni(folder)
    return model.thinker if hasattr(model, "thinker") else model
