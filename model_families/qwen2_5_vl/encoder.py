"""Qwen2.5-VL's vision tower: attention inside windows, and inside whole frames in a few layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from contracts.specs import MediaSpecs
from encoder_pool.model import EncoderModel
from model_families.checkpoint import read_config
from model_families.fields import Count, Positive, check_multiple
from model_families.qwen2_5_vl.vision_weights import vision_name
from model_families.vision.attention import PackedAttention, select_attention
from model_families.vision.config import VisionConfig, require_activation
from model_families.vision.encoder import VisionTower
from model_families.vision.layers import NORM_EPS, Block, GatedMlp, Merger, PackedSelfAttention
from model_families.vision.layouts import Layout
from model_families.vision.loading import load_vision_encoder
from model_families.vision.packing import Grid, Segments, pack_grids, window_order
from model_families.vision.rotary import axial_rotation
from model_families.vision.weights import VisionName


class Qwen25VLVisionConfig(VisionConfig, frozen=True, kw_only=True):
    depth: Count = 32
    num_heads: Count = 16
    hidden_act: str = "silu"
    hidden_size: Count = 3584
    intermediate_size: Count = 3420
    out_hidden_size: Count = 3584
    window_size: Count = 112  # pixels
    tokens_per_second: Positive = 4  # temporal positions of a second of video
    fullatt_block_indexes: tuple[int, ...] = (7, 15, 23, 31)

    def __post_init__(self) -> None:
        check_multiple("hidden_size", self.hidden_size, "num_heads", self.num_heads)

    @property
    def window_units(self) -> int:
        return self.window_size // self.spatial_merge_size // self.patch_size


class Qwen25VLConfig(msgspec.Struct, frozen=True):
    vision_config: Qwen25VLVisionConfig = Qwen25VLVisionConfig()


@dataclass(frozen=True)
class WindowedLayout(Layout):
    """Its rotation is in the order of windows. N patches, U merge blocks."""

    windows: Segments
    order_N: Tensor  # the patches, window by window
    place_U: Tensor  # where each merge block went


class Qwen25VLTower(VisionTower[WindowedLayout]):
    def __init__(self, config: Qwen25VLVisionConfig, attention: PackedAttention) -> None:
        super().__init__()
        require_activation(config, "silu")
        self.config = config
        self.embedding_width = config.out_hidden_size
        width = config.hidden_size
        self.patch_embed = nn.Linear(config.patch_width, width, bias=False)
        self.blocks = nn.ModuleList(
            Block(
                nn.RMSNorm(width, eps=NORM_EPS),
                PackedSelfAttention(width, config.num_heads, attention),
                nn.RMSNorm(width, eps=NORM_EPS),
                GatedMlp(width, config.intermediate_size, functional.silu),
            )
            for _ in range(config.depth)
        )
        norm = nn.RMSNorm(width, eps=NORM_EPS)
        self.merger = Merger(norm, width, config.spatial_merge_size, config.out_hidden_size, norm_block=False)

    def embed(self, patches_NW: Tensor, layout: WindowedLayout) -> Tensor:
        x = self.patch_embed(patches_NW[layout.order_N])
        for index, block in enumerate(self.blocks):
            whole = index in self.config.fullatt_block_indexes
            x = block(x, layout.rotation, layout.frames if whole else layout.windows)
        windowed: Tensor = self.merger(x)
        return windowed[layout.place_U]

    def _lay_out(self, grids: Sequence[Grid], device: torch.device) -> WindowedLayout:
        config = self.config
        merge_unit = config.spatial_merge_size**2
        grid = pack_grids(grids, config.spatial_merge_size)
        order_U, window_lengths = window_order(grid, config.window_units)
        order_N = torch.from_numpy((order_U[:, None] * merge_unit + np.arange(merge_unit)).reshape(-1)).to(
            device
        )
        rotation = axial_rotation(grid, config.hidden_size // config.num_heads, config.rope_theta, device)
        return WindowedLayout(
            # Whole merge blocks move, so frames stay contiguous and their segments the same.
            frames=Segments(grid.frame_lengths_F, device),
            rotation=rotation.reorder(order_N),
            windows=Segments(window_lengths, device),
            order_N=order_N,
            place_U=torch.from_numpy(np.argsort(order_U)).to(device),
        )


def load_encoder(folder: Path, specs: MediaSpecs, device: torch.device, dtype: torch.dtype) -> EncoderModel:
    config = read_config(folder, Qwen25VLConfig).vision_config
    return build_encoder("qwen2_5_vl", folder, config, specs, vision_name, device, dtype)


def build_encoder(
    family: str,
    folder: Path,
    config: Qwen25VLVisionConfig,
    specs: MediaSpecs,
    name_of: VisionName,
    device: torch.device,
    dtype: torch.dtype,
) -> EncoderModel:
    attention = select_attention(device, dtype, config.hidden_size // config.num_heads)
    with torch.device("meta"):
        tower = Qwen25VLTower(config, attention)
    return load_vision_encoder(family, folder, tower, config, specs, name_of, device, dtype)
