"""Every Triton kernel compiled for a Hopper GPU, without one, at the shapes of large models: it fits into the
shared memory, spills little and never traps. Collected through test_compiled_kernels.py.

Models on the device "meta" launch what they would launch on a GPU, and Triton compiles it for one.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

import lm_engine.triton.launch
import lm_engine.triton.linear
import vocoder.kernels
from contracts.params import SamplingParams
from lm_engine.attention.triton import TritonAttention
from lm_engine.attention.walks import Walks
from lm_engine.decoder import Decoder
from lm_engine.gpu_target import GpuTarget, assuming
from lm_engine.graphs import BATCH_SIZES
from lm_engine.layers.kernels import HeadShape, QKNorm
from lm_engine.memory import allocate_kv
from lm_engine.model import AdapterRanks, DecoderConfig, KVDtype, MoeConfig, RopeConfig
from lm_engine.passes import TOKEN_SIZES, PaddedInputs, PaddedPasses, PassShape
from lm_engine.plan import Admission, SequenceStep
from lm_engine.request_table import RequestTable
from lm_engine.sampler import AskedRows, LogitChange
from lm_engine.table_kernels import rehearse_spans
from lm_engine.talker.graphs import BATCH_SIZES as FRAME_SIZES
from lm_engine.talker.graphs import MAX_PROMPT_ROWS, CapturedFrames, PromptModel
from lm_engine.triton.ahead import decoder_launches
from lm_engine.triton.codes import CodeBuffers, draw_first, draw_residual
from lm_engine.triton.kernels import TritonKernels
from lm_engine.triton.packed import attend_packed
from lm_engine.triton.sampling import TritonDraws
from lm_engine.triton.step import DecodeBuffers, draw, prepare_inputs
from lm_engine.triton.table import TritonTable
from model_families.checkpoint import read_config
from model_families.qwen2_5_vl.decoder import decoder_config as qwen2_5_vl_config
from model_families.qwen3_omni_moe import talker as omni_talker
from model_families.qwen3_omni_moe.decoder import DEFAULTS as OMNI_DEFAULTS
from model_families.text_config import CheckpointConfig, build_decoder_config
from tests.lm_engine.cubin import has_trap, stack_bytes
from tests.lm_engine.random_decoder import tiny_config

SHAPES = Path(__file__).resolve().parents[2] / "benchmarks" / "shapes"
META, DTYPE = torch.device("meta"), torch.bfloat16
SHARED_BYTES = 232448  # that a block may have on Hopper
STACK_BYTES = 128
BLOCK_SIZE, NUM_BLOCKS = 16, 1000


class _Thinker(msgspec.Struct):
    text_config: CheckpointConfig


class Omni(msgspec.Struct):
    thinker_config: _Thinker


class Hopper:
    """As Triton's driver, of a GPU that is not there."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Shapes:
    """A WeightSource."""

    device, dtype = META, DTYPE

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.empty(shape, device=META, dtype=DTYPE)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, triton.compiler.CompiledKernel]]:
    """What was launched, compiled."""
    kernels: dict[str, triton.compiler.CompiledKernel] = {}
    run = JITFunction.run

    def compile(self: JITFunction, *args: object, grid: object, warmup: bool, **options: object) -> None:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        kernels[f"{kernel.name} {kernel.hash}"] = kernel

    triton.runtime.driver.set_active(Hopper())
    monkeypatch.setattr(JITFunction, "run", compile)
    monkeypatch.setattr(lm_engine.triton.launch, "uses_pdl", lambda device: True)
    monkeypatch.setattr(lm_engine.triton.linear, "shared_memory_bytes", lambda device: SHARED_BYTES)
    monkeypatch.setattr(vocoder.kernels, "takes", lambda x: True)
    with torch.inference_mode():
        yield kernels


def check(compiled: dict[str, triton.compiler.CompiledKernel], *names: str) -> None:
    """`names`: some that must be among them."""
    assert {kernel.name for kernel in compiled.values()} >= set(names)
    for name, kernel in compiled.items():
        assert kernel.metadata.shared <= SHARED_BYTES, name
        assert not has_trap(kernel.asm["cubin"]), name
        assert stack_bytes(kernel.asm["cubin"]) <= STACK_BYTES, name


