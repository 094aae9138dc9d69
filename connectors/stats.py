"""What an end of an edge counts, the same for every transport."""

from __future__ import annotations

from dataclasses import dataclass, field

from contracts.timings import Times


@dataclass
class EdgeStats:
    """Of a sender: `wait` has the sends that found no free credit, `transfer` the copies into the edge (a
    hand-over takes none). Of a receiver: `wait` has how long each chunk lay in the edge, `waits_total` counts
    receives that found nothing."""

    chunks_total: int = 0
    bytes_total: int = 0
    waits_total: int = 0
    wait: Times = field(default_factory=Times)
    transfer: Times = field(default_factory=Times)
