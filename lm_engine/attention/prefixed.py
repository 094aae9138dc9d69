"""Attention of an encoder-decoder over the paged KV cache: every sequence starts with `prefix` positions that
hold the keys and values of its encoder's output; tokens see those by cross-attention, the others by
self-attention.

So cross-attention KV is computed once, shares blocks like any other, and lives and dies with them.
Shapes: U token rows of a step, E prefix rows, N heads, D head size, R sequences of a group, Q query rows,
L keys, P prefix positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from lm_engine.model import AttentionMetadata, KVDtype, PagedKV
from lm_engine.transfer import to_device


@dataclass(frozen=True)
class _Group:
    """Sequences attended in one call: all that compute one token, or a single one that computes several."""

    token_RQ: Tensor  # indices into the U token rows
    key_slots_RL: Tensor  # slots of the tokens' own keys; padding repeats any
    visible_R1QL: Tensor
    prefix_slots_RP: Tensor
    prefix_starts: (
        tuple[int, ...] | None
    )  # first slot of prefixes that lie in one piece, where the host knows


@dataclass(frozen=True)
class StepRows:
    """How a step's rows divide, made once for all layers. `position_U` counts from the prefix's end."""

    metadata: AttentionMetadata
    prefix_row_E: Tensor
    token_row_U: Tensor
    position_U: Tensor
    groups: tuple[_Group, ...]

    @property
    def num_tokens(self) -> int:
        return self.token_row_U.shape[0]

    @property
    def num_prefix_rows(self) -> int:
        return self.prefix_row_E.shape[0]


class PrefixedAttention:
    """Remembers the rows of the latest step, so it serves one step at a time."""

    name = "prefixed"
    kv_dtypes: tuple[KVDtype, ...] = ("auto",)

    def __init__(self, prefix: int) -> None:
        self._prefix = prefix
        self._rows: StepRows | None = None

    def rows(self, metadata: AttentionMetadata, kv: PagedKV) -> StepRows:
        if self._rows is None or self._rows.metadata is not metadata:
            self._rows = _divide(metadata, kv.block_size, self._prefix)
        return self._rows

    def write_prefix(
        self, k_END: Tensor, v_END: Tensor, kv: PagedKV, layer: int, metadata: AttentionMetadata
    ) -> None:
        """Stores the cross-attention keys and values of the step's prefix rows."""
        _write(k_END, v_END, kv, layer, metadata, self.rows(metadata, kv).prefix_row_E)

    def attend(
        self,
        q_TND: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
        kv: PagedKV,
        layer: int,
        metadata: AttentionMetadata,
    ) -> Tensor:
        """Causal self-attention among the tokens; takes and returns the step's U token rows alone."""
        rows = self.rows(metadata, kv)
        _write(k_TGD, v_TGD, kv, layer, metadata, rows.token_row_U)
        out_UND = torch.empty_like(q_TND)
        for group in rows.groups:
            k_RNLD, v_RNLD = _gather(kv, layer, group.key_slots_RL, q_TND.dtype)
            out_UND[group.token_RQ] = _attend(q_TND[group.token_RQ], k_RNLD, v_RNLD, group.visible_R1QL)
        return out_UND

    def attend_prefix(self, q_UND: Tensor, kv: PagedKV, layer: int, metadata: AttentionMetadata) -> Tensor:
        """Cross-attention of the token rows; the prefix of each of their sequences is complete by now."""
        out_UND = torch.empty_like(q_UND)
        for group in self.rows(metadata, kv).groups:
            for part, k_RNLD, v_RNLD in self._prefixes(kv, layer, group, q_UND.dtype):
                out_UND[group.token_RQ[part]] = _attend(q_UND[group.token_RQ[part]], k_RNLD, v_RNLD, None)
        return out_UND

    def _prefixes(
        self, kv: PagedKV, layer: int, group: _Group, dtype: torch.dtype
    ) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Parts of the group with their prefix keys and values: views, one by one, where they lie in one
        piece."""
        if group.prefix_starts is None:
            yield slice(None), *_gather(kv, layer, group.prefix_slots_RP, dtype)
            return
        for row, start in enumerate(group.prefix_starts):
            k_1NPD, v_1NPD = (
                cache[layer].flatten(0, 1)[start : start + self._prefix].to(dtype).transpose(0, 1)[None]
                for cache in (kv.keys, kv.values)
            )
            yield slice(row, row + 1), k_1NPD, v_1NPD


def _write(k: Tensor, v: Tensor, kv: PagedKV, layer: int, metadata: AttentionMetadata, row: Tensor) -> None:
    slots = metadata.slot_mapping[row]
    kv.keys[layer].flatten(0, 1).index_copy_(0, slots, k.to(kv.keys.dtype))
    kv.values[layer].flatten(0, 1).index_copy_(0, slots, v.to(kv.values.dtype))


def _gather(kv: PagedKV, layer: int, slots_RL: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys and values as [R, N, L, D]."""
    keys, values = (
        cache[layer].flatten(0, 1)[slots_RL].to(dtype).transpose(1, 2) for cache in (kv.keys, kv.values)
    )
    return keys, values