def folder_of(shape: str, tmp_path: Path) -> Path:
    shutil.copy(SHAPES / f"{shape}.json", tmp_path / "config.json")
    return tmp_path


def table_of(config: DecoderConfig, max_sequences: int, max_length: int) -> RequestTable:
    return RequestTable(
        vocab_size=config.vocab_size,
        num_axes=config.num_position_axes,
        max_sequences=max_sequences,
        max_length=max_length,
        block_size=BLOCK_SIZE,
        device=META,
        gated=config.picture_adapter is not None,
        kernels=TritonTable(),
    )


def run_decoder(
    config: DecoderConfig, batches: tuple[int, ...], tokens: tuple[int, ...], kv_dtype: KVDtype = "auto"
) -> None:
    """A layer's steps of so many sequences and mixed ones of so many tokens."""
    config = replace(config, num_layers=1, kept_hidden_layer=None)
    run_steps(Decoder(config, Shapes(), TritonKernels(META)), batches, tokens, kv_dtype)


def run_steps(
    model: Decoder,
    batches: tuple[int, ...],
    tokens: tuple[int, ...],
    kv_dtype: KVDtype = "auto",
    max_length: int = 16384,
) -> None:
    table = table_of(model.config, 256, max_length)
    kv = allocate_kv(model.config, NUM_BLOCKS, BLOCK_SIZE, DTYPE, META, kv_dtype)
    arrivals_R = torch.zeros(256, dtype=torch.int32, device=META)
    for batch in batches:
        buffers = DecodeBuffers.allocate(batch, table)
        prepare_inputs(buffers, table)
        hidden_RH = model.embed(buffers.token_ids_R)
        hidden_RH = model.forward(hidden_RH, buffers.positions_AR, kv, model.attention, buffers.metadata)
        draw(model.logits(hidden_RH), buffers, table, arrivals_R)
    table.rehearse()
    passes = PaddedPasses(model, model.attention, kv, table)
    for shape in passes.shapes:
        if shape.num_tokens in tokens:
            passes.clear(shape)
            passes.forward(shape)
    rehearse_spans(model, table)
    TritonDraws(table).rehearse()


def run_talker(folder: Path, batches: tuple[int, ...], prompts: tuple[int, ...]) -> None:
    """Whole frames of so many sequences, and prompts of so many rows."""
    sections, config, inner = omni_talker.read_talker_config(folder)
    config = replace(config, decoder=replace(config.decoder, num_layers=1))
    source, kernels = Shapes(), TritonKernels(META)
    predictor = omni_talker.load_predictor(replace(inner, num_layers=1), config, source, TritonKernels(META))
    model = omni_talker.Talker(sections, config, source, kernels, predictor, processor=None)
    decoder = config.decoder
    table, kv = table_of(decoder, 64, 8192), allocate_kv(decoder, NUM_BLOCKS, BLOCK_SIZE, DTYPE, META)
    model.reserve(64)
    last_frame = torch.zeros(65, config.num_code_groups, dtype=torch.int64, device=META)
    suppressed_V = torch.zeros(decoder.vocab_size, device=META)
    frames = CapturedFrames(
        model, kv, table, last_frame, suppressed_V, record=lambda run: (lambda: None, run())
    )
    for batch in batches:
        frames._capture(batch)
    table.rehearse()
    passes = PaddedPasses(PromptModel(model), model.attention, kv, table, MAX_PROMPT_ROWS)
    for shape in passes.shapes:
        if shape.num_tokens in prompts:
            passes.clear(shape)
            passes.forward(shape)


@triton.jit
def trapping(x_ptr):
    value = tl.load(x_ptr)
    tl.inline_asm_elementwise("trap; mov.u32 $0, $1;", "=r,r", [value], dtype=tl.int32, is_pure=False, pack=1)


