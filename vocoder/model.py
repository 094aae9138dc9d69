"""The seam between the vocoder pool and a family's decoder from codec frames to PCM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from torch import Tensor


class VocoderState(Protocol):
    """What a model carries of one stream. Opaque to the pool: dropped when the stream ends."""

    @property
    def num_bytes(self) -> int: ...


S = TypeVar("S", bound=VocoderState)


@dataclass(frozen=True, eq=False)
class VocoderRow(Generic[S]):
    """The next frames of one stream: `codes_KQ` int64 [frames, code groups], on the host.

    `last` says that none follow; only then may `codes_KQ` be empty.
    """

    state: S
    codes_KQ: Tensor
    last: bool


class VocoderModel(Protocol[S]):
    """A streaming decoder. The PCM of a stream depends on its codes, voice and seed alone: not on how they
    were cut into chunks, nor on the rows beside them."""

    sample_rate: int
    samples_per_frame: int  # each frame adds as many in the long run; some are withheld until the next frame
    num_code_groups: int
    codebook_size: int  # codes are in [0, codebook_size)
    voices: tuple[str, ...]  # empty: the codes alone carry the voice

    def open(self, voice: str, seed: int) -> S:
        """The state of a new stream. `seed` fixes whatever noise the model draws."""
        ...

    def capture_graphs(self) -> int:
        """Makes ready what makes steps faster, which takes seconds; returns the number of graphs."""
        ...

    def decode(self, rows: Sequence[VocoderRow[S]]) -> list[Tensor]:
        """Advances each row by its frames: float32 PCM in [-1, 1], [samples], on the host, one per row.

        All rows advance or, when it raises, none. A state is in one row only.
        """
        ...
