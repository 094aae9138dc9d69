"""`omnistage bench chat`: probe, warm up, load, report."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from benchmarks.chat.conversations import BadConversation, load_conversations
from benchmarks.chat.load import Load, LoadResult, poisson_arrivals
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
from benchmarks.chat.options import ChatOptions, build_parser, options_of
from benchmarks.chat.overhead import measure_overhead
from benchmarks.chat.page import write_page
from benchmarks.chat.prefixes import SentPrefixes
from benchmarks.chat.result import (
    ChatReport,
    ClientReport,
    Overhead,
    UnreadableReport,
    WorkloadInfo,
    decode_report,
    encode_report,
)
from benchmarks.chat.table import format_comparison, format_report
from benchmarks.chat.workload import Workload, build_workload
from benchmarks.environment import describe_environment
from benchmarks.wire.clock import Clock, MonotonicClock
from benchmarks.wire.connection import HttpPool
from benchmarks.wire.loop import run
from benchmarks.wire.request import ProbeFailed, RequestShape, probe
from benchmarks.wire.server import CacheCount, ServerInfo, cache_counts, counts_between, describe


def main(argv: Sequence[str]) -> int:
    """0; 1 when nothing could be measured or every request failed; 2 for wrong usage."""
    args = build_parser().parse_args(argv)
    try:
        if args.compare is not None:
            left, right = (_read(path) for path in args.compare)
            print(format_comparison(left, right))
            return 0
        report = run(measure(options_of(args, argv), MonotonicClock()))
    except (ProbeFailed, BadConversation, UnreadableReport) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(format_report(report))
    if args.json is not None:
        args.json.write_bytes(encode_report(report))
    if args.plot is not None:
        print(f"page      {write_page(report, args.plot)}")
    return 0 if report.good else 1


def _read(path: Path) -> ChatReport:
    try:
        return decode_report(path.read_bytes(), str(path))
    except OSError as error:
        raise UnreadableReport(f"{path}: {error.strerror}") from error


async def measure(options: ChatOptions, clock: Clock) -> ChatReport:
    """Runs against one server. Raises ProbeFailed when it does not answer at all."""
    workload = (
        build_workload(options.workload)
        if options.conversations is None
        else load_conversations(options.conversations, options.workload.num_warmup)
    )
    overhead = None
    if options.measure_overhead:
        overhead = await measure_overhead(clock, _num_streams(options, workload))
    pool = HttpPool(options.url, clock, api_key=options.api_key)
    try:
        server = await describe(pool, options.model)
        asked = RequestShape(
            model=server.model,
            output_tokens=options.workload.output_tokens,
            pin_length=options.pin_length,
            extra_json=options.extra_json,
        )
        shape = await probe(pool, asked, options.timeout_s)
        load = Load(
            pool,
            shape,
            workload,
            SentPrefixes(options.pixels_per_token),
            own_history=options.own_history,
            timeout_s=options.timeout_s,
        )
        await load.closed(workload.warmup, options.concurrency)
        before = await cache_counts(pool)
        cpu_started_s = clock.cpu_s()
        result = await _load(load, workload, options)
        cpu_s = clock.cpu_s() - cpu_started_s
        counters = counts_between(before, await cache_counts(pool))
    finally:
        pool.close()
    return build_report(options, workload, server, shape, result, counters, cpu_s, overhead)


def _num_streams(options: ChatOptions, workload: Workload) -> int:
    num_sessions = len(workload.sessions)
    return num_sessions if options.rate is not None else min(options.concurrency, num_sessions)


async def _load(load: Load, workload: Workload, options: ChatOptions) -> LoadResult:
    sessions = workload.sessions
    if options.rate is None:
        return await load.closed(sessions, options.concurrency)
    return await load.open(sessions, poisson_arrivals(options.rate, len(sessions), options.workload.seed))


def build_report(
    options: ChatOptions,
    workload: Workload,
    server: ServerInfo,
    shape: RequestShape,
    result: LoadResult,
    counters: dict[str, CacheCount],
    cpu_s: float,
    overhead: Overhead | None,
) -> ChatReport:
    duration_s = result.ended_s - result.started_s
    turns = time_turns(result, shape, pinned=options.pin_length)
    latency = latency_of(turns)
    tokens = tokens_of(turns, shape, pinned=options.pin_length)
    num_good = sum(turn.good for turn in turns)
    cpu_share = cpu_s / duration_s if duration_s > 0 else 0.0
    return ChatReport(
        environment=describe_environment(options.command),
        server=server,
        workload=_workload_info(options, workload),
        sent=len(turns),
        good=num_good,
        skipped=result.num_skipped,
        latency=latency,
        ttft_by_turn=ttft_by_turn(turns),
        throughput=throughput_of(turns, duration_s),
        goodput=goodput_of(turns, options.slo, duration_s) if options.slo else None,
        cache=cache_of(turns, counters),
        failures=failures_of(turns),
        tokens=tokens,
        client=ClientReport(cpu_s, cpu_share, overhead),
        floors=options.floors,
        warnings=tuple(warnings_of(tokens, shape, latency, cpu_share, len(turns) - num_good)),
        rows=tuple(row_of(turn, result.started_s) for turn in turns),
    )


def _workload_info(options: ChatOptions, workload: Workload) -> WorkloadInfo:
    config = options.workload
    load = f"closed, {options.concurrency} sessions at once"
    if options.rate is not None:
        load = f"open, {options.rate:g} sessions/s"
    info = WorkloadInfo(
        sha256=workload.sha256,
        source="synthetic",
        sessions=len(workload.sessions),
        warmup_sessions=len(workload.warmup),
        planned_requests=sum(len(session.turns) for session in workload.sessions),
        load=load,
        turns=config.turns.text,
        images=config.images.text,
        image_size=config.image_size.text,
        image_format=config.image_format,
        reuse=config.reuse,
        prompt_words=config.prompt_words.text,
        output_tokens=config.output_tokens,
        history="own" if options.own_history else "fixed",
        seed=config.seed,
    )
    return info if options.conversations is None else _own_conversations(info, options.conversations)


def _own_conversations(info: WorkloadInfo, path: Path) -> WorkloadInfo:
    shaped_by_file = ("turns", "images", "image_size", "image_format", "reuse", "prompt_words")
    fields = dict.fromkeys(shaped_by_file, "as in the file")
    return msgspec.structs.replace(info, source=path.name, **fields)
