"""Counters of one edge, the same for every transport."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class EdgeStats:
    """Of a sender: `waits` are sends that found no free credit, `transfer` is the copy into the edge (a
    hand-over takes none). Of a receiver: `wait` is the time chunks lay in the edge, `waits` receives that
    found nothing."""

    chunks_total: int = 0
    bytes_total: int = 0
    waits_total: int = 0
    wait_seconds_total: float = 0.0
    transfer_seconds_total: float = 0.0
