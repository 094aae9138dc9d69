"""Paged attention: batched against one sequence at a time, and that against dense attention."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from lm_engine.attention.quantised import quantise
from lm_engine.attention.reference import MAX_PADDED_QUERIES, BatchedAttention, SequenceAttention
from lm_engine.model import AttentionMetadata, PagedKV

torch.set_num_threads(1)


class Case:
    """Random sequences with given (computed before, this step) lengths over shuffled blocks."""

    def __init__(
        self, lengths, *, block_size, heads=6, groups=2, head_dim=8, dtype=torch.float32, seed=0, window=None
    ):
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape):
            return torch.randn(shape, generator=generator).to(dtype)

        counts = [new for _, new in lengths]
        totals = [old + new for old, new in lengths]
        num_blocks = [-(-total // block_size) for total in totals]
        blocks = list(range(1, sum(num_blocks) + 1))
        random.Random(seed).shuffle(blocks)
        tables = torch.zeros(len(lengths), max(num_blocks), dtype=torch.int32)
        caches = (normal(2, sum(num_blocks) + 1, block_size, groups, head_dim) for _ in range(2))
        self.kv = PagedKV(*caches, windows=(None, window))
        self.history, slots = [], []
        for row, (old, new) in enumerate(lengths):
            own = [blocks.pop() for _ in range(num_blocks[row])]
            tables[row, : len(own)] = torch.tensor(own)
            places = [own[i // block_size] * block_size + i % block_size for i in range(old + new)]
            slots += places[old:]
            flat = [cache[1].flatten(0, 1)[places[:old]] for cache in (self.kv.keys, self.kv.values)]
            self.history.append(flat)
        starts = [0, *torch.tensor(counts).cumsum(0).tolist()]
        self.q_TND = normal(starts[-1], heads, head_dim)
        self.k_TGD, self.v_TGD = normal(starts[-1], groups, head_dim), normal(starts[-1], groups, head_dim)
        self.metadata = AttentionMetadata(
            query_starts=torch.tensor(starts, dtype=torch.int32),
            sequence_lengths=torch.tensor(totals, dtype=torch.int32),
            block_tables=tables,
            slot_mapping=torch.tensor(slots),
            max_query_length=max(counts),
            max_sequence_length=max(totals),
            host_query_starts=tuple(starts),
            host_sequence_lengths=tuple(totals),
        )

    def attend(self, backend, *, quantised=False):
        kv = quantise_cache(self.kv) if quantised else copy_of(self.kv)
        return backend.attend(self.q_TND, self.k_TGD, self.v_TGD, kv, 1, self.metadata), kv

    def dense(self):
        """Softmax written out, one sequence and one head at a time, in float64."""
        outputs = []
        starts = self.metadata.host_query_starts
        for row, (old_keys, old_values) in enumerate(self.history):
            part = slice(starts[row], starts[row + 1])
            keys = torch.cat([old_keys, self.k_TGD[part]]).double()
            values = torch.cat([old_values, self.v_TGD[part]]).double()
            queries = self.q_TND[part].double()
            per_group = queries.shape[1] // keys.shape[1]
            out = torch.empty_like(queries)
            for i in range(len(queries)):
                seen = len(old_keys) + i + 1
                first = max(0, seen - (self.kv.window(1) or seen))
                for head in range(queries.shape[1]):
                    group = head // per_group
                    scores = keys[first:seen, group] @ queries[i, head] / queries.shape[2] ** 0.5
                    out[i, head] = scores.softmax(0) @ values[first:seen, group]
            outputs.append(out)
        return torch.cat(outputs)


def copy_of(kv):
    return dataclasses.replace(kv, keys=kv.keys.clone(), values=kv.values.clone())


def quantise_cache(kv):
    """The same cache in e4m3."""
    (keys, key_exponents), (values, value_exponents) = quantise(kv.keys), quantise(kv.values)
    return PagedKV(keys, values, None, key_exponents, value_exponents, kv.windows)


LONG = MAX_PADDED_QUERIES + 7
MIXES = {
    "decodes": [(5, 1), (0, 1), (33, 1), (12, 1)],
    "one decode": [(9, 1)],
    "prefills": [(0, 3), (0, LONG), (0, 1)],
    "chunks": [(4, 7), (11, LONG), (1, 2)],
    "mixed": [(40, 1), (0, LONG), (3, 5), (16, 1), (8, MAX_PADDED_QUERIES)],
}


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("backend", [SequenceAttention, BatchedAttention])
def test_equals_dense_attention(mix, block_size, backend):
    case = Case(MIXES[mix], block_size=block_size)
    found, _ = case.attend(backend())
    torch.testing.assert_close(found.double(), case.dense(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("mix", ["decodes", "chunks", "mixed"])
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("window", [1, 5, 12, 60])
@pytest.mark.parametrize("backend", [SequenceAttention, BatchedAttention])
def test_a_window_hides_what_lies_before_it(mix, block_size, window, backend):
    case = Case(MIXES[mix], block_size=block_size, window=window)
    found, _ = case.attend(backend())
    torch.testing.assert_close(found.double(), case.dense(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("backend", [SequenceAttention, BatchedAttention])
def test_layers_of_a_step_may_differ_in_their_windows(backend):
    case, attention = Case(MIXES["mixed"], block_size=4), backend()
    for window in (None, 6, None, 9):
        case.kv.windows = (None, window)
        found, _ = case.attend(attention)
        torch.testing.assert_close(found.double(), case.dense(), atol=1e-5, rtol=0)


@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 1), (9, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_batched_equals_one_at_a_time(heads, groups, dtype):
    case = Case(MIXES["mixed"], block_size=4, heads=heads, groups=groups, dtype=dtype)
    plain, plain_kv = case.attend(SequenceAttention())
    batched, batched_kv = case.attend(BatchedAttention())
    tolerance = 1e-5 if dtype is torch.float32 else 0.02
    torch.testing.assert_close(batched, plain, atol=tolerance, rtol=0)
    assert torch.equal(plain_kv.keys, batched_kv.keys)
    assert torch.equal(plain_kv.values, batched_kv.values)


@pytest.mark.parametrize("backend", [SequenceAttention, BatchedAttention])
def test_writes_only_the_steps_slots_of_its_layer(backend):
    case = Case(MIXES["mixed"], block_size=4)
    _, kv = case.attend(backend())
    slots = case.metadata.slot_mapping
    assert torch.equal(kv.keys[1].flatten(0, 1)[slots], case.k_TGD)
    assert torch.equal(kv.values[1].flatten(0, 1)[slots], case.v_TGD)
    assert torch.equal(kv.keys[0], case.kv.keys[0])
    others = torch.ones(kv.keys[1].flatten(0, 1).shape[0], dtype=torch.bool)
    others[slots] = False
    assert torch.equal(kv.keys[1].flatten(0, 1)[others], case.kv.keys[1].flatten(0, 1)[others])


def test_a_new_step_makes_a_new_schedule():
    backend = BatchedAttention()
    for seed, mix in enumerate(MIXES.values()):
        case = Case(mix, block_size=4, seed=seed)
        found, _ = case.attend(backend)
        torch.testing.assert_close(found.double(), case.dense(), atol=1e-5, rtol=0)


def test_unwritten_tails_of_blocks_do_not_leak():
    """Values beyond a sequence's end (another's leavings) change nothing."""
    case = Case(MIXES["chunks"], block_size=16)
    clean, _ = case.attend(BatchedAttention())
    used = case.metadata.slot_mapping.tolist()
    for row, (old, new) in enumerate(MIXES["chunks"]):
        table = case.metadata.block_tables[row].tolist()
        used += [table[i // 16] * 16 + i % 16 for i in range(old + new)]
    tails = torch.ones(case.kv.keys[1].flatten(0, 1).shape[0], dtype=torch.bool)
    tails[used] = False
    assert tails.any()
    for cache in (case.kv.keys, case.kv.values):
        cache[1].flatten(0, 1)[tails] = 1e4
    for backend in (BatchedAttention(), SequenceAttention()):
        found, _ = case.attend(backend)
        torch.testing.assert_close(found, clean, atol=1e-5, rtol=0)
