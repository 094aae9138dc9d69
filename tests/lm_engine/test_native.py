import copy
import dataclasses
import itertools
import math
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from contracts.errors import EngineError
from lm_engine.attention.reference import SequenceAttention
from lm_engine.decoder import Decoder
from lm_engine.layers.kernels import HeadShape, QKNorm
from lm_engine.layers.reference import ReferenceKernels
from lm_engine.layers.selection import select_kernels
from lm_engine.model import AttentionMetadata, MoeConfig, PagedKV, RopeConfig
from lm_engine.native import Unavailable, native_kernels
from lm_engine.native.build import BuildError, build, cache_directory, library_path
from lm_engine.native.kernels import NativeKernels
from lm_engine.native.library import load
from tests.lm_engine.random_decoder import RandomSource, tiny_config

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("gcc") is None, reason="the native kernels need Linux and gcc"
)
# Portable: what a CPU without AVX2 compiles from the same sources.
BUILDS = {"this CPU": ("-march=native",), "portable": ("-mtune=generic",)}
DTYPES = (torch.float32, torch.bfloat16)
# One rounding to bfloat16 (half a unit of its 8 bits), and float32 accumulation beside it.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-8}


@pytest.fixture(scope="module", params=list(BUILDS))
def kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> NativeKernels:
    return NativeKernels(load(build(tmp_path_factory.mktemp("native"), BUILDS[request.param])))


@pytest.fixture(autouse=True, params=[1, 2], ids=["1 thread", "2 threads"])
def threads(request: pytest.FixtureRequest):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    torch.manual_seed(0)
    yield request.param
    torch.set_num_threads(before)


def assert_near(actual: Tensor, expected_f64: Tensor, tolerance: float) -> None:
    """Each value within `tolerance` of itself plus as much of the tensor's typical size."""
    assert actual.shape == expected_f64.shape
    error = (actual.double() - expected_f64).abs()
    bound = tolerance * (expected_f64.abs() + 0.25 * expected_f64.square().mean().sqrt() + 1e-6)
    assert bool((error <= bound).all()), f"worst {(error / bound).max().item():.2f} of the bound"


# --- linear ---


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (16, 8), (40, 77), (100, 576), (33, 1537)])
def test_linear_equals_the_product_in_float64(kernels, dtype, outputs, inputs):
    weight, bias = torch.randn(outputs, inputs).to(dtype), torch.randn(outputs).to(dtype)
    for use_bias in (None, bias):
        linear = kernels.pack_linear(weight.clone(), use_bias)
        for rows in (1, 2, 5, 7, 8, 13, 29, 200):
            x = torch.randn(rows, inputs).to(dtype)
            expected = x.double() @ weight.double().T + (0 if use_bias is None else bias.double())
            actual = linear(x)
            assert actual.dtype == dtype
            assert_near(actual, expected, TOLERANCE[dtype] * (4 if dtype == torch.float32 else 1))


def test_linear_of_mixed_dtypes_and_leading_shapes(kernels):
    weight = torch.randn(48, 24).bfloat16()
    x = torch.randn(2, 3, 24)
    expected = x.double() @ weight.double().T
    assert_near(kernels.pack_linear(weight)(x), expected, 1e-5)
    logits = kernels.pack_linear(weight, float32_output=True)(x.bfloat16())
    assert logits.dtype == torch.float32
    assert_near(logits, x.bfloat16().double() @ weight.double().T, 1e-5)
    assert kernels.pack_linear(weight)(torch.empty(0, 24)).shape == (0, 48)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_a_linear_is_the_same_alone_and_in_any_batch(kernels, dtype, threads):
    linear = kernels.pack_linear(torch.randn(100, 1300).to(dtype))
    x = torch.randn(700, 1300).to(dtype)
    whole = linear(x)
    for rows in (1, 2, 3, 4, 5, 6, 7, 8, 12, 13, 24, 25, 100, 300):
        assert torch.equal(linear(x[:rows]), whole[:rows])
    torch.set_num_threads(3 - threads)
    assert torch.equal(linear(x), whole)


