"""Writes a small omni checkpoint of random weights that speaks without end at the published rate of frames.

python -m tests.small_speaker qwen3_omni_moe /tmp/speaker
"""

from __future__ import annotations

import argparse
from pathlib import Path

from safetensors.torch import load_file, save_file

from tests.tiny_omni import CODEC_EOS, CODEC_EOS_3, CODEC_PAD, build_tiny_omni

# 1,920 samples of 24 kHz a frame, as the published code2wav; the other family's rate is its mels'.
SHAPES: dict[str, dict[str, object]] = {
    "qwen3_omni_moe": {"code2wav_upsample_rates": [8, 5, 4, 3], "code2wav_decoder_dim": 64},
    "qwen2_5_omni": {},
}
ENDS = {"qwen3_omni_moe": (CODEC_EOS_3,), "qwen2_5_omni": (CODEC_EOS, CODEC_PAD)}
CONTRAST = 6.0  # of the talker's logits: a logit of 0 then is next to never drawn


def write_speaker(family: str, folder: Path) -> Path:
    build_tiny_omni(family, folder, **SHAPES[family])
    path = folder / "model.safetensors"
    tensors = load_file(path)
    head = tensors["talker.codec_head.weight"] * CONTRAST
    head[list(ENDS[family])] = 0
    tensors["talker.codec_head.weight"] = head
    save_file(tensors, path, {"format": "pt"})
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("family", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    print(write_speaker(given.family, given.folder))


if __name__ == "__main__":
    main()
