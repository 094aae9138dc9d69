"""Where a waiting sequence can begin: on blocks of the prefix cache, or on those of another sample."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lm_engine.config import EngineConfig
from lm_engine.plan import SequenceStep
from lm_engine.prefix_cache import PrefixCache
from lm_engine.sequence import Request, Sequence, State


@dataclass(slots=True)
class Start:
    """`position` tokens need no computing: `blocks` are shared (no reference is taken yet), and the block of
    `copy_from`, if any, is copied into the next one."""

    position: int = 0
    blocks: list[int] = field(default_factory=list)
    identities: list[int] = field(default_factory=list)
    copy_from: int | None = None


class StartFinder:
    def __init__(self, config: EngineConfig, cache: PrefixCache) -> None:
        self._config = config
        self._cache = cache

    def find(
        self, seq: Sequence, rows: Mapping[Sequence, SequenceStep], fresh: Mapping[Sequence, None]
    ) -> Start:
        """`rows`, `fresh`: of the step being planned. What it computes may not be shared before the next."""
        start = self._cached(seq)
        forked = self._forked(seq, rows, fresh)
        return forked if forked is not None and forked.position > start.position else start

    def _cached(self, seq: Sequence) -> Start:
        """The prefix cache's share. The last token is never served from it: its logits are wanted."""
        if not self._config.prefix_cache:
            return Start()
        size = self._config.block_size
        num_blocks = (len(seq.token_ids) - 1) // size
        hits = self._cache.lookup(seq.contents(0, num_blocks, size))
        if self._config.atomic_spans:
            while hits and _splits_span(seq.request, len(hits) * size):
                hits.pop()
        return Start(len(hits) * size, [hit.block for hit in hits], [hit.identity for hit in hits])

    def _forked(
        self, seq: Sequence, rows: Mapping[Sequence, SequenceStep], fresh: Mapping[Sequence, None]
    ) -> Start | None:
        """From a sample of the same request whose prompt KV stood before this step: share its full blocks
        before the last prompt token, copy that token's block, compute that token again."""
        request = seq.request
        last = request.num_prompt - 1
        if len(request.sequences) == 1 or (self._config.atomic_spans and _splits_span(request, last)):
            return None
        for donor in request.sequences:
            # A copy of a copy made in the same step would read the block before it is written.
            if donor is seq or donor.state is not State.RUNNING or donor in fresh:
                continue
            row = rows.get(donor)
            if (donor.num_computed if row is None else row.start) < last:
                continue
            num_shared, in_block = divmod(last, self._config.block_size)
            return Start(
                position=last,
                blocks=donor.block_ids[:num_shared],
                identities=donor.identities[:num_shared],
                copy_from=donor.block_ids[num_shared] if in_block else None,
            )
        return None


def _splits_span(request: Request, position: int) -> bool:
    span = request.media.span_at(position)
    return span is not None and span.offset < position
