"""Qwen2-VL's vision tower: full attention inside each frame."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
from torch import Tensor, nn

from contracts.specs import MediaSpecs
from encoder_pool.model import EncoderModel
from model_families.checkpoint import read_config
from model_families.fields import Count, Positive, check_multiple
from model_families.qwen2_vl.vision_weights import vision_name
from model_families.vision.attention import PackedAttention, select_attention
from model_families.vision.config import VisionConfig, require_activation
from model_families.vision.encoder import VisionTower
from model_families.vision.layers import NORM_EPS, Block, Merger, Mlp, PackedSelfAttention, quick_gelu
from model_families.vision.layouts import Layout
from model_families.vision.loading import load_vision_encoder
from model_families.vision.packing import Grid, Segments, pack_grids
from model_families.vision.rotary import axial_rotation


class Qwen2VLVisionConfig(VisionConfig, frozen=True, kw_only=True):
    depth: Count = 32
    num_heads: Count = 16
    hidden_act: str = "quick_gelu"
    embed_dim: Count = 1280
    hidden_size: Count = 3584  # of the language model
    mlp_ratio: Positive = 4

    def __post_init__(self) -> None:
        check_multiple("embed_dim", self.embed_dim, "num_heads", self.num_heads)


class Qwen2VLConfig(msgspec.Struct, frozen=True):
    vision_config: Qwen2VLVisionConfig = Qwen2VLVisionConfig()


class Qwen2VLTower(VisionTower[Layout]):
    def __init__(self, config: Qwen2VLVisionConfig, attention: PackedAttention) -> None:
        super().__init__()
        require_activation(config, "quick_gelu")
        self.config = config
        self.embedding_width = config.hidden_size
        width = config.embed_dim
        self.patch_embed = nn.Linear(config.patch_width, width, bias=False)
        self.blocks = nn.ModuleList(
            Block(
                nn.LayerNorm(width, eps=NORM_EPS),
                PackedSelfAttention(width, config.num_heads, attention),
                nn.LayerNorm(width, eps=NORM_EPS),
                Mlp(width, int(width * config.mlp_ratio), quick_gelu),
            )
            for _ in range(config.depth)
        )
        norm = nn.LayerNorm(width, eps=NORM_EPS)
        self.merger = Merger(norm, width, config.spatial_merge_size, config.hidden_size, norm_block=False)

    def embed(self, patches_NW: Tensor, layout: Layout) -> Tensor:
        x = self.patch_embed(patches_NW)
        for block in self.blocks:
            x = block(x, layout.rotation, layout.frames)
        tokens: Tensor = self.merger(x)
        return tokens

    def _lay_out(self, grids: Sequence[Grid], device: torch.device) -> Layout:
        config = self.config
        grid = pack_grids(grids, config.spatial_merge_size)
        head_dim = config.embed_dim // config.num_heads
        rotation = axial_rotation(grid, head_dim, config.rope_theta, device)
        return Layout(Segments(grid.frame_lengths_F, device), rotation)


def load_encoder(folder: Path, specs: MediaSpecs, device: torch.device, dtype: torch.dtype) -> EncoderModel:
    config = read_config(folder, Qwen2VLConfig).vision_config
    attention = select_attention(device, dtype, config.embed_dim // config.num_heads)
    with torch.device("meta"):
        tower = Qwen2VLTower(config, attention)
    return load_vision_encoder("qwen2_vl", folder, tower, config, specs, vision_name, device, dtype)
