"""Ways to attend in a mixed step, each as a whole and its kernels apart, beside what the step must move and
compute.

Shapes: T tokens of a step, P = half a head, X = width of the fused projection.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.components.kernel_cases import Bench, Case
from lm_engine.attention.triton import TritonAttention
from lm_engine.model import AttentionMetadata, PagedKV
from lm_engine.passes import SHORT_LENGTH, TOKEN_SIZES
from lm_engine.triton.launch import has_gluon

TABLE_ROWS, MAX_LENGTH = 64, 8192
LAYERS = 4  # of a run, so that a plan serves several
SEED = 5


@dataclass(frozen=True)
class Way:
    attention: TritonAttention
    block_size: int


@dataclass(frozen=True)
class Step:
    """Sequences of `context` tokens, of which each computes so many of `queries`."""

    name: str
    context: int
    queries: list[int]


class MixedVariants(Bench):
    def cases(self) -> Iterator[Case]:
        for name, way in self.ways().items():
            for step in self.steps():
                yield self.mixed_case(step, name, way)

    @property
    def is_tiny(self) -> bool:
        return self.device.type == "cpu"

    @property
    def max_length(self) -> int:
        return 64 if self.is_tiny else MAX_LENGTH

    def steps(self) -> list[Step]:
        s = self.shapes
        if self.is_tiny:
            return [Step("turn", s.turn_context, [s.turn, 1])]
        turns = [Step(f"turn of {s.turn} beside {n}", s.turn_context, [s.turn] + [1] * n) for n in (7, 31)]
        prompts = [
            Step(f"{n} x {length}", length, [length] * n)
            for n, length in ((1, 519), (4, 512), (1, 1600), (2, 800))
        ]
        return turns + prompts

    def ways(self) -> dict[str, Way]:
        device = self.device

        def walks(size: int, programs: int = 132, **tile: int) -> Way:
            from lm_engine.attention.walks import Walks, WalkTile

            return Way(TritonAttention(device, walks=Walks(programs, WalkTile(**tile))), size)

        tiles = {f"tiles, pages of {size}": Way(TritonAttention(device), size) for size in (16, 64)}
        if not has_gluon(device):
            return tiles
        return {
            **tiles,
            "walks": walks(16),
            "walks, pages of 64": walks(64),
            "walks, 3 stages": walks(16, num_stages=3),
            "walks, 2 stages of 128 keys": walks(16, keys=128, num_stages=2, least_blocks=2),
        }

    # --- a case ---------------------------------------------------------------------------------------------

    def mixed_case(self, step: Step, way_name: str, way: Way) -> Case:
        """Rotation and writing are in it, which are the same for all."""
        s, (kv, metadata) = self.shapes, self.memory(step, way.block_size)
        size = len(metadata.slot_mapping)
        generator = torch.Generator(self.device).manual_seed(SEED)
        qkv_TX = torch.randn(size, s.heads.width, generator=generator, device=self.device, dtype=self.dtype)
        angles_TP = torch.rand(size, s.head_dim // 2, generator=generator, device=self.device)
        cos_TP, sin_TP = angles_TP.cos(), angles_TP.sin()

        def attend(qkv_TX: Tensor, layer: int) -> Tensor:
            return way.attention.rotate_and_attend(qkv_TX, s.heads, cos_TP, sin_TP, None, kv, layer, metadata)

        def all_layers() -> None:
            for layer in range(kv.keys.shape[0]):
                attend(qkv_TX, layer)

        pairs = sum(count * step.context - count * (count - 1) // 2 for count in step.queries)
        moved = 2 * qkv_TX.nbytes + self.kv_bytes(len(step.queries) * step.context, "auto")
        layers = kv.keys.shape[0]
        return Case(
            f"mixed: {step.name}, {way_name}: {layers} layers",
            [all_layers],
            layers * moved,
            layers * 4 * pairs * s.num_heads * s.head_dim,
            result=lambda: attend(qkv_TX.clone(), 0)[: sum(step.queries)],
            same_as=step.name,
            apart=True,
        )

    def memory(self, step: Step, block_size: int) -> tuple[PagedKV, AttentionMetadata]:
        """The same keys and values whatever the size of a page, whose pages lie scattered."""
        sized = type(self)(replace(self.shapes, block_size=block_size), self.device, self.dtype)
        sequences, context = len(step.queries), step.context
        kv = sized.cache(sequences, context, 1 if self.is_tiny else LAYERS, "auto")
        exact = sized.metadata(context, step.queries)
        order = torch.randperm(kv.keys.shape[1] - 1, generator=torch.Generator().manual_seed(SEED)) + 1
        tables = order.to(self.device).int()[exact.block_tables.long() - 1]
        slots = order.to(self.device)[exact.slot_mapping // block_size - 1] * block_size
        exact = replace(exact, block_tables=tables, slot_mapping=slots + exact.slot_mapping % block_size)
        key = torch.arange(context, device=self.device)
        slots_RL = tables.long()[:, key // block_size] * block_size + key % block_size
        generator = torch.Generator(self.device).manual_seed(SEED)
        for cache in (kv.keys, kv.values):
            for layer in cache:
                layer.flatten(0, 1)[slots_RL] = torch.randn(
                    sequences, context, *layer.shape[2:], generator=generator, device=self.device
                ).to(self.dtype)
        return kv, self.padded(exact, step)

    def padded(self, exact: AttentionMetadata, step: Step) -> AttentionMetadata:
        """As a captured step has it: of the next larger size, with all rows of the request table."""
        used, rows = sum(step.queries), max(1 if self.is_tiny else TABLE_ROWS, len(step.queries))
        size = next(size for size in TOKEN_SIZES if size >= used)
        more = rows - len(step.queries)
        return replace(
            exact,
            query_starts=functional.pad(exact.query_starts, (0, more), value=used),
            sequence_lengths=functional.pad(exact.sequence_lengths, (0, more)),
            block_tables=functional.pad(exact.block_tables, (0, 0, 0, more)),
            slot_mapping=functional.pad(exact.slot_mapping, (0, size - used)),
            max_sequence_length=SHORT_LENGTH if step.context <= SHORT_LENGTH else self.max_length,
            padded=True,
        )