def test_a_packed_linear_owns_its_weight(kernels):
    source = torch.randn(20, 30)
    weight, transposed, bias = source.clone(), source.t().contiguous().t(), torch.randn(20)
    linear, x = kernels.pack_linear(weight, bias), torch.randn(3, 30)
    before = linear(x)
    weight.fill_(math.nan)
    bias.fill_(math.nan)
    assert torch.equal(linear(x), before)
    assert torch.equal(kernels.pack_linear(transposed)(x), kernels.pack_linear(source)(x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_gather_returns_the_rows_that_were_packed(kernels, dtype):
    weight = torch.randn(50, 21).to(dtype)
    linear = kernels.pack_linear(weight)
    ids = torch.tensor([[0, 7, 8], [15, 49, 16]])
    assert torch.equal(linear.gather(ids, dtype), weight[ids])
    assert torch.equal(linear.gather(torch.arange(50), torch.float32), weight.float())
    for wrong in (-1, 50):
        with pytest.raises(IndexError, match="of 50"):
            linear.gather(torch.tensor([3, wrong]), dtype)


def test_bfloat16_results_are_rounded_to_nearest_even_like_torch(kernels):
    ties = torch.arange(2**15, dtype=torch.int32).mul(2**17).add(2**15).view(torch.float32)
    nans = torch.tensor([0x7FFFFFFF, -1, 0x7F800001], dtype=torch.int32).view(torch.float32)
    ends = torch.tensor([math.inf, -math.inf, 0.0, -0.0, 1e-40])
    x = torch.cat([ties, torch.randn(5000), nans, ends])
    linear = kernels.pack_linear(x[:, None].contiguous())
    one = torch.ones(1, 1, dtype=torch.bfloat16)
    expected, actual = x.bfloat16()[None], linear(one)
    assert torch.equal(expected.isnan(), actual.isnan())
    assert torch.equal(expected.nan_to_num(), actual.nan_to_num())


def test_an_unsupported_dtype_is_refused(kernels):
    with pytest.raises(EngineError, match="float16"):
        kernels.pack_linear(torch.ones(4, 4, dtype=torch.float16))
    with pytest.raises(EngineError, match="float64"):
        kernels.pack_linear(torch.ones(4, 4))(torch.ones(1, 4, dtype=torch.float64))


# --- element-wise ---


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 8), (5, 77), (40, 576)])
def test_norms_and_activation_equal_the_plain_ones(kernels, dtype, rows, width):
    plain = ReferenceKernels()
    x, residual = torch.randn(rows, width).to(dtype), (3 * torch.randn(rows, width)).to(dtype)
    weight = torch.randn(width).to(dtype)
    expected = plain.rms_norm(x, weight, 1e-6)
    assert_near(kernels.rms_norm(x, weight, 1e-6), expected.double(), 2 * TOLERANCE[dtype])
    normed, total = kernels.add_rms_norm(x.clone(), residual.clone(), weight, 1e-6)
    plain_normed, plain_total = plain.add_rms_norm(x.clone(), residual.clone(), weight, 1e-6)
    assert torch.equal(total, plain_total)
    assert_near(normed, plain_normed.double(), 2 * TOLERANCE[dtype])
    gate_up = (8 * torch.randn(rows, 2 * width)).to(dtype)
    gate, up = gate_up.double().chunk(2, dim=-1)
    assert_near(kernels.silu_mul(gate_up), torch.nn.functional.silu(gate) * up, TOLERANCE[dtype])


def test_activation_holds_at_the_ends_of_the_range(kernels):
    gate = torch.tensor([-1e30, -200.0, -88.0, -0.0, 0.0, 88.0, 200.0, 1e30, 1e-30, -1e-30, -10.0, 10.0])
    actual = kernels.silu_mul(torch.cat([gate, torch.ones_like(gate)])[None])
    expected = torch.nn.functional.silu(gate.double())[None]
    torch.testing.assert_close(actual.double(), expected, rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [6, 64, 80, 128])
