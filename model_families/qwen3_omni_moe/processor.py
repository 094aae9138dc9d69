"""Qwen3-Omni-MoE: what it sees and hears, in tokens and TMRoPE positions; sound between frames by time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from contracts.media import Modality
from contracts.specs import MediaSpecs
from model_families.audio.audio_spec import qwen3_omni_spec, read_feature_config
from model_families.omni.config import read_thinker_config
from model_families.omni.layout import OmniLayout, interleave_by_time
from model_families.omni.positions import OmniPositions
from model_families.omni.processor import OmniConfig, OmniProcessor
from model_families.processing import Processor
from model_families.qwen3_omni_moe.audio_encoder import Qwen3OmniEars
from model_families.qwen3_vl.encoder import Qwen3VLConfig
from model_families.vision.image_spec import read_image_spec
from model_families.vision.video_spec import read_video_spec

POSITIONS_PER_S = 13.0
PLACEHOLDERS: Mapping[Modality, str] = {
    "image": "<|vision_start|><|image_pad|><|vision_end|>",
    "video": "<|vision_start|><|video_pad|><|vision_end|>",
    "audio": "<|audio_start|><|audio_pad|><|audio_end|>",
}


def open_processor(folder: Path) -> Processor:
    config = read_thinker_config(folder, OmniConfig)
    image = read_image_spec(folder, read_thinker_config(folder, Qwen3VLConfig).vision_config)
    ears = read_thinker_config(folder, Qwen3OmniEars).audio_config
    specs = MediaSpecs(
        image=image,
        audio=qwen3_omni_spec(read_feature_config(folder), ears.n_window),
        video=read_video_spec(folder, image, "qwen2_vl", own_bounds=True),
    )
    rate = config.position_id_per_seconds or POSITIONS_PER_S
    return OmniProcessor(
        specs,
        OmniLayout(config.tokens(), image.merge_size, rate, interleave_by_time),
        OmniPositions(image.merge_size, rate, whole_times=False, paired_markers=False),
    )