def test_a_trap_is_seen(compiled):
    trapping[(1,)](torch.empty(1, dtype=torch.int32, device=META))
    with pytest.raises(AssertionError, match="trapping"):
        check(compiled)


@pytest.mark.parametrize(
    ("kv_dtype", "window"),
    [pytest.param("auto", None, marks=pytest.mark.slow), ("fp8", None), ("auto", 4096)],
)
def test_attention(compiled, kv_dtype, window):
    """Decodes by halves of 64 keys and mixed steps, as of Qwen3's heads."""
    heads = HeadShape(16, 2, 128)
    config = tiny_config(head_dim=128, num_kv_heads=2, num_layers=1, windows=(window,))
    kv = allocate_kv(config, NUM_BLOCKS, BLOCK_SIZE, DTYPE, META, kv_dtype)
    table = table_of(config, 64, 8192)
    buffers = DecodeBuffers.allocate(56, table)
    norm = QKNorm(*torch.empty(2, 128, device=META, dtype=DTYPE), 1e-6)
    attention = TritonAttention(META)
    mixed = replace(buffers.metadata, max_query_length=2)
    for num_tokens, metadata in ((56, buffers.metadata), (112, mixed), (4096, mixed)):
        qkv_TX = torch.empty(num_tokens, heads.width, device=META, dtype=DTYPE)
        cos_TP = torch.empty(num_tokens, 64, device=META)
        attention.rotate_and_attend(qkv_TX, heads, cos_TP, cos_TP, norm, kv, 0, metadata)
    check(compiled, "decode_attention", "mixed_attention", "rope_heads")
    if window is None:
        check(compiled, "attend_parts", "merge_parts", "plan_parts")
    for name, kernel in compiled.items():
        assert "cvt.bf16.f16" not in kernel.asm["ptx"], f"{name} widens one value after the other"


@pytest.mark.parametrize("way", ["tiles", "walks"])
def test_mixed_steps_of_all_sizes_share_a_kernel(compiled, way):
    """What a captured step has compiled serves plain ones, of any number of sequences and blocks."""
    heads = HeadShape(16, 2, 128)
    config = tiny_config(head_dim=128, num_kv_heads=2, num_layers=1)
    kv = allocate_kv(config, NUM_BLOCKS, BLOCK_SIZE, DTYPE, META)
    attention, cos_TP = TritonAttention(META), torch.empty(600, 64, device=META)
    names_of = {
        "tiles": ("attend_parts", "merge_parts", "plan_parts", "mixed_attention"),
        "walks": ("plan_walks", "attend_walks", "merge_walks"),
    }
    if way == "walks":
        attention.walk()
    qkv_TX = torch.empty(600, heads.width, device=META, dtype=DTYPE)
    for num_sequences, num_blocks in ((64, 512), (1, 38), (6, 7), (16, 5), (3, 17), (2, 20), (2, 1)):
        metadata = DecodeBuffers.allocate(
            num_sequences, table_of(config, 64, num_blocks * BLOCK_SIZE)
        ).metadata
        metadata = replace(metadata, max_query_length=600)
        attention.rotate_and_attend(qkv_TX, heads, cos_TP, cos_TP, None, kv, 0, metadata)
    names = [kernel.name for kernel in compiled.values()]
    assert len(names) == len(set(names))
    check(compiled, *names_of[way], "rope_heads")