@pytest.mark.parametrize("with_norm", [False, True])
def test_split_and_rotation_equal_the_plain_ones(kernels, dtype, head_dim, with_norm):
    heads, tokens = HeadShape(num_heads=6, num_kv_heads=2, head_dim=head_dim), 33
    qkv = torch.randn(tokens, heads.width).to(dtype)
    angle = 10 * torch.randn(tokens, head_dim // 2)
    weights = (torch.randn(head_dim).to(dtype), torch.randn(head_dim).to(dtype))
    norm = QKNorm(*weights, eps=1e-6) if with_norm else None
    expected = ReferenceKernels().split_rope(qkv.clone(), heads, angle.cos(), angle.sin(), norm)
    actual = kernels.split_rope(qkv.clone(), heads, angle.cos(), angle.sin(), norm)
    for ours, plain in zip(actual, expected, strict=True):
        assert_near(ours, plain.double(), 4 * TOLERANCE[dtype])
    assert torch.equal(actual[2], expected[2])


# --- attention ---


@dataclasses.dataclass(frozen=True)
class Shape:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int


def metadata_of(chunks: list[tuple[int, int]], block_size: int, tables: list[list[int]]) -> AttentionMetadata:
    """`chunks`: (keys computed before, queries of this step) of each sequence."""
    starts, slots = [0], []
    for (before, count), table in zip(chunks, tables, strict=True):
        starts.append(starts[-1] + count)
        positions = range(before, before + count)
        slots += [table[p // block_size] * block_size + p % block_size for p in positions]
    lengths = [before + count for before, count in chunks]
    longest = max(map(len, tables))
    padded = [table + [0] * (longest - len(table)) for table in tables]
    return AttentionMetadata(
        query_starts=torch.tensor(starts, dtype=torch.int32),
        sequence_lengths=torch.tensor(lengths, dtype=torch.int32),
        block_tables=torch.tensor(padded, dtype=torch.int32),
        slot_mapping=torch.tensor(slots),
        max_query_length=max(count for _, count in chunks),
        max_sequence_length=max(lengths),
        host_query_starts=tuple(starts),
        host_sequence_lengths=tuple(lengths),
    )


def shuffled_tables(lengths: list[int], block_size: int) -> tuple[list[list[int]], int]:
    """Tables over scattered blocks, and how many blocks the cache needs (block 0 is scratch)."""
    counts = [-(-length // block_size) for length in lengths]
    order = (torch.randperm(sum(counts)) + 1).tolist()
    return [[order.pop() for _ in range(count)] for count in counts], sum(counts) + 1


def random_cache(shape: Shape, num_blocks: int, dtype: torch.dtype) -> PagedKV:
    size = (2, num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim)
    return PagedKV(torch.randn(size).to(dtype), torch.randn(size).to(dtype))


MIXED = [(0, 1), (0, 70), (199, 1), (63, 1), (64, 2), (37, 90), (0, 16)]


@pytest.mark.parametrize(
    "shape",
    [Shape(9, 3, 64, 16), Shape(4, 4, 80, 32), Shape(8, 1, 128, 16), Shape(2, 2, 12, 1)],
    ids=str,
)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cache_dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 1, 40, 64, 130])
def test_attention_equals_the_plain_path(kernels, shape, dtype, cache_dtype, window):
    tables, num_blocks = shuffled_tables([a + b for a, b in MIXED], shape.block_size)
    metadata = metadata_of(MIXED, shape.block_size, tables)
    tokens, width = metadata.host_query_starts[-1], shape.num_heads + 2 * shape.num_kv_heads
    qkv = torch.randn(tokens, width, shape.head_dim).to(dtype)  # views of one projection, as the decoder's
    q, k, v = qkv.split([shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], dim=1)
    kv = random_cache(shape, num_blocks, cache_dtype)
    kv.windows = (None, window)
    wide = PagedKV(kv.keys.double(), kv.values.double(), windows=kv.windows)
    rounded = (x.to(cache_dtype).double() for x in (k, v))
    expected = SequenceAttention().attend(q.double(), *rounded, wide, 1, metadata)
    actual = kernels.attention.attend(q, k, v, kv, 1, metadata)
    assert actual.dtype == dtype
    assert_near(actual, expected, 4 * TOLERANCE[dtype] if dtype == torch.float32 else TOLERANCE[dtype])
    assert torch.equal(kv.keys.double(), wide.keys)
    assert torch.equal(kv.values.double(), wide.values)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 50])
def test_attention_is_the_same_chunked_batched_or_alone(kernels, dtype, window, threads):
    shape, length = Shape(9, 3, 64, 16), 150
    tables, num_blocks = shuffled_tables([length, 77], shape.block_size)
    q, k, v = (torch.randn(length, n, 64).to(dtype) for n in (9, 3, 3))
    attend = kernels.attention.attend

    def run(cuts: list[int], kv: PagedKV) -> Tensor:
        parts, kv.windows = [], (window, None)
        for begin, end in itertools.pairwise(cuts):
            metadata = metadata_of([(begin, end - begin)], shape.block_size, tables[:1])
            parts.append(attend(q[begin:end], k[begin:end], v[begin:end], kv, 0, metadata))
        return torch.cat(parts)

    kv = random_cache(shape, num_blocks, dtype)
    whole = run([0, length], kv)
    for cuts in ([0, 1, 64, 65, 149, 150], [0, 17, 40, 128, 150], list(range(length + 1))):
        assert torch.equal(run(cuts, random_cache(shape, num_blocks, dtype)), whole)
    both = metadata_of([(76, 1), (149, 1)], shape.block_size, [tables[1], tables[0]])
    rows = torch.tensor([3, 149])
    assert torch.equal(attend(q[rows], k[rows], v[rows], kv, 0, both)[1], whole[149])
    torch.set_num_threads(3 - threads)
    assert torch.equal(run([0, length], random_cache(shape, num_blocks, dtype)), whole)


# --- helper threads ---


def test_kernels_may_run_in_several_threads_at_once(kernels, threads):
    """More callers than the helpers take jobs of; every call works on its own tensors."""
    linears = [kernels.pack_linear(torch.randn(160, 64)) for _ in range(6)]
    inputs = [torch.randn(rows, 64) for rows in (1, 8, 20, 33, 50, 64)]
    torch.set_num_threads(1)
    expected = [linear(x) for linear, x in zip(linears, inputs, strict=True)]
    torch.set_num_threads(threads)

    def call(index: int) -> bool:
        answers = [linears[index](inputs[index]) for _ in range(200)]
        return all(torch.equal(answer, expected[index]) for answer in answers)

    with ThreadPoolExecutor(len(linears)) as pool:
        assert all(pool.map(call, range(len(linears)), timeout=60))


def test_no_task_runs_twice(kernels, threads):
    x, weight = torch.randn(64, 512), torch.ones(512)
    for _ in range(300):  # adds in place: a row added twice shows
        _, total = kernels.add_rms_norm(x.clone(), torch.zeros(64, 512), weight, 1e-6)
        assert torch.equal(total, x)


FORK = """
import os, sys, torch
from pathlib import Path
from lm_engine.native.kernels import NativeKernels
from lm_engine.native.library import load
torch.set_num_threads(2)
linear = NativeKernels(load(Path(sys.argv[1]))).pack_linear(torch.ones(512, 256))
x = torch.ones(16, 256)
before = linear(x)
child = os.fork()
if child == 0:
    same = torch.equal(linear(x), before)
    os._exit(0 if same and len(os.listdir("/proc/self/task")) == 2 else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_process_has_its_own_helpers(tmp_path, one_thread):
    library = build(tmp_path, ("-O0",))
    done = subprocess.run([sys.executable, "-c", FORK, str(library)], timeout=60, check=False)
    assert done.returncode == 0


# --- building and loading ---


@pytest.fixture
def one_thread(threads):
    if threads != 1:
        pytest.skip("does not depend on the threads")


def test_a_second_openmp_runtime_is_not_loaded(kernels, one_thread):
    kernels.rms_norm(torch.ones(1, 8), torch.ones(8), 1e-6)
    maps = Path("/proc/self/maps").read_text()
    runtimes = {line.split()[-1] for line in maps.splitlines() if re.search(r"/lib(gomp|iomp5|omp)\b", line)}
    assert len(runtimes) == 1


def test_the_library_is_built_once_and_named_by_its_flags(tmp_path, one_thread, monkeypatch):
    flags = ("-O0",)  # quick to compile
    path = build(tmp_path, flags)
    assert path == library_path(tmp_path, flags)
    assert path != library_path(tmp_path)
    assert list(tmp_path.iterdir()) == [path]
    monkeypatch.setenv("PATH", "")
    assert build(tmp_path, flags) == path  # no compiler needed any more
    with pytest.raises(BuildError, match="gcc is not installed"):
        build(tmp_path / "other")


def test_a_failing_compiler_is_a_reason_not_a_crash(tmp_path, one_thread):
    with pytest.raises(BuildError, match="no-such-flag"):
        build(tmp_path, ("-mno-such-flag",))
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "broken.so").write_bytes(b"not a library")
    with pytest.raises(BuildError, match="could not be loaded"):
        load(tmp_path / "broken.so")


def test_other_devices_and_dtypes_are_refused_with_the_reason(one_thread):
    for device, dtype in (("meta", torch.float32), ("cpu", torch.float16)):
        answer = native_kernels(torch.device(device), dtype)
        assert isinstance(answer, Unavailable)
        assert device in answer.reason


def test_setup_builds_into_the_environment(one_thread):
    command = [sys.executable, "-W", "error", "-m", "lm_engine.native.build"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.stderr == ""
    assert Path(done.stdout.strip()) == library_path(cache_directory())
    assert Path(done.stdout.strip()).exists()


def test_the_users_cache_is_for_who_has_no_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert cache_directory() == tmp_path / "share" / "omnistage" / "native"
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path))
    assert cache_directory() == tmp_path / "cache" / "omnistage" / "native"


# --- in a decoder ---


@pytest.mark.parametrize(
    "changes",
    [{}, {"qk_norm": True}, {"qkv_bias": True}, {"num_kv_heads": 1}, {"windows": (None, 4)}],
    ids=str,
)
def test_a_decoder_computes_the_same_with_native_kernels(kernels, changes):
    config, cache_size = tiny_config(**changes), (2, 9, 4, changes.get("num_kv_heads", 2), 8)
    tables, chunks = [[3, 1, 7], [5], [2, 8]], [(0, 9), (0, 3), (0, 6)]
    next_chunks = [(9, 1), (3, 1), (6, 2)]
    logits = []
    for choice in (ReferenceKernels(), kernels):
        decoder = Decoder(config, RandomSource(), choice)
        kv = PagedKV(*torch.zeros(2, *cache_size), windows=config.windows)
        for step_chunks in (chunks, next_chunks):
            metadata = metadata_of(step_chunks, 4, tables)
            positions = torch.cat([torch.arange(a, a + b) for a, b in step_chunks])
            hidden = decoder.embed(positions * 5 % 97)
            hidden = decoder.forward(hidden, positions[None], kv, choice.attention, metadata)
        logits.append(decoder.logits(hidden))
    assert_near(logits[1], logits[0].double(), 2e-5)


SPARSE_THIRD = MoeConfig(
    num_experts=4, num_chosen=2, intermediate_size=16, normalise=True, dense_layers=frozenset({0, 1, 3})
)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"qk_norm": True},
        {"qkv_bias": True},
        {"moe": SPARSE_THIRD},
        {"kept_hidden_layer": 1},
        {"windows": (None, 2, 5, 3), "moe": SPARSE_THIRD},
    ],
    ids=str,
)
def test_layers_in_one_call_give_the_bits_of_the_layers_one_by_one(kernels, changes, dtype):
    config = tiny_config(**{"num_layers": 4, **changes})
    plain = copy.copy(kernels)
    plain.fused_pass = None
    tables, seen = [[3, 1, 7], [5], [2, 8]], []
    for choice in (plain, kernels):
        decoder, kv = (
            Decoder(config, RandomSource(dtype), choice),
            PagedKV(*torch.zeros(2, 4, 9, 4, 2, 8).to(dtype), torch.zeros(9, 4, 24), windows=config.windows),
        )
        for chunks in ([(0, 9), (0, 3), (0, 6)], [(9, 1), (3, 1), (6, 2)]):
            positions = torch.cat([torch.arange(a, a + b) for a, b in chunks])
            hidden = decoder.embed(positions * 5 % 97)
            metadata = metadata_of(chunks, 4, tables)
            hidden = decoder.forward(hidden, positions[None], kv, choice.attention, metadata)
            seen.append((hidden, kv.keys.clone(), kv.values.clone(), kv.hidden.clone()))
    for one_by_one, at_once in zip(seen[:2], seen[2:], strict=True):
        assert all(map(torch.equal, one_by_one, at_once))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("changes", [{}, {"head_dim": 32, "qk_norm": True, "windows": (5, None)}], ids=str)
@pytest.mark.parametrize("num_sequences", [1, 5])
def test_decodes_in_one_call_give_the_bits_of_the_layers_one_by_one(kernels, changes, dtype, num_sequences):
    """There the attention's tasks rotate and write what is theirs, one KV head each or all."""
    pairs = changes.get("head_dim", 8) // 2
    rope = RopeConfig(theta=1e4, inv_freq=tuple(1e4 ** (-p / pairs) for p in range(pairs)))
    config = tiny_config(rope=rope, **changes)
    plain = copy.copy(kernels)
    plain.fused_pass = None
    tables, seen = [[3 * i + 1, 3 * i + 3, 3 * i + 2] for i in range(num_sequences)], []
    before = [9, 3, 6, 1, 8][:num_sequences]
    for choice in (plain, kernels):
        caches = torch.zeros(2, 2, 16, 4, 2, config.head_dim).to(dtype)
        kv = PagedKV(*caches, windows=config.windows)
        decoder = Decoder(config, RandomSource(dtype), choice)
        for chunks in ([(0, count) for count in before], [(count, 1) for count in before]):
            positions = torch.cat([torch.arange(a, a + b) for a, b in chunks])
            hidden = decoder.embed(positions * 5 % 97)
            metadata = metadata_of(chunks, 4, tables)
            hidden = decoder.forward(hidden, positions[None], kv, choice.attention, metadata)
            seen.append((hidden, kv.keys.clone(), kv.values.clone()))
    for one_by_one, at_once in zip(seen[:2], seen[2:], strict=True):
        assert all(map(torch.equal, one_by_one, at_once))


def test_selection_takes_native_where_it_runs_and_says_why_it_does_not(one_thread, monkeypatch, caplog):
    cpu = torch.device("cpu")
    assert select_kernels("auto", cpu, torch.bfloat16).name == "native"
    assert select_kernels("native", cpu, torch.float32).name == "native"
    assert select_kernels("reference", cpu, torch.float32).name == "reference"
    monkeypatch.setattr(
        "lm_engine.native.library.default_library", lambda: Unavailable("gcc is not installed")
    )
    with caplog.at_level("INFO"):
        assert select_kernels("auto", cpu, torch.float32).name == "reference"
    assert [record.message for record in caplog.records] == ["plain kernels: gcc is not installed"]
    with pytest.raises(EngineError, match="gcc is not installed"):
        select_kernels("native", cpu, torch.float32)
