"""The causal decoder of Qwen3-Omni: codec frames to PCM, exact in a stream, batched over streams.

Summed codebook embeddings, a sliding-window transformer, ConvNeXt upsampling, then a stack of snake-activated
upsampling blocks. Each trimmed upsampling looks one of its own steps ahead, so a stream is `withheld`
samples behind
its frames, and ends as many short, like the decode in one piece.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn
from torch.nn import functional

from contracts.capture import synchronize
from vocoder.graphs import FRAME_SIZES, MAX_FRAMES, ROW_SIZES, ForwardGraphs, Record
from vocoder.layers import CausalConv, CausalUpsampling, ConvNeXtBlock, Snake, UpsamplingBlock
from vocoder.model import VocoderRow
from vocoder.streaming import Level, StateLayout, StreamBatch
from vocoder.transformer import StreamingTransformer, TransformerConfig

EDGE_KERNEL = 7


@dataclass(frozen=True)
class Code2WavConfig:
    transformer: TransformerConfig
    codebook_size: int
    num_code_groups: int
    upsampling_ratios: tuple[int, ...]  # before the decoder, by ConvNeXt stages
    upsample_rates: tuple[int, ...]  # inside the decoder
    decoder_width: int  # halved by each block
    sample_rate: int

    def __post_init__(self) -> None:
        assert self.decoder_width % 2 ** len(self.upsample_rates) == 0

    @property
    def samples_per_frame(self) -> int:
        return prod(self.upsampling_ratios) * prod(self.upsample_rates)


@dataclass(eq=False)
class Code2WavState:
    """One stream: every layer's carried tensor in one vector, and how many frames it has seen."""

    carried_S: Tensor
    num_frames: int = 0

    @property
    def num_bytes(self) -> int:
        return self.carried_S.nbytes


class UpsamplingStage(nn.Module):
    def __init__(self, layout: StateLayout, channels: int, ratio: int) -> None:
        super().__init__()
        self.upsampling = CausalUpsampling(layout, channels, channels, ratio, ratio)
        self.block = ConvNeXtBlock(layout, channels)

    def forward(self, x_BCT: Tensor, streams: StreamBatch) -> Tensor:
        out: Tensor = self.block(self.upsampling(x_BCT, streams), streams)
        return out


