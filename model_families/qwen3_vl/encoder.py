"""Qwen3-VL's vision tower: a learned position table, full attention inside frames, deepstack features."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isqrt
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from contracts.specs import MediaSpecs
from encoder_pool.model import EncoderModel
from model_families.checkpoint import checkpoint_error, read_config
from model_families.fields import Count, check_multiple
from model_families.qwen3_vl.vision_weights import vision_name
from model_families.vision.attention import PackedAttention, select_attention
from model_families.vision.config import VisionConfig, require_activation
from model_families.vision.encoder import VisionTower
from model_families.vision.layers import NORM_EPS, Block, Merger, Mlp, PackedSelfAttention, gelu_tanh
from model_families.vision.layouts import Layout
from model_families.vision.loading import load_vision_encoder
from model_families.vision.packing import Grid, Ints, PatchGrid, Segments, pack_grids
from model_families.vision.rotary import axial_rotation
from model_families.vision.weights import VisionName


class Qwen3VLVisionConfig(VisionConfig, frozen=True, kw_only=True):
    depth: Count = 27
    num_heads: Count = 16
    hidden_act: str = "gelu_pytorch_tanh"
    patch_size: Count = 16
    hidden_size: Count = 1152
    intermediate_size: Count = 4304
    out_hidden_size: Count = 3584
    num_position_embeddings: Count = 2304
    deepstack_visual_indexes: tuple[int, ...] = (8, 16, 24)

    def __post_init__(self) -> None:
        check_multiple("hidden_size", self.hidden_size, "num_heads", self.num_heads)


class Qwen3VLConfig(msgspec.Struct, frozen=True):
    vision_config: Qwen3VLVisionConfig = Qwen3VLVisionConfig()


@dataclass(frozen=True)
class TappedLayout(Layout):
    """How the learned square table is resampled: four of its rows for each of the N patches."""

    index_N4: Tensor
    weight_N41: Tensor  # float32


class Qwen3VLTower(VisionTower[TappedLayout]):
    """Tokens are [embedding, deepstack level 0, level 1, ...] side by side, levels in layer order."""

    def __init__(self, config: Qwen3VLVisionConfig, attention: PackedAttention) -> None:
        super().__init__()
        require_activation(config, "gelu_pytorch_tanh")
        self.config = config
        self.side = isqrt(config.num_position_embeddings)
        if self.side**2 != config.num_position_embeddings:
            raise checkpoint_error("config.json: num_position_embeddings must be a square number")
        self.embedding_width = config.out_hidden_size * (1 + len(config.deepstack_visual_indexes))
        width = config.hidden_size
        self.patch_embed = nn.Linear(config.patch_width, width)
        self.position_table = nn.Embedding(config.num_position_embeddings, width)
        self.blocks = nn.ModuleList(
            Block(
                nn.LayerNorm(width, eps=NORM_EPS),
                PackedSelfAttention(width, config.num_heads, attention),
                nn.LayerNorm(width, eps=NORM_EPS),
                Mlp(width, config.intermediate_size, gelu_tanh),
            )
            for _ in range(config.depth)
        )
        self.merger = self._new_merger(norm_block=False)
        self.deepstack = nn.ModuleList(
            self._new_merger(norm_block=True) for _ in config.deepstack_visual_indexes
        )

    def embed(self, patches_NW: Tensor, layout: TappedLayout) -> Tensor:
        taken = self.config.deepstack_visual_indexes
        x = self.patch_embed(patches_NW)
        x = x + self._positions(layout).to(x.dtype)
        levels: list[Tensor] = []
        for index, block in enumerate(self.blocks):
            x = block(x, layout.rotation, layout.frames)
            if index in taken:
                levels.append(self.deepstack[taken.index(index)](x))
        return torch.cat([self.merger(x), *levels], dim=1)

    def _positions(self, layout: TappedLayout) -> Tensor:
        """[N, width] float32: the learned square table, resampled (bilinear, corners aligned) per frame."""
        weighted: Tensor = self.position_table(layout.index_N4) * layout.weight_N41
        return weighted.sum(1)

    def _lay_out(self, grids: Sequence[Grid], device: torch.device) -> TappedLayout:
        config = self.config
        grid = pack_grids(grids, config.spatial_merge_size)
        index_N4, weight_N41 = self._taps(grid)
        head_dim = config.hidden_size // config.num_heads
        return TappedLayout(
            frames=Segments(grid.frame_lengths_F, device),
            rotation=axial_rotation(grid, head_dim, config.rope_theta, device),
            index_N4=torch.from_numpy(index_N4).to(device),
            weight_N41=torch.from_numpy(weight_N41).to(device),
        )

    def _taps(self, grid: PatchGrid) -> tuple[Ints, npt.NDArray[np.float32]]:
        row_N2, row_weight_N2 = _taps(grid.row_N, grid.height_N, self.side)
        column_N2, column_weight_N2 = _taps(grid.column_N, grid.width_N, self.side)
        index_N4 = (row_N2[:, :, None] * self.side + column_N2[:, None, :]).reshape(-1, 4)
        return index_N4, (row_weight_N2[:, :, None] * column_weight_N2[:, None, :]).reshape(-1, 4, 1)

    def _new_merger(self, *, norm_block: bool) -> Merger:
        config = self.config
        block_width = config.hidden_size * config.spatial_merge_size**2
        norm = nn.LayerNorm(block_width if norm_block else config.hidden_size, eps=NORM_EPS)
        return Merger(
            norm, config.hidden_size, config.spatial_merge_size, config.out_hidden_size, norm_block=norm_block
        )


def _taps(place_N: Ints, size_N: Ints, side: int) -> tuple[Ints, npt.NDArray[np.float32]]:
    """The two table rows around each place of an axis of `size` patches, and their weights: [N, 2] each."""
    source_N = (
        place_N.astype(np.float32) * np.float32(side - 1) / np.maximum(size_N - 1, 1).astype(np.float32)
    )
    low_N = np.floor(source_N)
    upper_weight_N = source_N - low_N
    taps_N2 = low_N.astype(np.int64)[:, None] + np.arange(2)
    return np.minimum(taps_N2, side - 1), np.stack([1 - upper_weight_N, upper_weight_N], axis=1)


def load_encoder(folder: Path, specs: MediaSpecs, device: torch.device, dtype: torch.dtype) -> EncoderModel:
    config = read_config(folder, Qwen3VLConfig).vision_config
    return build_encoder("qwen3_vl", folder, config, specs, vision_name, device, dtype)


def build_encoder(
    family: str,
    folder: Path,
    config: Qwen3VLVisionConfig,
    specs: MediaSpecs,
    name_of: VisionName,
    device: torch.device,
    dtype: torch.dtype,
) -> EncoderModel:
    attention = select_attention(device, dtype, config.hidden_size // config.num_heads)
    with torch.device("meta"):
        tower = Qwen3VLTower(config, attention)
    return load_vision_encoder(family, folder, tower, config, specs, name_of, device, dtype)
