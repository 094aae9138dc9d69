"""Draws the residual codes of a frame one group after another, for all sequences of a step at once.

Shapes: S sequences, H hidden, Q code groups, V codes of a residual group.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from lm_engine.decoder import DecoderStack, Turns
from lm_engine.layers.kernels import Linear
from lm_engine.memory import allocate_kv
from lm_engine.model import AttentionMetadata, PagedKV
from lm_engine.talker.model import Draw

BLOCK_SIZE = 16


class CodePredictor:
    """A decoder over the Q positions of one frame: the talker's hidden state, then the codes so far. Group
    g ≥ 1 has its own head, and its own embedding `tables[g - 1]` [V, H].

    Its KV lives for one frame: each sequence of a step has the same few blocks in every step.
    """

    def __init__(self, stack: DecoderStack, tables: list[Tensor], heads: list[Linear]) -> None:
        assert len(tables) == len(heads) >= 1, "an embedding and a head for each residual group"
        self._stack, self._heads = stack, heads
        self.num_groups = len(tables) + 1
        self._tables_GVH = torch.stack(tables)
        num_codes = tables[0].shape[0]
        self._offset_G = torch.arange(len(tables), device=stack.device) * num_codes
        self._blocks_each = -(-self.num_groups // BLOCK_SIZE)
        self._kv: PagedKV | None = None
        self._places: dict[tuple[int, int], tuple[AttentionMetadata, Turns]] = {}

    def reserve(self, max_sequences: int) -> None:
        stack = self._stack
        num_blocks = 1 + max_sequences * self._blocks_each
        self._kv = allocate_kv(stack.config, num_blocks, BLOCK_SIZE, stack.dtype, stack.device)
        self._places.clear()

    def complete(self, hidden_SH: Tensor, embedded_SH: Tensor, code_S: Tensor, draw: Draw) -> Tensor:
        """[S, Q]: `code_S` of the first group, whose embedding is `embedded_SH`, and the codes that
        follow."""
        num_sequences = hidden_SH.shape[0]
        codes = [code_S]
        input_TH = torch.stack([hidden_SH, embedded_SH], dim=1).flatten(0, 1)
        for group in range(1, self.num_groups):
            output_TH = self._run(input_TH, num_sequences, group + 1)
            last_SH = output_TH[1::2] if group == 1 else output_TH
            code_S = draw(self._heads[group - 1](last_SH), group)
            codes.append(code_S)
            if group + 1 < self.num_groups:
                input_TH = self.embed(code_S, group)
        return torch.stack(codes, dim=1)

    def embed(self, code_S: Tensor, group: int) -> Tensor:
        embedded_SH = functional.embedding(code_S, self._tables_GVH[group - 1])
        return embedded_SH.to(self._stack.activation_dtype)

    def embed_all(self, codes_RG: Tensor) -> Tensor:
        """[R, H]: the sum of the embeddings of all residual codes of a frame."""
        bags_RG = codes_RG + self._offset_G
        summed_RH = functional.embedding_bag(bags_RG, self._tables_GVH.flatten(0, 1), mode="sum")
        return summed_RH.to(self._stack.activation_dtype)

    def _run(self, input_TH: Tensor, num_sequences: int, length: int) -> Tensor:
        """Computes the positions up to `length` that are not computed yet: two at first, then one."""
        assert self._kv is not None, "reserve comes first"
        stack = self._stack
        metadata, turns = self._place(num_sequences, length)
        return stack.forward_turned(input_TH, turns, self._kv, stack.attention, metadata)

    def _place(self, num_sequences: int, length: int) -> tuple[AttentionMetadata, Turns]:
        """The same for every frame, so made once."""
        key = (num_sequences, length)
        if key not in self._places:
            metadata = self._make_addresses(num_sequences, length)
            first = length - metadata.max_query_length
            position_P = torch.arange(first, length, device=self._stack.device)
            self._places[key] = metadata, self._stack.turns(position_P.repeat(num_sequences)[None])
        return self._places[key]

    def _make_addresses(self, num_sequences: int, length: int) -> AttentionMetadata:
        device, blocks_each = self._stack.device, self._blocks_each
        num_new = 2 if length == 2 else 1
        first_block_S = 1 + torch.arange(num_sequences, device=device) * blocks_each
        block_tables_SM = first_block_S[:, None] + torch.arange(blocks_each, device=device)
        index_N = torch.arange(length - num_new, length, device=device)
        slots_SN = first_block_S[:, None] * BLOCK_SIZE + index_N
        starts_R = torch.arange(num_sequences + 1, dtype=torch.int32, device=device) * num_new
        return AttentionMetadata(
            query_starts=starts_R,
            sequence_lengths=torch.full((num_sequences,), length, dtype=torch.int32, device=device),
            block_tables=block_tables_SM.int(),
            slot_mapping=slots_SN.flatten(),
            max_query_length=num_new,
            max_sequence_length=length,
            host_query_starts=tuple(range(0, (num_sequences + 1) * num_new, num_new)),
            host_sequence_lengths=(length,) * num_sequences,
        )