class Code2WavNetwork(nn.Module):
    def __init__(self, config: Code2WavConfig) -> None:
        super().__init__()
        self.config = config
        self.layout = layout = StateLayout()
        width = config.transformer.hidden_size
        self.codes = nn.Parameter(torch.empty(config.num_code_groups * config.codebook_size, width))
        self.transformer = StreamingTransformer(layout, config.transformer)
        self.stages = nn.ModuleList(UpsamplingStage(layout, width, r) for r in config.upsampling_ratios)
        self.entry = CausalConv(layout, width, config.decoder_width, EDGE_KERNEL)
        self.blocks = nn.ModuleList()
        level, channels = Level(prod(config.upsampling_ratios)), config.decoder_width
        for rate in config.upsample_rates:
            block = UpsamplingBlock(layout, level, channels, channels // 2, rate)
            self.blocks.append(block)
            level, channels = block.level, channels // 2
        self.snake = Snake(channels)
        self.exit = CausalConv(layout, channels, 1, EDGE_KERNEL)
        self.level = level

    def forward(self, codes_BTQ: Tensor, streams: StreamBatch) -> Tensor:
        """[batch, samples]; the void samples of young streams are still in it."""
        return self.synthesise(self.embed(codes_BTQ), streams)

    def embed(self, codes_BTQ: Tensor) -> Tensor:
        """[batch, frames, width]: the mean of a frame's codebook rows."""
        config = self.config
        offset_Q = torch.arange(config.num_code_groups, device=codes_BTQ.device) * config.codebook_size
        bags = (codes_BTQ + offset_Q).flatten(0, 1)
        x_NW = functional.embedding_bag(bags, self.codes, mode="mean")
        return x_NW.view(*codes_BTQ.shape[:2], -1)

    def synthesise(self, x_BTW: Tensor, streams: StreamBatch) -> Tensor:
        x_BCT = self.transformer(x_BTW, streams).transpose(1, 2)
        for stage in self.stages:
            x_BCT = stage(x_BCT, streams)
        x_BCT = self.entry(x_BCT, streams)
        for block in self.blocks:
            x_BCT = block(x_BCT, streams)
        pcm_B1T: Tensor = self.exit(self.snake(x_BCT), streams)
        return pcm_B1T[:, 0].clamp(-1, 1)


class Code2Wav:
    """A VocoderModel over a network whose weights are loaded. One thread at a time; on a GPU on a stream of
    its
    own, by graphs."""

    def __init__(self, network: Code2WavNetwork, record: Record | None = None) -> None:
        """`record`: makes graphs of something, where a GPU is not there to do it."""
        config = network.config
        self.withheld = network.level.void  # samples: 1,365 of the published model's first 1,920 come at once
        self._stream: torch.cuda.Stream | None = None
        if network.codes.device.type == "cuda":
            synchronize(network.codes.device)  # the weights are there
            self._stream = torch.cuda.Stream(network.codes.device)  # type: ignore[no-untyped-call]
        self._graphs: ForwardGraphs | None = None
        if self._stream is not None or record is not None:
            num_void_frames = -(-self.withheld // config.samples_per_frame)
            self._graphs = ForwardGraphs(
                network, config.num_code_groups, num_void_frames, network.codes, record
            )
        self._network = network
        self._device = network.codes.device
        self.sample_rate = config.sample_rate
        self.samples_per_frame = config.samples_per_frame
        self.num_code_groups = config.num_code_groups
        self.codebook_size = config.codebook_size
        self.voices: tuple[str, ...] = ()

    def open(self, voice: str = "", seed: int = 0) -> Code2WavState:
        with torch.cuda.stream(self._stream):
            carried_S = torch.zeros(
                self._network.layout.size, dtype=self._network.codes.dtype, device=self._device
            )
        return Code2WavState(carried_S)

    def capture_graphs(self) -> int:
        """Captures all graphs now rather than on first use; returns their number."""
        if self._graphs is None:
            return 0
        with torch.cuda.stream(self._stream):
            num_graphs = self._graphs.capture_all()
        self._rehearse()
        return num_graphs

    def _rehearse(self) -> None:
        """Decodes for nobody: what goes to the graphs and from them has kernels to load and memory of the
        host to take, on first use."""
        for num_rows in ROW_SIZES:
            states = [self.open() for _ in range(num_rows)]
            for num_frames in (1, min(FRAME_SIZES[-1], MAX_FRAMES // num_rows)):
                codes_KQ = torch.zeros(num_frames, self.num_code_groups, dtype=torch.int64)
                self.decode([VocoderRow(state, codes_KQ, last=False) for state in states])

    def decode_whole(self, codes_KQ: Tensor) -> Tensor:
        """The PCM of a finished stream, in one piece."""
        return self.decode([VocoderRow(self.open(), codes_KQ, last=True)])[0]

    @torch.inference_mode()
    def decode(self, rows: Sequence[VocoderRow[Code2WavState]]) -> list[Tensor]:
        with torch.cuda.stream(self._stream):
            return self._decode(rows)

    def _decode(self, rows: Sequence[VocoderRow[Code2WavState]]) -> list[Tensor]:
        results = [torch.empty(0) for _ in rows]
        by_length: dict[int, list[int]] = defaultdict(list)
        for index, row in enumerate(rows):
            by_length[row.codes_KQ.shape[0]].append(index)
        by_length.pop(0, None)
        done: list[tuple[VocoderRow[Code2WavState], Tensor]] = []
        for indices in by_length.values():
            group = [rows[index] for index in indices]
            pcm_rows, carried_BS = self._forward(group)
            if len(by_length) > 1:
                carried_BS = carried_BS.clone()  # the next forward may write there
            done += zip(group, carried_BS, strict=True)
            for index, pcm in zip(indices, pcm_rows, strict=True):
                results[index] = pcm
        if done:  # one launch for all: each copy alone takes as long as all
            torch._foreach_copy_(
                [row.state.carried_S for row, _ in done], [carried_S for _, carried_S in done]
            )
        for row, _ in done:
            row.state.num_frames += row.codes_KQ.shape[0]
        return results

    def _forward(self, rows: list[VocoderRow[Code2WavState]]) -> tuple[list[Tensor], Tensor]:
        num_frames = [row.state.num_frames for row in rows]
        youngest = min(num_frames)
        states = [row.state.carried_S for row in rows]
        codes_BTQ = torch.stack([row.codes_KQ for row in rows])
        length = codes_BTQ.shape[1]
        if self._graphs is not None and self._graphs.takes(len(rows), length, youngest):
            pcm_BT, new_BS = self._graphs.run(states, num_frames, codes_BTQ)
        else:
            num_frames_B = torch.tensor(num_frames, device=self._device)
            streams = StreamBatch(self._network.layout, torch.stack(states), num_frames_B, youngest)
            pcm_BT = self._network(codes_BTQ.to(self._device), streams).float()
            new_BS = streams.new_BS
        pcm_BT = self._to_host(pcm_BT)
        void_B = [max(0, self.withheld - n * self.samples_per_frame) for n in num_frames]
        return [pcm_T[void:] for pcm_T, void in zip(pcm_BT, void_B, strict=True)], new_BS

    def _to_host(self, pcm_BT: Tensor) -> Tensor:
        if self._stream is None:
            return pcm_BT.clone()
        pinned_BT = torch.empty(pcm_BT.shape, dtype=pcm_BT.dtype, pin_memory=True)
        pinned_BT.copy_(pcm_BT, non_blocking=True)
        self._stream.synchronize()
        return pinned_BT
