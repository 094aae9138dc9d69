"""What a request's stages say reaches its reader in order, and several steps at once when it fell behind."""

from __future__ import annotations

import asyncio

from contracts.errors import EngineError
from contracts.messages import Audio, Generated, SampleDelta
from stages.inflight import RequestEvents


def tokens(*ids: int, cached: int | None = None) -> Generated:
    deltas = tuple(SampleDelta(sample=0, token_ids=(token,)) for token in ids)
    return Generated(request_id="r", deltas=deltas, num_cached_tokens=cached)


def test_a_reader_that_fell_behind_gets_the_steps_since_at_once() -> None:
    sound, error = Audio(request_id="r", pcm=b""), EngineError("lost")
    events = RequestEvents()
    for event in (tokens(1, cached=7), tokens(2), tokens(3), sound, tokens(4), error, tokens(5)):
        events.put(event)
    heard = [asyncio.run(events.next()) for _ in range(5)]
    assert heard == [tokens(1, 2, 3, cached=7), sound, tokens(4), error, tokens(5)]
    assert not events


def test_a_reader_that_keeps_up_gets_every_step() -> None:
    async def read() -> None:
        events = RequestEvents()
        for step in (tokens(1), tokens(2)):
            reading = asyncio.create_task(events.next())
            await asyncio.sleep(0)  # it waits now
            events.put(step)
            assert await reading is step

    asyncio.run(read())