def _attend(q_RQND: Tensor, k_RNLD: Tensor, v_RNLD: Tensor, visible: Tensor | None) -> Tensor:
    out_RNQD = functional.scaled_dot_product_attention(
        q_RQND.transpose(1, 2), k_RNLD, v_RNLD, attn_mask=visible
    )
    return out_RNQD.transpose(1, 2)


@dataclass(frozen=True)
class _Tokens:
    """A sequence's tokens in this step: `count` of them from the U row `first`; `length` tokens by their
    end."""

    sequence: int
    first: int
    count: int
    length: int


def _divide(metadata: AttentionMetadata, block_size: int, prefix: int) -> StepRows:
    starts = metadata.host_query_starts
    prefix_rows: list[np.ndarray] = []
    token_rows: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    tokens: list[_Tokens] = []
    num_tokens = 0
    for sequence, length in enumerate(metadata.host_sequence_lengths):
        begin, end = starts[sequence], starts[sequence + 1]
        count = min(end - begin, max(0, length - prefix))
        prefix_rows.append(np.arange(begin, end - count))
        token_rows.append(np.arange(end - count, end))
        positions.append(np.arange(length - prefix - count, length - prefix))
        if count:
            tokens.append(_Tokens(sequence, num_tokens, count, length - prefix))
            num_tokens += count
    device = metadata.block_tables.device
    singles = [t for t in tokens if t.count == 1]
    together = [[t] for t in tokens if t.count > 1] + ([singles] if singles else [])
    prefix_row_E, token_row_U, position_U = (
        to_device(np.concatenate(parts), device) for parts in (prefix_rows, token_rows, positions)
    )
    groups = tuple(_make_group(metadata, block_size, prefix, group) for group in together)
    return StepRows(metadata, prefix_row_E, token_row_U, position_U, groups)


def _make_group(
    metadata: AttentionMetadata, block_size: int, prefix: int, tokens: Sequence[_Tokens]
) -> _Group:
    device = metadata.block_tables.device
    table = np.array([(t.sequence, t.first, t.length) for t in tokens], dtype=np.int64)
    sequence_R, first_R, length_R = to_device(table.T.copy(), device).unbind(0)
    num_queries, num_keys = tokens[0].count, max(t.length for t in tokens)
    query_Q = torch.arange(num_queries, device=device)
    key_L = torch.arange(num_keys, device=device)
    last_visible_RQ = length_R[:, None] - num_queries + query_Q
    # Padding beyond a sequence's end reads its last key, and is masked.
    index_RL = prefix + torch.minimum(key_L, length_R[:, None] - 1)
    blocks_RM = metadata.block_tables[sequence_R].long()
    prefix_P = torch.arange(prefix, device=device)
    prefix_slots_RP = blocks_RM[:, prefix_P // block_size] * block_size + prefix_P % block_size
    return _Group(
        token_RQ=first_R[:, None] + query_Q,
        key_slots_RL=blocks_RM.gather(1, index_RL // block_size) * block_size + index_RL % block_size,
        visible_R1QL=(key_L <= last_visible_RQ[..., None])[:, None],
        prefix_slots_RP=prefix_slots_RP,
        prefix_starts=_starts_in_one_piece(prefix_slots_RP),
    )


def _starts_in_one_piece(slots_RP: Tensor) -> tuple[int, ...] | None:
    """None on a device, where asking would wait for it, and where any prefix lies scattered."""
    if slots_RP.device.type != "cpu" or not bool((slots_RP.diff(dim=1) == 1).all()):
        return None
    return tuple(slots_RP[:, 0].tolist())
