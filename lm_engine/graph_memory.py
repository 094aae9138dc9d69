"""What the CUDA graphs of a decoder will hold of its device, from shapes alone.

Graphs of one kind share memory (`contracts.capture.GraphPool`): the largest step's activations, and what each
graph leaves for others to read.
"""

from __future__ import annotations

import torch

from lm_engine.graphs import BATCH_SIZES, step_kinds
from lm_engine.model import DecoderConfig
from lm_engine.passes import SHORT_LENGTH, TOKEN_SIZES, pass_shapes

_SCRATCH_BYTES = 64 << 20  # of kernels that cut a sum into parts, and of the library


def planned_graph_bytes(config: DecoderConfig, dtype: torch.dtype, *, max_sequences: int) -> int:
    """Decode steps of all batch sizes, each with logits of its own, and mixed steps."""
    gated = config.picture_adapter is not None
    kinds = step_kinds(min(max_sequences, BATCH_SIZES[-1]), gated=gated)
    logits = sum(kind.size for kind in kinds) * config.vocab_size * 4
    hidden, moe = config.hidden_size, config.moe
    width = 3 * config.intermediate_size  # gate, up, and their product
    if moe is not None:  # sorted rows, and put back in float32
        width = max(width, moe.num_chosen * (6 * hidden + moe.intermediate_size))
    activations = TOKEN_SIZES[-1] * (width + 4 * hidden)
    shapes = pass_shapes(TOKEN_SIZES[-1], SHORT_LENGTH + 1, gated=gated)  # as many as of any longer context
    results = sum(shape.num_tokens for shape in shapes) * hidden
    return logits + (activations + results) * dtype.itemsize + _SCRATCH_BYTES
