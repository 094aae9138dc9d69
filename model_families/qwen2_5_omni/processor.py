"""Qwen2.5-Omni: what it sees and hears, in tokens and TMRoPE positions; sound between frames by chunks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from contracts.media import Modality
from contracts.specs import MediaSpecs
from model_families.audio.audio_spec import qwen2_5_omni_spec, read_feature_config
from model_families.omni.config import read_thinker_config
from model_families.omni.layout import OmniLayout, interleave_by_chunks
from model_families.omni.positions import OmniPositions
from model_families.omni.processor import OmniConfig, OmniProcessor
from model_families.processing import Processor
from model_families.qwen2_5_vl.encoder import Qwen25VLConfig
from model_families.vision.image_spec import read_image_spec
from model_families.vision.video_spec import read_video_spec

POSITIONS_PER_S = 25.0
SECONDS_PER_CHUNK = 2.0
PLACEHOLDERS: Mapping[Modality, str] = {
    "image": "<|vision_bos|><|IMAGE|><|vision_eos|>",
    "video": "<|vision_bos|><|VIDEO|><|vision_eos|>",
    "audio": "<|audio_bos|><|AUDIO|><|audio_eos|>",
}


def open_processor(folder: Path) -> Processor:
    config = read_thinker_config(folder, OmniConfig)
    image = read_image_spec(folder, read_thinker_config(folder, Qwen25VLConfig).vision_config)
    specs = MediaSpecs(
        image=image,
        audio=qwen2_5_omni_spec(read_feature_config(folder)),
        video=read_video_spec(folder, image, "qwen2_vl", own_bounds=True),
    )
    rate = config.position_id_per_seconds or POSITIONS_PER_S
    chunk = int(rate * (config.seconds_per_chunk or SECONDS_PER_CHUNK))
    return OmniProcessor(
        specs,
        OmniLayout(config.tokens(), image.merge_size, rate, interleave_by_chunks(chunk)),
        OmniPositions(image.merge_size, rate, whole_times=True, paired_markers=True),
    )
