"""Writes a checkpoint folder of a large model's shape without its weights, to measure speed with.

python -m benchmarks.components.shape_folder qwen2_5_vl_3b /tmp/qwen2_5_vl_3b

Its tokenizer makes one token of every ASCII character; the weights are noise
(`model_families.dummy_weights`).
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from model_families.dummy_weights import write_table

SHAPES = Path(__file__).resolve().parent.parent / "shapes"
FIRST_SPECIAL = 151643
SPECIALS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>"),
    *("<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>"),
    *("<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
)
OMNI_SPECIALS = {
    151669: "<|audio_start|>",
    151670: "<|audio_end|>",
    151671: "<tts_pad>",
    151672: "<tts_text_bos>",
}
ROLES = {872: "user", 77091: "assistant"}  # the talker looks for them
OMNI_SPECIALS |= {151673: "<tts_text_eod>", 151674: "<tts_text_bos_single>", 151675: "<|audio_pad|>"}
TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}{{- message.content }}{%- else %}
{%- for part in message.content %}
{%- if part.type == 'image' %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- elif part.type == 'video' %}{{- '<|vision_start|><|video_pad|><|vision_end|>' }}
{%- elif part.type == 'audio' %}{{- '<|audio_start|><|audio_pad|><|audio_end|>' }}
{%- else %}{{- part.text }}{%- endif %}
{%- endfor %}{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


def write_shape_folder(shape: str, folder: Path) -> Path:
    """Raises FileNotFoundError for an unknown shape."""
    source = SHAPES / f"{shape}.json"
    config = json.loads(source.read_text())
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(source, folder / "config.json")
    _tokenizer(omni="thinker_config" in config).save_pretrained(folder)
    end = {"eos_token_id": [FIRST_SPECIAL + 2, FIRST_SPECIAL], "pad_token_id": FIRST_SPECIAL}
    (folder / "generation_config.json").write_text(json.dumps(end))
    vision = config.get("thinker_config", config)["vision_config"]
    merged = vision["patch_size"] * vision["spatial_merge_size"]
    preprocessor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": vision["patch_size"],
        "temporal_patch_size": vision["temporal_patch_size"],
        "merge_size": vision["spatial_merge_size"],
        "min_pixels": 4 * merged**2,
        "max_pixels": 16384 * merged**2,
        "feature_size": 128,
        "sampling_rate": 16000,
        "hop_length": 160,
        "n_fft": 400,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    write_table(folder)
    return folder


def _tokenizer(*, omni: bool) -> PreTrainedTokenizerFast:
    """Byte-level without merges; ids past the bytes are characters that nobody types."""
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    visible = _byte_characters()
    for index in range(len(tokens), FIRST_SPECIAL):
        tokens.append("".join(visible[b] for b in chr(0x10000 + index).encode()))
    if omni:
        for index, role in ROLES.items():
            tokens[index] = role
    core = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    core.decoder = decoders.ByteLevel()
    names = list(SPECIALS)
    if omni:
        filler = (f"<|unused_{i}|>" for i in range(FIRST_SPECIAL + len(SPECIALS), min(OMNI_SPECIALS)))
        names += [*filler, *(OMNI_SPECIALS[i] for i in sorted(OMNI_SPECIALS))]
    if omni:
        core.add_tokens([AddedToken(role, normalized=False) for role in ROLES.values()])
    core.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in names])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=TEMPLATE
    )


def _byte_characters() -> list[str]:
    """The visible character that byte-level tokenizers write for each byte."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = iter(range(0x100, 0x200))
    return [chr(b) if b in plain else chr(next(moved)) for b in range(256)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", help="name of a file in benchmarks/shapes")
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    print(write_shape_folder(given.shape, given.folder))


if __name__ == "__main__":
    main()
