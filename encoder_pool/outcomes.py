"""What one step of the encoder pool tells its stage shell."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from contracts.messages import Failed, FeaturesConsumed, FeaturesNeeded


@dataclass(frozen=True)
class Embedded:
    """Embeddings to send to `target`. Read-only, shared with other users of the same content, and kept until
    `EncoderPool.release(request_id, item_index)`, which the shell owes once per Embedded."""

    request_id: str
    item_index: int
    target: str
    embeddings: Tensor  # [num_tokens, embedding_width] on the encoder's device


EncodeOutcome = Embedded | FeaturesNeeded | FeaturesConsumed | Failed
