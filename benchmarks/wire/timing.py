"""From the chunks of one stream to TTFT, TPOT and per-token gaps. Milliseconds."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from benchmarks.wire.chat_stream import StreamRecord


@dataclass(frozen=True)
class StreamTiming:
    """`ttft_ms` and `tpot_ms` are None for streams without output and of one chunk."""

    ttft_ms: float | None
    tpot_ms: float | None
    e2e_ms: float
    chunk_gaps_ms: tuple[float, ...]
    itls_ms: tuple[float, ...]
    spread: bool
    """Some chunk carried several tokens: gaps between tokens are not what was seen on the wire."""


def timing_of(record: StreamRecord) -> StreamTiming:
    chunks = record.chunks
    e2e_ms = (record.ended_s - record.started_s) * 1e3
    if not chunks:
        return StreamTiming(None, None, e2e_ms, (), (), spread=False)
    per_chunk = tokens_per_chunk(record)
    gaps_ms = tuple((later.at_s - earlier.at_s) * 1e3 for earlier, later in pairwise(chunks))
    itls_ms = tuple(
        gap / count for gap, count in zip(gaps_ms, per_chunk[1:], strict=True) for _ in range(count)
    )
    num_timed = sum(per_chunk[1:])
    span_ms = (chunks[-1].at_s - chunks[0].at_s) * 1e3
    return StreamTiming(
        ttft_ms=(chunks[0].at_s - record.started_s) * 1e3,
        tpot_ms=span_ms / num_timed if num_timed else None,
        e2e_ms=e2e_ms,
        chunk_gaps_ms=gaps_ms,
        itls_ms=itls_ms,
        spread=max(per_chunk) > 1,
    )


def tokens_per_chunk(record: StreamRecord) -> tuple[int, ...]:
    """At least one each: the server's running count where every chunk has it, else an even spread."""
    counts = [chunk.num_tokens for chunk in record.chunks]
    if all(count is not None for count in counts) and sum(filter(None, counts)) == record.num_output_tokens:
        return tuple(max(1, count or 0) for count in counts)
    num_chunks = len(record.chunks)
    total = max(record.num_output_tokens, num_chunks)
    return tuple((i + 1) * total // num_chunks - i * total // num_chunks for i in range(num_chunks))
