"""The Triton kernels at a model's shapes, each as launches that read other memory every time, with what it
must read, write and compute at the least.

Shapes: M rows, T tokens, H hidden, I intermediate, E experts, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from contracts.params import SamplingParams
from lm_engine.attention.triton import DecodeTile, TritonAttention
from lm_engine.layers.kernels import DecoderLayer, ExpertWeights, HeadShape
from lm_engine.layers.mlp import DenseMlp
from lm_engine.memory import allocate_kv
from lm_engine.model import AttentionMetadata, DecoderConfig, KVDtype, PagedKV, RopeConfig
from lm_engine.plan import Admission
from lm_engine.request_table import RequestTable
from lm_engine.sampler import AskedRows, RowParams, needs_of, sample
from lm_engine.triton.decode import DecodePass
from lm_engine.triton.experts import TritonExperts
from lm_engine.triton.kernels import TritonKernels
from lm_engine.triton.launch import has_fp8, launch, recording
from lm_engine.triton.linear import Blocks, Norm, TritonLinear, make_arrivals
from lm_engine.triton.sampling import TritonDraws
from lm_engine.triton.step import DecodeBuffers, draw

EPS = 1e-6
ChooseTile = Callable[[int, int, int], DecodeTile]


@dataclass(frozen=True)
class Shapes:
    """Of the decoder of a vision model, and of a sparse one's experts. `cold_bytes`: what the launches of a
    case read together at least, so that none finds its memory in a cache."""

    hidden: int = 2048
    intermediate: int = 11008
    num_heads: int = 16
    num_kv_heads: int = 2
    head_dim: int = 128
    vocabulary: int = 151936
    num_experts: int = 128
    num_chosen: int = 8
    expert_width: int = 768
    rows: tuple[int, ...] = (1, 32)  # of decode steps
    tokens: int = 2048  # of a mixed step, in four sequences
    context: int = 519
    turn: int = 430  # tokens of a conversation's new turn, computed in a step of `rows[-1]` sequences
    turn_context: int = 2500
    block_size: int = 16
    num_layers: int = 4  # of whole layers
    cold_bytes: int = 256 << 20

    @property
    def heads(self) -> HeadShape:
        return HeadShape(self.num_heads, self.num_kv_heads, self.head_dim)


FEW = SamplingParams(temperature=0.7, top_k=20, top_p=0.8)
NUCLEUS = SamplingParams(temperature=1.0, top_p=0.95)
TINY = Shapes(64, 96, 4, 2, 16, 200, 4, 2, 32, (1, 2), 8, 20, 9, 40, 16, 2, 0)


@dataclass(frozen=True)
class Case:
    """`runs` follow one another; each moves `num_bytes` and computes `num_operations`. `result`: to be the
    same for all cases that are `same_as` each other. `apart`: its kernels are timed one by one too."""

    name: str
    runs: list[Callable[[], object]]
    num_bytes: int
    num_operations: int = 0
    result: Callable[[], Tensor] | None = None
    same_as: str = ""
    apart: bool = False

    def kernels(self) -> Iterator[Case]:
        """One by one, over what they find after all have run."""
        with recording() as launches, torch.inference_mode():
            self.runs[0]()
        runs = [partial(launch, one.kernel, one.grid, *one.args, **one.options) for one in launches.values()]
        for run in runs:
            run()
        for one, run in zip(launches.values(), runs, strict=True):
            yield Case(f"  {one.kernel.fn.__name__}", [run], 0)


class Bench:
    """Makes cases; the memory of one is given back with it."""

    def __init__(self, shapes: Shapes, device: torch.device, dtype: torch.dtype) -> None:
        self.shapes, self.device, self.dtype = shapes, device, dtype
        self.arrivals = make_arrivals(device)
        self.kernels = TritonKernels(device)

    def cases(self) -> Iterator[Case]:
        for rows in self.shapes.rows:
            yield from self.linears(rows)
            for kv_dtype in ("auto", "fp8") if has_fp8(self.device) else ("auto",):
                yield self.decode_attention(rows, kv_dtype)
            yield self.experts(rows)
            yield self.sampling(rows)
            yield from self.filtered_sampling(rows, FEW)
            yield from self.filtered_sampling(rows, NUCLEUS)
            yield self.norm(rows)
            yield self.layers(rows)
        yield self.norm(self.shapes.tokens)
        yield self.gate()
        yield self.rotation()
        yield self.mixed_attention()
        yield self.turn_attention()

    # --- parts ----------------------------------------------------------------------------------------------

    def normal(self, *shape: int, scale: float = 0.02) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=self.dtype).mul_(scale)

    def made(self, outputs: int, inputs: int, *, float32: bool = False, bias: bool = False) -> TritonLinear:
        bias_O = self.normal(outputs) if bias else None
        return TritonLinear(self.normal(outputs, inputs), bias_O, float32, self.arrivals)

    def copies(self, num_bytes: int) -> int:
        return max(2, -(-self.shapes.cold_bytes // num_bytes))

    def linears(self, rows: int) -> Iterator[Case]:
        for name in self.widths():
            yield from self.linear(name, rows, {"": None})

    def widths(self) -> dict[str, tuple[int, int, bool]]:
        """Outputs, inputs, and whether they are gated."""
        s = self.shapes
        return {
            "qkv": (s.heads.width, s.hidden, False),
            "output": (s.hidden, s.num_heads * s.head_dim, False),
            "gate_up": (2 * s.intermediate, s.hidden, True),
            "down": (s.hidden, s.intermediate, False),
            "head": (s.vocabulary, s.hidden, False),
        }

    def linear(self, name: str, rows: int, ways: dict[str, Blocks | None]) -> Iterator[Case]:
        outputs, inputs, gated = self.widths()[name]
        size = outputs * inputs * self.dtype.itemsize
        x_MI, float32 = self.normal(rows, inputs, scale=1.0), name == "head"
        all_of_them = [
            self.made(outputs, inputs, float32=float32, bias=name == "qkv") for _ in range(self.copies(size))
        ]
        norm = Norm(self.normal(inputs), EPS) if rows == 1 and name in ("qkv", "gate_up") else None
        residual_MO = self.normal(rows, outputs) if name in ("output", "down") else None
        for how, blocks in ways.items():
            runs = [_fused(one, x_MI, norm, residual_MO, gated, blocks) for one in all_of_them]
            yield Case(f"{name}, {rows} rows{how}", runs, size, 2 * rows * outputs * inputs)

    def config(self, layers: int) -> DecoderConfig:
        s = self.shapes
        return DecoderConfig(
            vocab_size=s.vocabulary,
            hidden_size=s.hidden,
            intermediate_size=s.intermediate,
            num_layers=layers,
            num_heads=s.num_heads,
            num_kv_heads=s.num_kv_heads,
            head_dim=s.head_dim,
            rms_norm_eps=EPS,
            rope=RopeConfig(1e6, (1.0,) * (s.head_dim // 2)),
            max_position=4096,
            qkv_bias=True,
        )

    def cache(self, sequences: int, context: int, layers: int, kv_dtype: KVDtype) -> PagedKV:
        s, config = self.shapes, self.config(layers)
        num_blocks = 1 + sequences * -(-context // s.block_size)
        return allocate_kv(config, num_blocks, s.block_size, self.dtype, self.device, kv_dtype)

    def metadata(self, context: int, queries: list[int]) -> AttentionMetadata:
        """Sequences of `context` tokens, the last so many of each are computed."""
        sequences, size = len(queries), self.shapes.block_size
        blocks = -(-context // size)
        tables = 1 + torch.arange(sequences * blocks, dtype=torch.int32).view(sequences, blocks)
        slots = []
        for table, count in zip(tables.long(), queries, strict=True):
            last = torch.arange(context - count, context)
            slots.append(table[last // size] * size + last % size)
        starts = torch.tensor([0, *accumulate(queries)], dtype=torch.int32)
        return AttentionMetadata(
            query_starts=starts.to(self.device),
            sequence_lengths=torch.full((sequences,), context, dtype=torch.int32, device=self.device),
            block_tables=tables.to(self.device),
            slot_mapping=torch.cat(slots).to(self.device),
            max_query_length=max(queries),
            max_sequence_length=context,
            host_query_starts=(),
            host_sequence_lengths=(),
        )

    def angles(self, tokens: int) -> Tensor:
        return torch.rand(tokens, self.shapes.head_dim // 2, device=self.device)

    def kv_bytes(self, tokens: int, kv_dtype: KVDtype) -> int:
        s = self.shapes
        a_head = s.head_dim + 1 if kv_dtype == "fp8" else s.head_dim * self.dtype.itemsize
        return 2 * tokens * s.num_kv_heads * a_head

    # --- attention ------------------------------------------------------------------------------------------

    def decode_attention(self, rows: int, kv_dtype: KVDtype) -> Case:
        s, attention = self.shapes, TritonAttention(self.device)
        num_bytes = self.kv_bytes(rows * s.context, kv_dtype)
        layers = min(self.copies(num_bytes), 64)
        kv, metadata = self.cache(rows, s.context, layers, kv_dtype), self.metadata(s.context, [1] * rows)
        qkv_MX, angles_MP = self.normal(rows, s.heads.width, scale=1.0), self.angles(rows)

        def run(layer: int) -> Callable[[], object]:
            return lambda: attention.rotate_and_attend(
                qkv_MX, s.heads, angles_MP, angles_MP, None, kv, layer, metadata
            )

        operations = 4 * rows * s.context * s.num_heads * s.head_dim
        kind = "" if kv_dtype == "auto" else f" of {kv_dtype}"
        return Case(
            f"decode attention{kind}, {rows} rows", [run(i) for i in range(layers)], num_bytes, operations
        )

    def mixed_attention(self) -> Case:
        length = self.shapes.tokens // 4
        return self.attention_of(f"mixed attention, {self.shapes.tokens} tokens", length, [length] * 4)

    def turn_attention(self) -> Case:
        """One sequence computes a new turn, the others decode: few programs, each over many keys."""
        s = self.shapes
        queries = [s.turn] + [1] * (s.rows[-1] - 1)
        name = f"mixed attention, a turn of {s.turn} and {len(queries) - 1} decodes"
        return self.attention_of(name, s.turn_context, queries)

    def attention_of(self, name: str, context: int, queries: list[int]) -> Case:
        s, attention = self.shapes, TritonAttention(self.device)
        kv, metadata = self.cache(len(queries), context, 2, "auto"), self.metadata(context, queries)
        q_TND = self.normal(sum(queries), s.num_heads, s.head_dim, scale=1.0)
        k_TGD = self.normal(sum(queries), s.num_kv_heads, s.head_dim, scale=1.0)

        def run(layer: int) -> Callable[[], object]:
            return lambda: attention.attend(q_TND, k_TGD, k_TGD, kv, layer, metadata)

        pairs = sum(count * context - count * (count - 1) // 2 for count in queries)
        moved = 2 * q_TND.nbytes + self.kv_bytes(sum(queries) + len(queries) * context, "auto")
        return Case(name, [run(0), run(1)], moved, 4 * pairs * s.num_heads * s.head_dim)

    def rotation(self) -> Case:
        s, attention = self.shapes, TritonAttention(self.device)
        qkv_TX, angles_TP = self.normal(s.tokens, s.heads.width), self.angles(s.tokens)

        def run() -> None:
            attention.rotate(qkv_TX, s.heads, angles_TP, angles_TP, None)

        turned = qkv_TX.nbytes * (s.num_heads + s.num_kv_heads) // (s.num_heads + 2 * s.num_kv_heads)
        return Case(f"rotation, {s.tokens} tokens", [run, run], 2 * turned + 2 * angles_TP.nbytes)

    # --- the rest -------------------------------------------------------------------------------------------

    def experts(self, rows: int) -> Case:
        """Routing, both products, and the weighted sum. No two rows choose the same expert while there are
        others."""
        s = self.shapes
        size = 3 * s.hidden * s.expert_width * self.dtype.itemsize
        chosen = min(s.num_experts, rows * s.num_chosen)
        made = [self.experts_of_a_layer() for _ in range(min(2, self.copies(chosen * size)))]
        x_MH, residual_MH = self.normal(rows, s.hidden, scale=1.0), self.normal(rows, s.hidden)
        first_M1 = torch.arange(rows, device=self.device)[:, None] * s.num_chosen
        logits_ME = (
            (torch.arange(s.num_experts, device=self.device) + first_M1).remainder(s.num_experts).float()
        )

        def run(one: TritonExperts) -> Callable[[], object]:
            return lambda: one.add_routed(x_MH, logits_ME, s.num_chosen, True, None, residual_MH)

        operations = 6 * rows * s.num_chosen * s.hidden * s.expert_width
        return Case(f"experts, {rows} rows", [run(one) for one in made], chosen * size, operations)

    def experts_of_a_layer(self) -> TritonExperts:
        s = self.shapes
        gate_up = self.normal(s.num_experts, 2 * s.expert_width, s.hidden)
        down = self.normal(s.num_experts, s.hidden, s.expert_width)
        few = [ExpertWeights(*one) for one in zip(gate_up[:1], down[:1], strict=True)]
        return TritonExperts(gate_up, down, self.kernels.pack_experts(few))

    def sampling(self, rows: int) -> Case:
        table = self.table(rows)
        buffers = DecodeBuffers.allocate(rows, table)
        buffers.packed_4R[0] = torch.arange(rows)
        arrivals_R = torch.zeros(rows, dtype=torch.int32, device=self.device)
        runs = [_drawn(one, buffers, table, arrivals_R) for one in self.logits(rows)]
        return Case(f"sampling, {rows} rows", runs, rows * self.shapes.vocabulary * 4)

    def filtered_sampling(self, rows: int, params: SamplingParams) -> Iterator[Case]:
        """By the kernels and by the plain sampler, which leaves other logits to its next run. What the host
        packs for a step is on the device already."""
        table, slots = self.table(rows), list(range(rows))
        admissions = [
            Admission(slot, [0, 0], 1, np.zeros((1, 1)), 0, params, slot, (slot,)) for slot in slots
        ]
        table.turn_over((), admissions)
        table.write_admissions(admissions)
        asked, draws = AskedRows(slots, [2] * rows, [params] * rows, []), TritonDraws(table)
        temperature_R, top_p_R, min_p_R, *_ = table.floats[:rows].unbind(1)
        position_R = torch.full_like(table.seed[:rows], 2)
        row_params = RowParams(
            temperature_R, top_p_R, min_p_R, table.top_k[:rows], table.seed[:rows], position_R
        )
        ways: dict[str, list[Callable[[], object]]] = {
            "": [draws.step(asked, one).draw_filtered for one in self.logits(rows)],
            ", plain": [partial(sample, one, row_params, needs_of([params])) for one in self.logits(rows)],
        }
        kind = f"top-k {params.top_k} top-p {params.top_p}" if params.top_k else f"top-p {params.top_p}"
        for way, runs in ways.items():
            moved = rows * self.shapes.vocabulary * 4
            yield Case(f"sampling, {kind}, {rows} rows{way}", runs, moved, apart=not way)

    def table(self, rows: int) -> RequestTable:
        return RequestTable(
            vocab_size=self.shapes.vocabulary,
            num_axes=1,
            max_sequences=rows,
            max_length=64,
            block_size=self.shapes.block_size,
            device=self.device,
        )

    def logits(self, rows: int) -> list[Tensor]:
        """As spread as a language model's."""
        shape = (rows, self.shapes.vocabulary)
        count = min(64, self.copies(rows * self.shapes.vocabulary * 4))
        return [3 * torch.randn(shape, device=self.device) for _ in range(count)]

    def norm(self, rows: int) -> Case:
        x_MH, weight_H = self.normal(rows, self.shapes.hidden), self.normal(self.shapes.hidden)

        def run() -> object:
            return self.kernels.rms_norm(x_MH, weight_H, EPS)

        return Case(f"norm, {rows} rows", [run, run], 2 * x_MH.nbytes)

    def gate(self) -> Case:
        gate_up_T2I = self.normal(self.shapes.tokens, 2 * self.shapes.intermediate)

        def run() -> object:
            return self.kernels.silu_mul(gate_up_T2I)

        return Case(f"gate, {self.shapes.tokens} tokens", [run, run], gate_up_T2I.nbytes * 3 // 2)

    # --- whole layers ---------------------------------------------------------------------------------------

    def layers(self, rows: int, way: str = "", choose: ChooseTile | None = None) -> Case:
        """A decode step without its ends; a run is all layers."""
        s, attention = self.shapes, TritonAttention(self.device, choose_decode=choose)
        layers = [self.layer() for _ in range(s.num_layers)]
        kv, metadata = self.cache(rows, s.context, s.num_layers, "auto"), self.metadata(s.context, [1] * rows)
        residual_MH, angles_MP = self.normal(rows, s.hidden), self.angles(rows)
        passes = DecodePass(attention)

        def run() -> None:
            passes.run(layers, residual_MH, s.heads, angles_MP, angles_MP, EPS, kv, metadata)

        width = s.hidden * (s.heads.width + s.num_heads * s.head_dim + 3 * s.intermediate)
        moved = width * self.dtype.itemsize + self.kv_bytes(rows * s.context, "auto")
        return Case(f"{s.num_layers} layers, {rows} rows{way}", [run], s.num_layers * moved)

    def layer(self) -> DecoderLayer:
        s = self.shapes
        gate_up, down = self.made(2 * s.intermediate, s.hidden), self.made(s.hidden, s.intermediate)
        return DecoderLayer(
            input_norm_H=self.normal(s.hidden),
            qkv=self.made(s.heads.width, s.hidden, bias=True),
            qk_norm=None,
            output=self.made(s.hidden, s.num_heads * s.head_dim),
            post_norm_H=self.normal(s.hidden),
            mlp=DenseMlp(self.kernels, gate_up, down),
        )


def _fused(
    one: TritonLinear,
    x_MI: Tensor,
    norm: Norm | None,
    residual_MO: Tensor | None,
    gated: bool,
    blocks: Blocks | None,
) -> Callable[[], object]:
    return lambda: one.fused(x_MI, norm=norm, residual_MO=residual_MO, gated=gated, blocks=blocks)


def _drawn(
    logits_RV: Tensor, buffers: DecodeBuffers, table: RequestTable, arrivals_R: Tensor
) -> Callable[[], object]:
    return lambda: draw(logits_RV, buffers, table, arrivals_R)
