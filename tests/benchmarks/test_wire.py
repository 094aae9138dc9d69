"""Connections, SSE and streams: every failure has its kind, every chunk its instant."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.wire.chat_stream import StreamRecord, stream_chat
from benchmarks.wire.clock import MonotonicClock
from benchmarks.wire.connection import Address, HttpPool
from benchmarks.wire.request import ProbeFailed, RequestShape, obeyed_length, probe
from benchmarks.wire.server import counts_between, describe, parse_cache_counts
from benchmarks.wire.sse import SseDecoder
from benchmarks.wire.timing import timing_of
from tests.benchmarks.fake_server import (
    DONE,
    FakeClock,
    Reply,
    answer,
    event,
    finish,
    honest,
    role,
    serving,
    text,
    usage,
)

STREAM = b': hello\r\n\r\ndata: {"a":1}\n\nevent: error\ndata:x\ndata: y\n\nid: 3\ndata: \xc3\xa9\r\n\r\n'
SHAPE = RequestShape("m", 3)
HELLO = [b'{"role":"user","content":"hello"}']


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, len(STREAM)), max_size=8))
def test_sse_events_do_not_depend_on_how_the_bytes_were_split(cuts: list[int]) -> None:
    decoder = SseDecoder()
    bounds = [0, *sorted(cuts), len(STREAM)]
    pieces = [STREAM[a:b] for a, b in pairwise(bounds)]
    events = [found for piece in pieces for found in decoder.feed(piece)]
    assert events == [(b"", b'{"a":1}'), (b"error", b"x\ny"), (b"", "é".encode())]
    assert not decoder.pending


@pytest.mark.parametrize("url", ["http://h:81/base/v1/", "http://h:81/base", "h:81/base/v1"])
def test_an_address_is_the_same_with_and_without_v1(url: str) -> None:
    assert Address.parse(url) == Address("h", 81, tls=False, prefix="/base")


def test_an_address_of_another_scheme_is_refused() -> None:
    with pytest.raises(ValueError, match="not an http"):
        Address.parse("ftp://h")


async def ask(reply: Reply, *, clock: FakeClock | None = None, timeout_s: float = 20) -> StreamRecord:
    async with serving(lambda request: reply, clock) as server:
        pool = HttpPool(server.url, clock or MonotonicClock())
        record = await stream_chat(pool, SHAPE.body(HELLO), timeout_s)
        pool.close()
        return record


def untimed(*parts: bytes) -> list[tuple[None, bytes]]:
    return [(None, part) for part in parts]


FAILURES = [
    (Reply(untimed(b'{"error":{"message":"busy"}}'), status=503), "http_503"),
    (Reply(untimed(b"no"), status=400), "http_400"),
    (Reply(untimed(role(), text("a")), end="cut"), "truncated_stream"),
    (Reply(untimed(role(), text("a"), finish()), end="cut"), "truncated_stream"),
    (Reply(untimed(role(), text("a"))), "truncated_stream"),
    (Reply(untimed(role(), text("a"), DONE)), "missing_finish_reason"),
    (Reply(untimed(role(), text("a"), finish(None), DONE)), "missing_finish_reason"),
    (Reply(untimed(text("a"), event({"error": {"message": "broke"}}), DONE)), "error_event"),
    (Reply(untimed(text("a"), b"event: error\ndata: broke\n\n", finish(), DONE)), "error_event"),
    (Reply(untimed(text("a"), event({"error": "broke"}), finish(), DONE)), "error_event"),
    (Reply(untimed(text("a"), b"data: {\n\n", finish(), DONE)), "bad_event"),
    (Reply(untimed(text("a"), b'data: {"choices": 3}\n\n', finish(), DONE)), "bad_event"),
    (Reply(end="silent"), "connect"),
]


@pytest.mark.parametrize(("reply", "label"), FAILURES)
def test_each_failure_is_counted_by_its_kind(reply: Reply, label: str) -> None:
    record = asyncio.run(ask(reply))
    assert record.failure is not None
    assert record.failure.label == label


def test_a_stream_that_never_ends_is_a_time_out_and_its_connection_is_not_reused() -> None:
    async def scenario() -> None:
        replies = iter([Reply(untimed(role(), text("a")), end="hang"), answer(3)])
        async with serving(lambda request: next(replies)) as server:
            pool = HttpPool(server.url, MonotonicClock())
            hung = await stream_chat(pool, SHAPE.body(HELLO), 0.2)
            assert hung.failure is not None
            assert hung.failure.label == "timeout"
            assert (await stream_chat(pool, SHAPE.body(HELLO), 20)).failure is None
            assert server.num_connections == 2
            pool.close()

    asyncio.run(scenario())


def test_no_server_is_a_connect_failure() -> None:
    async def scenario() -> StreamRecord:
        async with serving() as server:
            url = server.url
        return await stream_chat(HttpPool(url, MonotonicClock()), b"{}", 20)

    record = asyncio.run(scenario())
    assert record.failure is not None
    assert record.failure.label == "connect"


def test_a_good_stream_without_done_is_good_when_it_gave_its_reason() -> None:
    record = asyncio.run(ask(Reply(untimed(text("a"), text("b"), finish("stop"), usage(5, 2)))))
    assert record.failure is None
    assert (record.text, record.finish_reason, record.num_output_tokens) == ("ab", "stop", 2)
    assert obeyed_length(record, SHAPE) is False


def test_connections_are_kept_and_a_closed_one_is_replaced() -> None:
    async def scenario() -> None:
        closing = answer(3)
        closing.close_after = True
        replies = iter([answer(3), closing, answer(3)])
        async with serving(lambda request: next(replies)) as server:
            pool = HttpPool(server.url, MonotonicClock())
            for _ in range(3):
                assert (await stream_chat(pool, SHAPE.body(HELLO), 20)).failure is None
            assert server.num_connections == 2
            pool.close()

    asyncio.run(scenario())


def test_the_key_goes_into_the_header() -> None:
    async def scenario() -> None:
        async with serving() as server:
            pool = HttpPool(server.url, MonotonicClock(), api_key="secret")
            await stream_chat(pool, SHAPE.body(HELLO), 20)
            assert server.requests[0].headers["authorization"] == "bearer secret"
            pool.close()

    asyncio.run(scenario())


def timed(*steps: tuple[float, bytes]) -> StreamRecord:
    async def scenario() -> StreamRecord:
        return await ask(Reply(list(steps)), clock=FakeClock(100.0))

    return asyncio.run(scenario())


def test_times_are_exactly_those_of_the_clock() -> None:
    record = timed(
        (100.25, role()),
        (100.5, text("a")),
        (100.75, text("b")),
        (101.75, text("c")),
        (102.0, finish() + usage(9, 3, cached=4) + DONE),
    )
    assert record.failure is None
    assert record.usage is not None
    assert record.usage.cached_tokens == 4
    timing = timing_of(record)
    assert (timing.ttft_ms, timing.tpot_ms, timing.e2e_ms) == (500.0, 625.0, 2000.0)
    assert timing.chunk_gaps_ms == timing.itls_ms == (250.0, 1000.0)
    assert not timing.spread


def test_chunks_of_several_tokens_are_spread_over_their_tokens() -> None:
    record = timed((100.5, text("ab")), (101.5, text("cd")), (101.5, finish() + usage(9, 4) + DONE))
    timing = timing_of(record)
    assert timing.chunk_gaps_ms == (1000.0,)
    assert timing.itls_ms == (500.0, 500.0)
    assert (timing.tpot_ms, timing.spread) == (500.0, True)


def test_a_running_count_says_which_chunk_had_how_many() -> None:
    record = timed(
        (100.5, text("a", 1)), (101.5, text("bcde", 5)), (102.0, text("f", 6)), (102.0, finish() + DONE)
    )
    assert [chunk.num_tokens for chunk in record.chunks] == [1, 4, 1]
    assert timing_of(record).itls_ms == (250.0, 250.0, 250.0, 250.0, 500.0)


def test_usage_on_the_last_chunk_only_is_no_running_count() -> None:
    record = timed((100.5, text("a")), (101.5, text("b", 2)), (101.5, finish() + DONE))
    assert timing_of(record).itls_ms == (1000.0,)


def test_a_running_count_that_misses_tokens_is_not_believed() -> None:
    record = timed((100.5, text("a", 1)), (101.5, text("b", 2)), (101.5, finish() + usage(9, 4) + DONE))
    assert timing_of(record).itls_ms == (500.0, 500.0)


def test_without_usage_chunks_are_counted_and_said_to_be() -> None:
    record = timed((100.5, text("a")), (100.75, text("b")), (100.75, finish() + DONE))
    assert record.usage is None
    assert record.num_output_tokens == 2
    assert obeyed_length(record, SHAPE) is None
    assert timing_of(record).tpot_ms == 250.0


def test_a_stream_without_output_has_no_first_token() -> None:
    timing = timing_of(timed((100.5, role()), (101.0, finish() + usage(3, 0) + DONE)))
    assert (timing.ttft_ms, timing.tpot_ms, timing.e2e_ms) == (None, None, 1000.0)


@pytest.mark.parametrize(
    ("rejected", "pinned", "ask_usage"),
    [((), True, True), (("ignore_eos",), False, True), (("ignore_eos", "stream_options"), False, False)],
)
def test_the_probe_drops_what_the_server_rejects(rejected: tuple, pinned: bool, ask_usage: bool) -> None:
    async def scenario() -> RequestShape:
        def strict(request):
            return Reply(status=422) if any(name in request.body for name in rejected) else honest(request)

        async with serving(strict) as server:
            pool = HttpPool(server.url, MonotonicClock())
            try:
                return await probe(pool, SHAPE, 20)
            finally:
                pool.close()

    shape = asyncio.run(scenario())
    assert (shape.pin_length, shape.ask_usage) == (pinned, ask_usage)


def test_the_probe_says_why_nothing_can_be_measured() -> None:
    async def scenario() -> None:
        async with serving(lambda request: Reply(untimed(b"loading"), status=503)) as server:
            pool = HttpPool(server.url, MonotonicClock())
            try:
                await probe(pool, SHAPE, 20)
            finally:
                assert len(server.requests) == 1
                pool.close()

    with pytest.raises(ProbeFailed, match="http_503: loading"):
        asyncio.run(scenario())


def test_extras_win_over_the_other_fields() -> None:
    body = json.loads(RequestShape(None, 5, extra_json=b'{"temperature":1,"x":[2]}').body(HELLO))
    assert body["messages"] == [{"role": "user", "content": "hello"}]
    assert (body["temperature"], body["x"], body["min_tokens"], "model" in body) == (1, [2], 5, False)


METRICS = """
# TYPE vllm:prefix_cache_queries_total counter
vllm:prefix_cache_queries_total{engine="0",model_name="m"} %d
vllm:prefix_cache_queries_total{engine="1",model_name="m"} 10
vllm:prefix_cache_queries_created{engine="0"} 1.7e9
vllm:prefix_cache_hits_total{engine="0",model_name="m"} %d
vllm:prefix_cache_hits_total{engine="1",model_name="m"} 5.0
omnistage_embedding_cache_queries_total 4
omnistage_embedding_cache_hits_total 1
prefix_cache_hits_ratio 0.5
"""


def test_cache_counters_are_summed_over_labels_and_subtracted() -> None:
    before, after = parse_cache_counts(METRICS % (100, 20)), parse_cache_counts(METRICS % (300, 120))
    counts = counts_between(before, after)
    assert set(counts) == {"prefix_cache", "embedding_cache"}
    assert (counts["prefix_cache"].hits, counts["prefix_cache"].queries) == (100, 200)
    assert counts["embedding_cache"].share is None


def test_the_server_names_its_model() -> None:
    async def scenario() -> None:
        async with serving() as server:
            pool = HttpPool(server.url, MonotonicClock())
            assert (await describe(pool, None)).model == "fake"
            assert (await describe(pool, "mine")).model == "mine"
            pool.close()

    asyncio.run(scenario())