def prompts(lengths: tuple[int, ...], gated: bool) -> tuple[list[Admission], list[SequenceStep]]:
    """Each with a token more, which brings its block if it needs one."""
    admissions = [
        Admission(
            slot,
            [1] * (n + 1),
            n,
            np.zeros((1, n)),
            0,
            SamplingParams(),
            5,
            (1,) * -(-n // BLOCK_SIZE),
            gated_from=0 if gated else None,
        )
        for slot, n in enumerate(lengths)
    ]
    steps = [
        SequenceStep(slot, 0, n + 1, (2,) if n % BLOCK_SIZE == 0 else (), True)
        for slot, n in enumerate(lengths)
    ]
    return admissions, steps


@pytest.mark.parametrize("gated", [False, True])
def test_steps_of_all_sizes_share_what_moves_their_inputs(compiled, gated):
    """What is rehearsed serves them, whatever their numbers of tokens, rows and blocks."""
    config = tiny_config(num_layers=1, picture_adapter=AdapterRanks(q=2) if gated else None)
    model, table = Decoder(config, Shapes(), TritonKernels(META)), table_of(config, 64, 8192)
    table.rehearse()
    padded = PaddedInputs(model, table, 2048, config.hidden_size, DTYPE)
    for with_gate in {False, gated}:
        padded.clear(PassShape(16, 8192, with_gate))
    rehearsed = set(compiled)
    check(compiled, "write_rows", "gather_inputs", "pad_inputs", "write_tokens")
    assert len(rehearsed) == 4 + gated
    for lengths in ((1,), (33, 1, 16), (1, 1, 1, 1), (700, 32), (129,) * 7):
        admissions, steps = prompts(lengths, gated)
        table.turn_over(list(table.rows), admissions)
        table.write(admissions, steps)
        inputs = table.step_inputs(steps)
        num_tokens = inputs.token_ids_T.shape[0]
        hidden_TH = torch.empty(num_tokens, config.hidden_size, device=META, dtype=DTYPE)
        padded.write(hidden_TH, inputs.positions_AT, inputs.metadata, 1024)
        codes_SQ = torch.empty(len(lengths), 16, dtype=torch.int64, device=META)
        for token_S in (inputs.slots_S, codes_SQ[:, 0]):
            table.write_sampled(inputs, token_S)
    assert set(compiled) == rehearsed


def test_packed_attention(compiled):
    """Of whole pictures and of windows, with heads of 80."""
    q_NHD = torch.empty(43808, 3, 16, 80, device=META, dtype=DTYPE)[:, 0]
    starts = torch.empty(9, dtype=torch.int32, device=META)
    for max_length in (5476, 64):
        attend_packed(q_NHD, q_NHD, q_NHD, starts, max_length)
    check(compiled, "packed_attention")
    assert len(compiled) == 1, "what one picture has compiled serves all"


def test_draws_of_codes(compiled):
    """Of a talker's vocabulary, and of its code predictor's."""
    table = table_of(tiny_config(), 64, 8192)
    for num_codes in (3072, 2048):
        codes = CodeBuffers.allocate(torch.zeros(4, 56, dtype=torch.int32, device=META), num_codes)
        logits_RV = torch.empty(56, num_codes, device=META)
        if num_codes == 3072:
            draw_first(logits_RV, logits_RV[0], codes, table)
        else:
            draw_residual(logits_RV, codes, table, omni_talker.RESIDUAL, seed=7)
    check(compiled, "draw_codes")
    assert len(compiled) == 2


def test_sampling(compiled):
    """Of the largest vocabularies; what one step has compiled serves all."""
    table = table_of(tiny_config(vocab_size=151936), 64, 8192)
    draws = TritonDraws(table)
    draws.rehearse()
    rehearsed = set(compiled)
    names = ("prepare_rows", "bracket_nuclei", "find_floors", "draw_tokens", "score_tokens")
    check(compiled, "change_logits", "count_tokens", *names)
    kind = SamplingParams(top_p=0.9, min_p=0.1, repetition_penalty=1.1, logprobs=16, min_tokens=9)
    for num_rows in (2, 16, 33):
        changes = [LogitChange(row, 5, -1.0) for row in range(num_rows)]
        asked = AskedRows((0,) * num_rows, (40,) * num_rows, (kind,) * num_rows, changes)
        draws(asked, torch.empty(num_rows, 151936, device=META))
    assert set(compiled) == rehearsed


@pytest.mark.slow
@pytest.mark.parametrize(("num_heads", "num_groups", "head_dim"), [(28, 4, 128), (16, 16, 64), (64, 1, 128)])
@pytest.mark.parametrize("block_size", [8, 64])
def test_walks_with_other_heads_and_pages(compiled, num_heads, num_groups, head_dim, block_size):
    heads = HeadShape(num_heads, num_groups, head_dim)
    config = tiny_config(num_heads=num_heads, num_kv_heads=num_groups, head_dim=head_dim, num_layers=1)
    kv = allocate_kv(config, NUM_BLOCKS, block_size, DTYPE, META)
    metadata = DecodeBuffers.allocate(56, table_of(config, 64, 8192)).metadata
    attention = TritonAttention(META, walks=Walks(132))
    qkv_TX = torch.empty(112, heads.width, device=META, dtype=DTYPE)
    cos_TP = torch.empty(112, head_dim // 2, device=META)
    metadata = replace(metadata, max_query_length=2)
    attention.rotate_and_attend(qkv_TX, heads, cos_TP, cos_TP, None, kv, 0, metadata)
    check(compiled, "plan_walks", "attend_walks", "merge_walks")


@pytest.mark.parametrize(
    ("moe", "walks", "windows", "num_kinds"),
    [
        (None, False, (), 1),
        (MoeConfig(4, 2, 16, True, dense_layers=frozenset({0, 2})), False, (), 2),
        (None, True, (), 1),
        (None, False, (None, None, 24, 24), 2),
    ],
)
def test_what_is_compiled_ahead_is_what_steps_launch(compiled, moe, walks, windows, num_kinds):
    """Though a decoder that stands for one on a GPU has one layer of each kind."""
    head_dim = 64 if walks else 8
    rope = RopeConfig(1e4, (1.0,) * (head_dim // 2))
    config = tiny_config(num_layers=4, moe=moe, head_dim=head_dim, rope=rope, windows=windows)
    model = Decoder(config, Shapes(), TritonKernels(META))
    if walks:
        model.attention.walk()
    run_steps(model, (1, 2), TOKEN_SIZES, max_length=64)
    launched = set(compiled)
    compiled.clear()
    with assuming(GpuTarget((9, 0), SHARED_BYTES)):
        shortened = Decoder(config, Shapes(), TritonKernels(META))
        if walks:
            shortened.attention.walk()
        assert len(shortened.layers) == num_kinds
        for launch in decoder_launches(
            shortened, max_sequences=2, max_length=64, block_size=BLOCK_SIZE, kv_dtype="auto"
        ):
            launch.compile()
    assert set(compiled) == launched


@pytest.mark.slow
def test_all_frames_and_prompts_of_a_talker(compiled, tmp_path):
    run_talker(folder_of("qwen3_omni_30b_a3b", tmp_path), FRAME_SIZES, TOKEN_SIZES[:14])
    check(compiled)


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
def test_all_steps_of_a_vision_model(compiled, tmp_path, kv_dtype):
    config = read_config(folder_of("qwen2_5_vl_3b", tmp_path), CheckpointConfig)
    run_decoder(qwen2_5_vl_config(config), BATCH_SIZES, TOKEN_SIZES, kv_dtype)
    check(compiled, "draw_tokens", "gemv", "rotary_turns", "rope_heads")


@pytest.mark.slow
def test_all_steps_of_a_thinker(compiled, tmp_path):
    config = read_config(folder_of("qwen3_omni_30b_a3b", tmp_path), Omni).thinker_config.text_config
    run_decoder(build_decoder_config(config, OMNI_DEFAULTS), BATCH_SIZES, TOKEN_SIZES)
    check(compiled, "expert_gemm", "silu_mul")


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)])
def test_the_vocoder_s_kernels(compiled, dtype):
    """Snake and convolutions of one stream's frame and of a batch."""
    for rows, steps in ((1, 1920), (32, 8 * 1920)):
        x = torch.empty(rows, 96, steps, device=META, dtype=dtype)
        vocoder.kernels.fused_snake(x, x[0, :, :1].contiguous(), x[0, :, :1].contiguous())
        vocoder.kernels.narrow_conv(x, x[:1, :, :7].contiguous(), x[0, 0, :1].contiguous(), 1)
        vocoder.kernels.depthwise_conv(x, x[0, :, None, :7].contiguous(), x[0, :, 0].contiguous(), 1)
    check(compiled, "snake", "narrow_conv", "depthwise_conv")
