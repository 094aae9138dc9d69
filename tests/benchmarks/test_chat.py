"""The chat benchmark against a scripted server: what it sends, what it counts, what it writes."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from benchmarks import cli
from benchmarks.chat.command import measure
from benchmarks.chat.load import LoadResult, TurnResult, poisson_arrivals
from benchmarks.chat.metrics import (
    cache_of,
    failures_of,
    goodput_of,
    latency_of,
    row_of,
    throughput_of,
    time_turns,
    tokens_of,
    ttft_by_turn,
    warnings_of,
)
from benchmarks.chat.options import ChatOptions, build_parser, command_line, options_of
from benchmarks.chat.overhead import NUM_STEPS, measure_overhead
from benchmarks.chat.page import charts_of, render_page, write_page
from benchmarks.chat.prefixes import Expectation
from benchmarks.chat.result import SCHEMA, ChatReport, UnreadableReport, decode_report, encode_report
from benchmarks.chat.slo import Floor, Slo, parse_duration_ms
from benchmarks.chat.table import format_comparison, format_report
from benchmarks.samples import percentile, summarize
from benchmarks.wire.chat_stream import Failure, PromptDetails, StreamChunk, StreamRecord, Usage
from benchmarks.wire.request import RequestShape
from tests.benchmarks.fake_server import (
    DONE,
    FakeClock,
    FakeServer,
    IdleClock,
    Reply,
    Request,
    answer,
    finish,
    honest,
    models,
    role,
    serving,
    serving_in_thread,
    text,
)

SMALL = ["--sessions", "3", "--warmup", "1", "--image-size", "16x16", "--output-tokens", "3", "--no-overhead"]


def options(url: str, *more: str) -> ChatOptions:
    argv = ["--url", url, *SMALL, *more]
    return options_of(build_parser().parse_args(argv), argv)


def measured(respond: Callable[[Request], Reply], *more: str) -> tuple[ChatReport, FakeServer]:
    async def scenario() -> tuple[ChatReport, FakeServer]:
        async with serving(respond) as server:
            return await measure(options(server.url, *more), IdleClock()), server

    return asyncio.run(scenario())


def test_a_run_sends_warm_up_then_every_turn_and_reports_the_measured_ones() -> None:
    report, server = measured(honest, "--concurrency", "2")
    assert len(server.chats) == 1 + 3 + 9  # probe, warm-up, measured
    assert (report.sent, report.good, report.skipped, report.failures, report.warnings) == (9, 9, 0, {}, ())
    assert [(row.session, row.turn) for row in report.rows] == [(i, j) for i in range(3) for j in range(3)]
    assert [row.cold for row in report.rows] == [True, False, False] * 3
    latency = report.latency
    assert [latency.ttft_cold.count, latency.ttft_warm.count, latency.ttft_text] == [3, 6, None]
    assert (report.tokens.obeyed, report.tokens.tokens_per_chunk) == (9, 1.0)
    assert report.cache.expected_images == 6 / 9
    assert report.server.model == "fake"


def test_closed_loop_keeps_exactly_so_many_requests_running() -> None:
    async def scenario() -> None:
        two_here = asyncio.Event()

        def hold(request: Request) -> Reply:
            if server.running == 2:
                two_here.set()
            reply = honest(request)
            reply.hold = two_here if request.method == "POST" and len(server.chats) > 4 else None
            return reply

        async with serving(hold) as server:
            report = await measure(options(server.url, "--concurrency", "2"), IdleClock())
            assert report.good == 9
            assert server.most_running == 2

    asyncio.run(scenario())


def test_the_length_and_the_history_are_pinned() -> None:
    _, server = measured(honest)
    last = server.chats[-1].body
    assert (last["max_tokens"], last["min_tokens"], last["ignore_eos"], last["temperature"]) == (
        3,
        3,
        True,
        0,
    )
    assert last["stream_options"] == {"include_usage": True}
    assert [message["role"] for message in last["messages"]] == ["system", *["user", "assistant"] * 2, "user"]
    assert " w w w" not in [message["content"] for message in last["messages"]]


def test_the_servers_own_answers_can_be_the_history() -> None:
    report, server = measured(honest, "--history", "own", "--concurrency", "1")
    last = server.chats[-1].body["messages"]
    assert [message["content"] for message in last if message["role"] == "assistant"] == [" w w w"] * 2
    fixed, _ = measured(honest)
    # All but the new question was sent or given by the server itself: its 4 tokens and characters are new.
    characters = [len(message["content"]) for message in last if isinstance(message["content"], str)]
    with_image = next(message["content"] for message in last if not isinstance(message["content"], str))
    total = 4 * len(last) + (sum(characters) + len(with_image[-1]["text"])) / 4 + 16 * 16 / 784
    new = 4 + len(last[-1]["content"]) / 4
    assert report.rows[-1].expected_prefix == pytest.approx(1 - new / total)
    assert report.workload.sha256 == fixed.workload.sha256


def test_two_runs_with_one_seed_send_the_same_bytes() -> None:
    def bodies(seed: str) -> list[str]:
        _, server = measured(honest, "--seed", seed, "--concurrency", "3")
        return sorted(json.dumps(request.body) for request in server.chats)

    assert bodies("4") == bodies("4")
    assert bodies("4") != bodies("5")


def test_open_loop_starts_sessions_at_their_arrivals() -> None:
    async def scenario() -> ChatReport:
        clock = FakeClock(50.0)
        async with serving(honest) as server:
            return await measure(options(server.url, "--rate", "10", "--turns", "1"), clock)

    report = asyncio.run(scenario())
    arrivals = poisson_arrivals(10, 3, seed=0)
    assert report.workload.load == "open, 10 sessions/s"
    assert report.sent == 3
    # The clock only moves to the arrivals, so each request starts at one of them.
    starts = [row.start_s for row in report.rows]
    assert all(any(start == pytest.approx(at_s) for at_s in arrivals) for start in starts)


def failing(every: Sequence[Reply]) -> Callable[[Request], Reply]:
    """The probe and the warm-up are answered, then the replies in turn."""
    replies = iter([answer(3)] * 4 + list(every))
    return lambda request: models(request) if request.method == "GET" else next(replies)


def parts(*pieces: bytes) -> list[tuple[None, bytes]]:
    return [(None, piece) for piece in pieces]


def test_failures_are_counted_by_kind_and_kept_out_of_the_latencies() -> None:
    replies = [
        answer(3),
        Reply(status=500),
        Reply(status=429),
        Reply(parts(role(), text("a")), end="cut"),
        Reply(parts(text("a"), b'data: {"error":{}}\n\n', DONE)),
        answer(2),
        Reply(parts(text("a"), DONE)),
        Reply(parts(text("a"), text("b"), text("c"), finish(), DONE)),
        Reply(status=500),
    ]
    report, _ = measured(failing(replies), "--concurrency", "1", "--slo", "ttft=1000s")
    assert report.failures == {
        "error_event": 1,
        "http_429": 1,
        "http_500": 2,
        "missing_finish_reason": 1,
        "truncated_stream": 1,
        "wrong_length": 1,
    }
    assert (report.sent, report.good, report.latency.ttft.count) == (9, 3, 3)
    tokens = report.tokens
    assert (tokens.obeyed, tokens.disobeyed, tokens.unknown, tokens.counted_by_chunks) == (1, 1, 1, 1)
    assert report.goodput.share == pytest.approx(2 / 9)
    assert [warning[:20] for warning in report.warnings] == [
        "6 requests failed; t",
        "the server did not o",
        "1 answers have no us",
    ]
    assert report.rows[1].failure == "http_500"


def test_a_time_out_is_counted() -> None:
    replies = [Reply(parts(role()), end="hang"), *[answer(3)] * 8]
    report, _ = measured(failing(replies), "--concurrency", "1", "--timeout", "0.5")
    assert report.failures == {"timeout": 1}


def test_own_history_skips_the_turns_behind_a_failure() -> None:
    replies = [Reply(status=500), *[answer(3)] * 6]
    report, _ = measured(failing(replies), "--concurrency", "1", "--history", "own")
    assert (report.sent, report.skipped) == (7, 2)


def test_a_server_that_refuses_to_pin_is_measured_and_said_so() -> None:
    def strict(request: Request) -> Reply:
        return Reply(status=422) if "ignore_eos" in request.body else honest(request)

    report, _ = measured(strict)
    assert report.failures == {}
    assert any("rejects ignore_eos" in warning for warning in report.warnings)


def test_the_reported_hit_share_stands_beside_the_expected_one() -> None:
    lookups = [0]

    def caching(request: Request) -> Reply:
        if request.path == "/metrics":
            counts = {"queries": lookups[0] * 10, "hits": lookups[0]}
            lines = [f"vllm:prefix_cache_{what}_total {count}\n" for what, count in counts.items()]
            return Reply(parts("".join(lines).encode()))
        if request.method == "GET":
            return models(request)
        lookups[0] += 1
        return answer(3, prompt=20, cached=5)

    report, _ = measured(caching)
    assert report.cache.usage_share == 0.25
    assert report.cache.counters["prefix_cache"].share == 0.1
    assert (
        report.cache.counters["prefix_cache"].queries == 90
    )  # the nine measured requests, without the warm-up
    assert "usage says 25.0%, prefix_cache 10.0%" in format_report(report)


# Figures from results made by hand: every number can be worked out on paper.


def result(
    session: int,
    turn: int,
    start_s: float,
    chunk_times: Sequence[float],
    *,
    end_s: float,
    tokens: int | None = None,
    known_images: int = 0,
    failure: Failure | None = None,
    cached: int | None = None,
) -> TurnResult:
    counted = None
    if tokens is not None:
        counted = Usage(100, tokens, PromptDetails(cached) if cached is not None else None)
    record = StreamRecord(
        started_s=start_s,
        ended_s=end_s,
        chunks=tuple(StreamChunk(at_s, None) for at_s in chunk_times),
        text="",
        finish_reason="length",
        usage=counted,
        failure=failure,
    )
    return TurnResult(session, turn, Expectation(40, 10 * turn, 1, known_images), record)


SHAPE = RequestShape(None, 3)
HAND = LoadResult(
    started_s=0.0,
    ended_s=4.0,
    turns=(
        result(0, 0, 0.0, [0.5, 0.75, 1.0], end_s=1.0, tokens=3, cached=0),
        result(0, 1, 1.0, [1.25, 2.25], end_s=2.5, tokens=3, known_images=1, cached=50),
        result(1, 0, 0.0, [1.0], end_s=1.5, tokens=1),
        result(1, 1, 2.0, [], end_s=4.0, known_images=1, failure=Failure("http_status", "x", 503)),
    ),
    num_skipped=0,
)
TURNS = time_turns(HAND, SHAPE, pinned=True)


def test_latencies_are_exact() -> None:
    latency = latency_of(TURNS)
    assert (latency.ttft.count, latency.ttft.p50, latency.ttft.mean, latency.ttft.max) == (
        3,
        500,
        1750 / 3,
        1000,
    )
    assert (latency.ttft_cold.p50, latency.ttft_cold.p90) == (750, 950)
    assert (latency.ttft_warm.count, latency.ttft_warm.p50) == (1, 250)
    # Two chunks, three tokens: the later chunk has two, so a gap of 1000 ms is 500 ms a token, twice.
    assert (latency.itl.count, latency.itl.mean, latency.chunk_gap.count) == (4, 375, 3)
    assert (latency.tpot.count, latency.tpot.mean) == (2, 375)
    assert (latency.e2e.p50, latency.e2e.max) == (1500, 1500)
    assert latency.late is None
    assert [one.p50 for one in ttft_by_turn(TURNS)] == [750, 250]


def test_throughput_goodput_and_caches_are_exact() -> None:
    rate = throughput_of(TURNS, 4.0)
    assert (rate.requests_per_s, rate.output_tokens_per_s, rate.input_tokens_per_s) == (0.75, 1.75, 75)
    assert goodput_of(TURNS, Slo(ttft=500), 4.0).requests_per_s == 0.5
    assert goodput_of(TURNS, Slo(ttft=500, tpot=250), 4.0).share == 0.25
    assert goodput_of(TURNS, Slo(e2e=1400), 4.0).share == 0.25
    cache = cache_of(TURNS, {})
    assert (cache.expected_prefix, cache.expected_images, cache.usage_share) == (20 / 160, 0.5, 0.25)
    assert failures_of(TURNS) == {"http_503": 1, "wrong_length": 1}
    assert failures_of(time_turns(HAND, SHAPE, pinned=False)) == {"http_503": 1}


def test_rows_and_tokens_are_exact() -> None:
    tokens = tokens_of(TURNS, SHAPE, pinned=True)
    assert (tokens.obeyed, tokens.disobeyed, tokens.spread_requests) == (2, 1, 1)
    assert tokens.tokens_per_chunk == 7 / 6
    row = row_of(TURNS[1], 0.25)
    assert (row.start_s, row.ttft_ms, row.tpot_ms, row.e2e_ms) == (0.75, 250, 500, 1500)
    assert (row.prompt_tokens, row.cached_tokens, row.output_tokens, row.expected_prefix) == (
        100,
        50,
        3,
        0.25,
    )
    assert row_of(TURNS[3], 0.0).failure == "http_503"


def test_a_busy_or_late_client_is_said() -> None:
    late = replace(HAND.turns[0], late_s=0.02)
    turns = time_turns(replace(HAND, turns=(late,)), SHAPE, pinned=True)
    tokens, latency = tokens_of(turns, SHAPE, pinned=True), latency_of(turns)
    assert latency.late.max == 20
    found = warnings_of(tokens, SHAPE, latency, cpu_share=0.8, num_failed=0)
    assert [warning.split()[0:3] for warning in found] == [
        ["the", "client", "used"],
        ["sessions", "started", "up"],
    ]
    assert warnings_of(tokens, SHAPE, replaced(latency, late=None), cpu_share=0.1, num_failed=0) == []


def replaced(struct: msgspec.Struct, **fields: object):
    return msgspec.structs.replace(struct, **fields)


@pytest.mark.parametrize(("percent", "value"), [(0, 1), (25, 2), (50, 3), (90, 4.6), (100, 5)])
def test_percentiles_are_linear_between_ranks(percent: float, value: float) -> None:
    assert percentile([1, 2, 3, 4, 5], percent) == pytest.approx(value)
    assert percentile([7], percent) == 7


def test_no_samples_are_no_summary() -> None:
    assert summarize([]) is None


def test_limits_and_floors_are_read_with_their_units() -> None:
    assert Slo.parse("ttft=0.2s,tpot=20ms") == Slo(ttft=200, tpot=20)
    assert Floor.parse("tpot=800us:weights at 224 GB/s: read once") == Floor(
        "tpot", 0.8, "weights at 224 GB/s: read once"
    )
    for wrong in ("ttft=200", "itl=1ms", "ttft", "ttft=ms"):
        with pytest.raises(ValueError, match=r"."):
            Slo.parse(wrong)
    assert parse_duration_ms("1.5s") == 1500


def test_the_key_is_not_written_down() -> None:
    command = command_line("chat", ["--api-key", "sesame", "--api-key=sesame", "--url", "u"])
    assert command == ("omnistage", "bench", "chat", "--api-key", "***", "--api-key=***", "--url", "u")


@pytest.fixture(scope="module")
def report() -> ChatReport:
    return measured(honest, "--slo", "ttft=200ms", "--floor", "tpot=1ms:weights <read> once")[0]


def test_a_report_reads_back_as_it_was_written(report: ChatReport) -> None:
    assert decode_report(encode_report(report), "r") == report
    assert json.loads(encode_report(report))["schema"] == SCHEMA


@pytest.mark.parametrize("data", [b"{", b"{}"])
def test_what_is_no_report_is_refused(data: bytes) -> None:
    with pytest.raises(UnreadableReport, match=r"other\.json"):
        decode_report(data, "other.json")


def test_another_schema_is_refused(report: ChatReport) -> None:
    with pytest.raises(UnreadableReport, match="has schema later/2"):
        decode_report(encode_report(replaced(report, schema="later/2")), "r")


def test_the_text_has_what_a_published_number_needs(report: ChatReport) -> None:
    written = format_report(report)
    assert "omnistage bench chat --url http://127.0.0.1" in written
    assert report.environment.cpu in written
    assert report.environment.date_utc in written
    assert re.search(r"tpot .* 1\.00$", written, re.M)
    assert "floor of tpot: weights <read> once" in written
    assert report.workload.sha256 in written


def test_the_page_needs_no_other_file(report: ChatReport, tmp_path: Path) -> None:
    page = write_page(report, tmp_path / "plots")
    written = page.read_text()
    assert re.search(r"src=|href|url\(|@import|<script|<link|<img", written) is None
    assert set(re.findall(r"https?://[^\s\"<]+", written)) <= {
        "http://www.w3.org/2000/svg",
        report.server.url,
    }
    assert "weights &lt;read&gt; once" in written
    assert "NaN" not in written
    charts = charts_of(report)
    assert {chart.file_name for chart in charts} == {
        "ttft",
        "itl",
        "e2e",
        "ttft_by_turn",
        "ttft_over_time",
        "running",
    }
    assert {path.name for path in page.parent.glob("*.svg")} == {f"{chart.file_name}.svg" for chart in charts}
    assert written.count("<svg ") == len(charts)


def test_a_run_without_one_good_answer_still_has_its_page() -> None:
    failed, _ = measured(failing([Reply(status=500)] * 9))
    assert failed.good == 0
    assert "<svg " in render_page(failed, charts_of(failed))


def test_two_runs_stand_side_by_side(report: ChatReport) -> None:
    half = msgspec.structs.replace(report.throughput, requests_per_s=report.throughput.requests_per_s / 2)
    lines = format_comparison(report, replaced(report, throughput=half)).splitlines()
    assert not any(line.startswith("warning") for line in lines)
    assert next(line for line in lines if line.startswith("requests/s")).endswith("0.50x")
    assert next(line for line in lines if line.startswith("ttft p50")).endswith("1.00x")


def test_runs_of_other_bytes_or_load_are_said_not_to_compare(report: ChatReport) -> None:
    other = replaced(report, workload=replaced(report.workload, sha256="0", load="open, 1 sessions/s"))
    first, second, *_ = format_comparison(report, other).splitlines()
    assert "sent different bytes" in first
    assert "different load" in second


def test_the_client_measures_its_own_cost() -> None:
    overhead = asyncio.run(measure_overhead(FakeClock(), 4))
    assert (overhead.streams, overhead.chunks) == (4, 4 * NUM_STEPS)
    assert overhead.delay.max <= NUM_STEPS * 20  # the stopped clock moves by steps of 20 ms only


def test_the_command_runs_saves_draws_and_compares(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "a.json"
    with serving_in_thread() as server:
        argv = ["chat", "--url", server.url, *SMALL, "--json", str(saved), "--plot", str(tmp_path / "plots")]
        assert cli.main(argv) == 0
    assert "9 good of 9 sent" in capsys.readouterr().out
    assert decode_report(saved.read_bytes(), "a").sent == 9
    assert (tmp_path / "plots" / "index.html").exists()
    assert cli.main(["chat", "--compare", str(saved), str(saved)]) == 0
    assert "1.00x" in capsys.readouterr().out
    assert cli.main(["chat", "--compare", str(saved), str(tmp_path / "gone.json")]) == 1
    assert "gone.json" in capsys.readouterr().err


def test_own_conversations_are_sent_as_they_are(tmp_path: Path) -> None:
    lines = tmp_path / "c.jsonl"
    lines.write_text('{"messages":[{"role":"user","content":"mine"}]}\n' * 2)
    report, server = measured(honest, "--conversations", str(lines), "--warmup", "1")
    assert server.chats[-1].body["messages"] == [{"role": "user", "content": "mine"}]
    assert (report.sent, report.workload.source, report.workload.turns) == (1, "c.jsonl", "as in the file")
    assert report.latency.ttft_text.count == 1


def test_a_server_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with serving_in_thread() as server:
        url = server.url
    assert cli.main(["chat", "--url", url, *SMALL]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"error: {url} did not answer")
    assert error.count("\n") == 1


@pytest.mark.parametrize(("argv", "status"), [([], 2), (["nonsense"], 2), (["--help"], 0)])
def test_the_benchmarks_are_listed(argv: list[str], status: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(argv) == status
    written = "".join(capsys.readouterr())
    assert all(name in written for name in cli.BENCHMARKS)
