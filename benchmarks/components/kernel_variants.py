"""Ways to do the same, one case each, so that one run on a GPU says which is the fastest at the 3B shape.

Shapes: M rows, T tokens, N packed patches, H heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.components.kernel_cases import Bench, Case
from benchmarks.components.mixed_variants import MixedVariants
from lm_engine.attention.mixed import MIXED_PROGRAMS, MixedTile, choose_mixed_tile, choose_part_tile
from lm_engine.attention.triton import DecodeTile, TritonAttention, choose_tile
from lm_engine.decoder import DecoderStack
from lm_engine.layers.kernels import HeadShape
from lm_engine.model import AttentionMetadata
from lm_engine.passes import SHORT_LENGTH, TOKEN_SIZES
from lm_engine.triton.kernels import TritonKernels
from lm_engine.triton.launch import has_gluon, recording
from lm_engine.triton.linear import Blocks
from lm_engine.triton.packed import attend_packed
from model_families.vision.attention import GroupedAttention, PackedAttention, select_attention
from model_families.vision.packing import Segments

COMPILE_THREADS = 8
TABLE_ROWS, MAX_LENGTH = 64, 8192
SMALL_ROWS = (1, 8, 32)
NEIGHBOURS = (7, 31)
FRAMES, PATCHES, TOWER_HEADS, TOWER_DIM, WINDOW = 8, 5476, 16, 80, 64

PACKED_WAYS: dict[str, dict[str, int]] = {
    "": {},
    ", 128 keys": {"keys": 128},
    ", 128 rows": {"rows": 128},
}

OTHER_BLOCKS: dict[str, dict[str, Blocks | None]] = {
    "qkv": {", 64 outputs": Blocks(64, 128, 4, 4, splits=2)},
    "gate_up": {", 128 outputs": Blocks(128, 64, 8, 4), ", 128 inputs": Blocks(84, 128, 8, 3)},
}
OTHER_TILES = {
    ", 64 keys": DecodeTile(64, 8, 2),
    ", 64 keys, 4 warps": DecodeTile(64, 16, 4),
    ", 128 keys": DecodeTile(128, 8, 4),
}

Mixed = dict[str, TritonAttention]


def compile_all(cases: Iterable[Case]) -> None:
    """What the cases launch, on threads; nothing of ours is launched."""
    with recording() as launches, torch.inference_mode():
        for case in cases:
            try:
                case.runs[0]()
            except RuntimeError:
                continue  # told of when it is measured
    first, *others = launches.values()
    first.compile()
    with ThreadPoolExecutor(COMPILE_THREADS) as threads:
        list(threads.map(lambda one: one.compile(), others))


class Variants(Bench):
    def cases(self) -> Iterator[Case]:
        for neighbours in self.few(NEIGHBOURS):
            yield from self.turns(neighbours)
        yield from self.prompts()
        for neighbours in self.few(NEIGHBOURS):
            yield from self.turn_layers(neighbours)
        yield from self.turn_products()
        for context in (self.shapes.context, self.shapes.turn_context):
            for rows in self.few(SMALL_ROWS):
                yield from self.decodes(rows, context)
        yield from self.few_rows()
        yield from self.tower()
        yield from MixedVariants(self.shapes, self.device, self.dtype).cases()

    @property
    def is_tiny(self) -> bool:
        return self.device.type == "cpu"

    @property
    def max_length(self) -> int:
        return 64 if self.is_tiny else MAX_LENGTH

    def few(self, counts: tuple[int, ...]) -> tuple[int, ...]:
        return counts[:1] if self.is_tiny else counts

    # --- mixed steps ----------------------------------------------------------------------------------------

    def mixed(self) -> Mixed:
        device = self.device

        def uncapped(heads: HeadShape) -> MixedTile:
            return replace(choose_part_tile(heads), max_registers=None)

        if self.is_tiny:
            return {
                "whole": TritonAttention(device, mixed_programs=None),
                f"{MIXED_PROGRAMS} parts": TritonAttention(device, mixed_programs=16),
            }
        return {
            "whole": TritonAttention(device, mixed_programs=None),
            "whole, large tiles": TritonAttention(device, mixed_programs=None, choose_mixed=uncapped),
            "whole, large tiles, 128 registers": TritonAttention(
                device, mixed_programs=None, choose_mixed=choose_part_tile
            ),
            "132 parts": TritonAttention(device, mixed_programs=132),
            f"{MIXED_PROGRAMS} parts": TritonAttention(device),
            "528 parts": TritonAttention(device, mixed_programs=528),
            "parts, all registers": TritonAttention(device, choose_part=uncapped),
            "parts, half tiles": TritonAttention(device, choose_part=choose_mixed_tile),
            f"about {MIXED_PROGRAMS} parts": TritonAttention(device, mixed_at_once=False),
            "about 528 parts": TritonAttention(device, mixed_programs=528, mixed_at_once=False),
            **self.walks(),
        }

    def walks(self) -> Mixed:
        if not has_gluon(self.device):
            return {}
        attention = TritonAttention(self.device)
        attention.walk()
        return {"walks": attention}

    def padded(self, context: int, queries: list[int]) -> AttentionMetadata:
        """As a captured step has it: of the next larger size, with all rows of the request table."""
        found = self.metadata(context, queries)
        used, rows = sum(queries), max(1 if self.is_tiny else TABLE_ROWS, len(queries))
        size = next(size for size in TOKEN_SIZES if size >= used)
        return replace(
            found,
            query_starts=functional.pad(found.query_starts, (0, rows - len(queries)), value=used),
            sequence_lengths=functional.pad(found.sequence_lengths, (0, rows - len(queries))),
            block_tables=functional.pad(found.block_tables, (0, 0, 0, rows - len(queries))),
            slot_mapping=functional.pad(found.slot_mapping, (0, size - used)),
            max_sequence_length=SHORT_LENGTH if context <= SHORT_LENGTH else self.max_length,
            padded=True,
        )

    def turns(self, neighbours: int) -> Iterator[Case]:
        s = self.shapes
        name = f"turn of {s.turn} beside {neighbours}"
        yield from self.mixed_cases(name, s.turn_context, [s.turn] + [1] * neighbours, self.mixed())

    def prompts(self) -> Iterator[Case]:
        """Of no context: one prompt, and a step full of them."""
        ways = self.mixed()
        for count, length in ((1, self.shapes.context), (4, self.shapes.tokens // 4)):
            names = [name for name in ways if "whole" in name or name == "walks"]
            yield from self.mixed_cases(
                f"{count} prompts of {length}", length, [length] * count, {name: ways[name] for name in names}
            )

    def mixed_cases(self, name: str, context: int, queries: list[int], ways: Mixed) -> Iterator[Case]:
        """Rotation and writing are in it, which are the same for all."""
        s = self.shapes
        metadata, layers = self.padded(context, queries), 1 if self.is_tiny else 4
        kv, size = self.cache(len(queries), context, layers, "auto"), len(metadata.slot_mapping)
        qkv_TX, angles_TP = self.normal(size, s.heads.width, scale=1.0), self.angles(size)
        pairs = sum(count * context - count * (count - 1) // 2 for count in queries)
        moved = 2 * qkv_TX.nbytes + self.kv_bytes(len(queries) * context, "auto")

        def run(attention: TritonAttention) -> Callable[[], object]:
            def all_layers() -> None:
                for layer in range(layers):
                    attention.rotate_and_attend(
                        qkv_TX, s.heads, angles_TP, angles_TP, None, kv, layer, metadata
                    )

            return all_layers

        for way, attention in ways.items():
            operations = 4 * pairs * s.num_heads * s.head_dim
            yield Case(
                f"{name}, {way}: {layers} layers", [run(attention)], layers * moved, layers * operations
            )

    def turn_layers(self, neighbours: int) -> Iterator[Case]:
        s = self.shapes
        queries = [s.turn] + [1] * neighbours
        metadata = self.padded(s.turn_context, queries)
        kv = self.cache(len(queries), s.turn_context, s.num_layers, "auto")
        size = len(metadata.slot_mapping)
        config = self.config(s.num_layers)
        product = s.hidden * (s.heads.width + s.num_heads * s.head_dim + 3 * s.intermediate)
        pairs = s.turn * s.turn_context + neighbours * s.turn_context
        operations = s.num_layers * (2 * size * product + 4 * pairs * s.num_heads * s.head_dim)
        hidden_TH = self.normal(size, s.hidden)
        positions_AT = torch.zeros(1, size, device=self.device)
        for way, attention in self.mixed().items():
            if way not in ("whole", f"{MIXED_PROGRAMS} parts", f"about {MIXED_PROGRAMS} parts", "walks"):
                continue
            stack = DecoderStack(config, _Normal(self), TritonKernels(self.device, attention))
            turns = stack.turns(positions_AT)

            def run(stack: DecoderStack = stack, turns: tuple[Tensor, Tensor] = turns) -> object:
                return stack.forward_turned(hidden_TH, turns, kv, stack.attention, metadata)

            name = f"{s.num_layers} layers, a turn of {s.turn} beside {neighbours}, {way}"
            yield Case(name, [run], s.num_layers * product * self.dtype.itemsize, operations)

    # --- products of a turn ---------------------------------------------------------------------------------

    def turn_products(self) -> Iterator[Case]:
        """The library's, whole and with its inputs in halves and quarters; what stands between them."""
        s = self.shapes
        for size in (16,) if self.is_tiny else (448, 512):
            widths = {
                "qkv": (s.heads.width, s.hidden),
                "output": (s.hidden, s.num_heads * s.head_dim),
                "gate_up": (2 * s.intermediate, s.hidden),
                "down": (s.hidden, s.intermediate),
            }
            for name, (outputs, inputs) in widths.items():
                x_MI, num_bytes = self.normal(size, inputs), outputs * inputs * self.dtype.itemsize
                weights = [self.normal(outputs, inputs) for _ in range(self.copies(num_bytes))]
                for parts in (1, 2, 4) if name != "gate_up" else (1,):
                    runs = [_product(x_MI, weight_OI, parts, self.device) for weight_OI in weights]
                    how = "" if parts == 1 else f", inputs in {parts}"
                    yield Case(f"{name}, {size} rows{how}", runs, num_bytes, 2 * size * outputs * inputs)
            yield self.norm(size)

    # --- linears of few rows, and layers of decodes ---------------------------------------------------------

    def few_rows(self) -> Iterator[Case]:
        """Tiles of as many outputs as give every multiprocessor one beside those of a power of two."""
        for rows in self.few((8, 16, 32, 64)):
            for name, ways in OTHER_BLOCKS.items():
                yield from self.linear(name, rows, {"": None, **({} if self.is_tiny else ways)})
        for rows in self.few(SMALL_ROWS):
            yield self.layers(rows)
            for how, tile in {} if self.is_tiny else OTHER_TILES.items():
                yield self.layers(rows, how, lambda *_, tile=tile: tile)

    # --- decodes --------------------------------------------------------------------------------------------

    def decodes(self, rows: int, context: int) -> Iterator[Case]:
        s = self.shapes
        chosen = choose_tile(rows * s.num_kv_heads, self.max_length, s.head_dim)
        tiles = {"": chosen}
        if not self.is_tiny:
            tiles |= OTHER_TILES
        if rows >= 8 and not self.is_tiny:
            tiles[", half as many parts"] = replace(chosen, splits=max(1, chosen.splits // 2))
            tiles[", twice as many parts"] = replace(chosen, splits=chosen.splits * 2)
        num_bytes = self.kv_bytes(rows * context, "auto")
        layers = min(self.copies(num_bytes), 64)
        kv = self.cache(rows, context, layers, "auto")
        metadata = replace(self.metadata(context, [1] * rows), max_sequence_length=self.max_length)
        qkv_MX, angles_MP = self.normal(rows, s.heads.width, scale=1.0), self.angles(rows)

        def run(attention: TritonAttention, layer: int) -> Callable[[], object]:
            return lambda: attention.rotate_and_attend(
                qkv_MX, s.heads, angles_MP, angles_MP, None, kv, layer, metadata
            )

        for how, tile in tiles.items():
            attention = TritonAttention(self.device, choose_decode=lambda *_, tile=tile: tile)
            runs = [run(attention, layer) for layer in range(layers)]
            operations = 4 * rows * context * s.num_heads * s.head_dim
            name = f"decode attention, {rows} rows of {context}{how} ({tile.keys} keys, {tile.splits} parts)"
            yield Case(name, runs, num_bytes, operations)

    # --- a vision tower's attention -------------------------------------------------------------------------

    def tower(self) -> Iterator[Case]:
        frames, patches, window = (2, 128, 64) if self.is_tiny else (FRAMES, PATCHES, WINDOW)
        num_rows = frames * patches
        qkv = self.normal(num_rows, 3, TOWER_HEADS, TOWER_DIM, scale=1.0)
        q_NHD, k_NHD, v_NHD = qkv.unbind(1)
        flash = select_attention(self.device, self.dtype, TOWER_DIM)
        whole, cut = [patches] * frames, [window] * (num_rows // window) + [num_rows % window]
        cut = [length for length in cut if length]

        def run(attention: PackedAttention, segments: Segments) -> Callable[[], object]:
            return lambda: attention.attend(q_NHD, k_NHD, v_NHD, segments)

        def cudnn() -> object:
            q, k, v = (
                x.reshape(frames, patches, TOWER_HEADS, TOWER_DIM).transpose(1, 2)
                for x in (q_NHD, k_NHD, v_NHD)
            )
            with sdpa_kernel(SDPBackend.MATH if self.is_tiny else SDPBackend.CUDNN_ATTENTION):
                return functional.scaled_dot_product_attention(q, k, v)

        moved, width = 4 * q_NHD.nbytes, TOWER_HEADS * TOWER_DIM
        for kind, lengths in (("frames", whole), ("windows", cut)):
            segments = Segments(torch.tensor(lengths).numpy(), self.device)
            operations = 4 * sum(length**2 for length in lengths) * width
            ways: dict[str, Callable[[], object]] = {flash.name: run(flash, segments)}
            for how, options in PACKED_WAYS.items() if not self.is_tiny else ():
                ways[f"packed{how}"] = _packed(q_NHD, k_NHD, v_NHD, segments, options)
            if kind == "frames":
                ways["cudnn"] = cudnn
            elif not self.is_tiny:
                ways["grouped"] = run(GroupedAttention(), segments)
            for way, one in ways.items():
                yield Case(f"tower, {kind}, {way}", [one, one], moved, operations)


def _packed(
    q_NHD: Tensor, k_NHD: Tensor, v_NHD: Tensor, segments: Segments, options: dict[str, int]
) -> Callable[[], object]:
    starts, longest = segments.starts, segments.max_length
    return lambda: attend_packed(q_NHD, k_NHD, v_NHD, starts, longest, **options)


class _Normal:
    """A WeightSource."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self.device, self.dtype = bench.device, bench.dtype

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self._bench.normal(*shape)


def _product(x_MI: Tensor, weight_OI: Tensor, parts: int, device: torch.device) -> Callable[[], object]:
    if parts == 1:
        return lambda: functional.linear(x_MI, weight_OI)
    x_PMJ = x_MI.view(x_MI.shape[0], parts, -1).transpose(0, 1)
    weight_PJO = weight_OI.view(weight_OI.shape[0], parts, -1).permute(1, 2, 0)
    if device.type == "cpu" or x_MI.dtype is torch.float32:
        return lambda: torch.bmm(x_PMJ, weight_PJO).sum(0)
    return lambda: torch.bmm(x_PMJ, weight_PJO, out_dtype=torch.float32)  # whoever adds reads it as it is
