"""Attention of mixed steps in shares of equal work: the plan and the merge of parts against dense attention,
and on a Hopper GPU the walk itself. Collected through test_triton.py."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest
import torch

from lm_engine.attention.mixed import LOG2_E
from lm_engine.attention.reference import write_kv
from lm_engine.attention.triton import TritonAttention
from lm_engine.attention.walks import Plan, Walks, WalkTile
from lm_engine.layers.kernels import HeadShape
from lm_engine.model import AttentionMetadata
from lm_engine.triton.jit.walks import CHUNK_COST, NARROW_COST, SLACK, TILE_COST
from lm_engine.triton.launch import next_power
from tests.lm_engine.test_attention import Case
from tests.lm_engine.triton_cases import DEVICE, LENGTHS, assert_near, assert_near_sum, on_device

KEYS = 64
LN_2 = math.log(2)


def on_hopper() -> bool:
    return DEVICE.type == "cuda" and torch.cuda.get_device_capability() == (9, 0)


def metadata_of(counts: list[int], contexts: list[int]) -> AttentionMetadata:
    starts = torch.tensor([0, *counts], dtype=torch.int32, device=DEVICE).cumsum(0).int()
    lengths = torch.tensor(
        [old + new if new else 0 for new, old in zip(counts, contexts, strict=True)],
        dtype=torch.int32,
        device=DEVICE,
    )
    return AttentionMetadata(starts, lengths, starts, starts, 2, 1 << 16, (), ())


def items_of(plan: Plan) -> list[list[list[int]]]:
    """Of each program."""
    items, ranges = plan.items_IF.tolist(), plan.ranges_W.tolist()
    assert ranges[0] == 0
    return [items[first:end] for first, end in pairwise(ranges)]


@pytest.mark.parametrize("num_programs", [1, 7, 132])
@pytest.mark.parametrize("heads", [HeadShape(16, 2, 64), HeadShape(6, 2, 64), HeadShape(4, 4, 64)])
@pytest.mark.parametrize("seed", range(3))
def test_every_query_meets_each_key_once_and_shares_are_equal(num_programs, heads, seed):
    rng = random.Random(seed)
    counts = [1 + 799 * (seed == 0), *rng.choices([0, 1, 1, 3, 8, 9, 17, 150], k=8)]
    contexts = rng.choices([0, 5, 63, 64, 300, 700], k=9)
    block_h = next_power(heads.num_heads // heads.num_kv_heads)
    least, metadata = 2, metadata_of(counts, contexts)
    tile = WalkTile(keys=KEYS, least_blocks=least)
    num_used = sum(counts)
    plan = Walks(num_programs, tile).plan(num_used + 5, heads, 0, metadata)
    met: dict[tuple[int, int], list[tuple[int, int]]] = {}
    parts: dict[int, tuple[int, int]] = {}
    places, distances, numbers = plan.tokens_3GT.tolist()
    loads = []
    for items in items_of(plan):
        loads.append(0)
        for _, token, queries, _, group, first, end, num_parts, place, *_ in items:
            assert end > first
            ways = 2 if queries * block_h <= 64 else 1
            cost = NARROW_COST if ways == 2 else CHUNK_COST
            loads[-1] += -(-(end - first) // KEYS) * cost
            for query in range(queries):
                at = (token + query, group)
                met.setdefault(at, []).append((first, end))
                assert num_parts == numbers[group][token + query]
                for way in range(ways if num_parts > 1 else 0):
                    row = place + way * queries + query
                    index = (row - places[group][token + query]) / distances[group][token + query]
                    assert index in range(num_parts)
                    assert row < plan.num_part_rows
                    assert parts.setdefault(row, at) is at
    token = 0
    for count, old in zip(counts, contexts, strict=True):
        for query in range(count):
            for group in range(heads.num_kv_heads):
                ends = [0, *sorted(end for _, end in met[token, group])]
                assert sorted(met[token, group]) == list(pairwise(ends))
                assert ends[-1] > old + query
            token += 1
    for group in range(heads.num_kv_heads):
        assert numbers[group][num_used:] == [0] * 5
    num_tiles = sum(-(-count // (128 // block_h)) for count in counts) * heads.num_kv_heads
    share = max((sum(loads) + num_tiles * TILE_COST) / num_programs + 1, least * CHUNK_COST)
    slack = share / SLACK + CHUNK_COST
    assert max(loads) <= share + 2 * slack + CHUNK_COST


def walk_plainly(
    plan: Plan, q_TND: torch.Tensor, kv: object, metadata: AttentionMetadata, out_TND: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `attend_walks` leaves: results, and sums and stats of parts."""
    num_heads, head_dim = q_TND.shape[1:]
    num_groups = kv.keys.shape[3]
    per_group = num_heads // num_groups
    block_h = next_power(per_group)
    sums = torch.full((plan.num_part_rows, block_h, head_dim), torch.nan, device=DEVICE)
    stats = torch.full((plan.num_part_rows, block_h, 2), torch.nan, device=DEVICE)
    for items in items_of(plan):
        for row, token, queries, seen, group, first, end, num_parts, place, *_ in items:
            key = torch.arange(first, end, device=DEVICE)
            blocks = metadata.block_tables[row].long()
            slots = blocks[key // kv.block_size] * kv.block_size + key % kv.block_size
            k_LD, v_LD = (cache[1].flatten(0, 1)[slots, group] for cache in (kv.keys, kv.values))
            heads = slice(group * per_group, (group + 1) * per_group)
            scores = torch.einsum("qhd,ld->qhl", q_TND[token : token + queries, heads], k_LD)
            scores *= head_dim**-0.5 * LOG2_E
            own = torch.arange(seen, seen + queries, device=DEVICE)
            scores[(key > own[:, None])[:, None].expand_as(scores)] = -torch.inf
            if num_parts == 1:
                out_TND[token : token + queries, heads] = scores.mul(LN_2).softmax(-1) @ v_LD
                continue
            ways = 2 if queries * block_h <= 64 else 1
            for way in range(ways):
                theirs = torch.where((key - first) // KEYS % ways == way, scores, -torch.inf)
                best = theirs.amax(-1)
                weights = (theirs - best.clamp_min(-1e30)[..., None]).exp2()
                there = slice(place + way * queries, place + (way + 1) * queries)
                sums[there, :per_group] = weights @ v_LD
                stats[there, :per_group] = torch.stack([best, weights.sum(-1)], -1)
    return sums, stats


@pytest.mark.parametrize("mix", ["mixed", "decodes", "long"])
@pytest.mark.parametrize("num_programs", [1, 20])
@pytest.mark.parametrize(("heads", "groups"), [(6, 2), (16, 2)])
def test_parts_add_up_to_dense_attention(mix, num_programs, heads, groups):
    """Rows that belong to no sequence follow."""
    case = on_device(Case(LENGTHS[mix], heads=heads, groups=groups, head_dim=64, block_size=16))
    num_used = len(case.q_TND)
    walks, shape = Walks(num_programs, WalkTile(keys=KEYS)), HeadShape(heads, groups, 64)
    plan = walks.plan(num_used + 3, shape, 1, case.metadata)
    write_kv(case.k_TGD, case.v_TGD, case.kv, 1, case.metadata)
    out_TND = torch.full((num_used + 3, heads, 64), torch.nan, device=DEVICE)
    sums, stats = walk_plainly(plan, case.q_TND, case.kv, case.metadata, out_TND)
    walks.merge(plan, sums, stats, out_TND.flatten(1), shape)
    assert_near(out_TND[:num_used], case.dense(), torch.float32)
    assert not out_TND[num_used:].any()


@pytest.mark.skipif(not on_hopper(), reason="needs a Hopper GPU")
@pytest.mark.parametrize("mix", ["mixed", "decodes", "long"])
@pytest.mark.parametrize("tile", [WalkTile(), WalkTile(keys=128, num_stages=2)])
@pytest.mark.parametrize("num_programs", [1, 20, 132])
@pytest.mark.parametrize(("heads", "groups", "head_dim"), [(16, 2, 128), (6, 2, 64), (4, 4, 128)])
@pytest.mark.parametrize("block_size", [16, 64])
def test_a_walk_equals_dense_attention(mix, tile, num_programs, heads, groups, head_dim, block_size):
    shape = {"heads": heads, "groups": groups, "head_dim": head_dim, "block_size": block_size}
    case = on_device(Case(LENGTHS[mix], **shape, dtype=torch.bfloat16))
    found, _ = case.attend(TritonAttention(DEVICE, walks=Walks(num_programs, tile)))
    expected = case.dense()
    case.v_TGD, case.history = case.v_TGD.abs(), [[keys, values.abs()] for keys, values in case.history]
    assert_near_sum(found, expected, case.dense(), torch.bfloat16)
