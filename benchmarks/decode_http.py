"""`omnistage bench decode`: decoding speed over HTTP of one server, or of several in turns.

JSON, version `omnistage.bench.decode/1`: `environment`, `output_tokens`, `repeats`, `warnings`, one of
`figures` for each server and number of streams (medians over the repeats), and the `runs` behind them.
    stream_tok_s  tokens after the first chunk over the time they took, of one stream
    sum_tok_s     all tokens of all streams over first request written -> last chunk, prefill included
    ttft_ms       request written -> first chunk with output
    prompt_tokens as the server counts them, where it does
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import msgspec

from benchmarks.chat.options import DEFAULT_URL, add_server_arguments, command_line
from benchmarks.chat.words import text_of
from benchmarks.chat.workload import Message
from benchmarks.environment import Environment, describe_environment
from benchmarks.rivals.transformers_serve import RivalFailed, TransformersServe, exit_on_sigterm
from benchmarks.samples import median
from benchmarks.text_table import number, render
from benchmarks.wire.chat_stream import StreamRecord, stream_chat
from benchmarks.wire.clock import Clock, MonotonicClock
from benchmarks.wire.connection import HttpPool
from benchmarks.wire.loop import run
from benchmarks.wire.request import ProbeFailed, RequestShape, obeyed_length, probe
from benchmarks.wire.server import ServerInfo, describe
from benchmarks.wire.timing import timing_of

SCHEMA = "omnistage.bench.decode/1"
PROMPT_WORDS = 12


class DecodeRun(msgspec.Struct, frozen=True):
    """One round of `streams` requests at once. Of failed streams nothing but their kind is kept."""

    server: str
    streams: int
    repeat: int
    stream_tok_s: tuple[float, ...]
    sum_tok_s: float | None
    ttft_ms: tuple[float, ...]
    prompt_tokens: tuple[int, ...]
    failures: tuple[str, ...]
    disobeyed: int


class DecodeFigure(msgspec.Struct, frozen=True):
    server: str
    streams: int
    stream_tok_s: float | None
    sum_tok_s: float | None
    ttft_ms: float | None
    prompt_tokens: float | None
    num_failed: int


class DecodeReport(msgspec.Struct, frozen=True):
    environment: Environment
    servers: dict[str, ServerInfo]
    prompt_words: int
    output_tokens: int
    repeats: int
    figures: tuple[DecodeFigure, ...]
    floor_tok_s: float | None
    warnings: tuple[str, ...]
    runs: tuple[DecodeRun, ...]
    schema: str = SCHEMA


@dataclass(frozen=True)
class DecodeOptions:
    """`urls` by the name that stands in the table. `floor_tok_s`: the most one stream can reach, if known."""

    urls: dict[str, str]
    streams: tuple[int, ...]
    output_tokens: int
    repeats: int
    model: str | None
    api_key: str | None
    timeout_s: float
    extra_json: bytes
    seed: int
    floor_tok_s: float | None
    command: tuple[str, ...]
    prompt_words: int = PROMPT_WORDS


@dataclass(frozen=True)
class _Server:
    name: str
    info: ServerInfo
    pool: HttpPool
    shape: RequestShape


async def measure(options: DecodeOptions, clock: Clock) -> DecodeReport:
    """Round by round through the servers: a drift of the machine meets them all. Raises ProbeFailed."""
    servers: list[_Server] = []
    runs: list[DecodeRun] = []
    try:
        for name, url in options.urls.items():
            servers.append(await _reach(name, url, options, clock))
        for repeat in range(-1, options.repeats):  # -1 warms up
            for streams in options.streams:
                for server in servers:
                    measured = await _round(server, streams, repeat, options)
                    runs += [measured] if repeat >= 0 else []
    finally:
        for server in servers:
            server.pool.close()
    pairs = [(server.name, streams) for streams in options.streams for server in servers]
    return DecodeReport(
        environment=describe_environment(options.command),
        servers={server.name: server.info for server in servers},
        prompt_words=options.prompt_words,
        output_tokens=options.output_tokens,
        repeats=options.repeats,
        figures=tuple(figure_of(name, streams, runs) for name, streams in pairs),
        floor_tok_s=options.floor_tok_s,
        warnings=tuple(_warnings(servers, runs)),
        runs=tuple(runs),
    )


async def _reach(name: str, url: str, options: DecodeOptions, clock: Clock) -> _Server:
    pool = HttpPool(url, clock, api_key=options.api_key)
    info = await describe(pool, options.model)
    asked = RequestShape(info.model, options.output_tokens, extra_json=options.extra_json)
    return _Server(name, info, pool, await probe(pool, asked, options.timeout_s))


async def _round(server: _Server, streams: int, repeat: int, options: DecodeOptions) -> DecodeRun:
    """Every server gets the same prompts, and no prompt comes twice: prefix caches do not help."""
    rng = random.Random(f"{options.seed}:{streams}:{repeat}")
    prompts = [Message("user", text_of(rng, options.prompt_words)).encode() for _ in range(streams)]
    bodies = [server.shape.body([prompt]) for prompt in prompts]
    records = await asyncio.gather(*(stream_chat(server.pool, body, options.timeout_s) for body in bodies))
    return run_of(server.name, repeat, records, server.shape)


def run_of(server: str, repeat: int, records: Sequence[StreamRecord], shape: RequestShape) -> DecodeRun:
    good = [record for record in records if record.failure is None and record.chunks]
    timings = [timing_of(record) for record in good]
    num_tokens = sum(record.num_output_tokens for record in good)
    span_s = 0.0
    if good:
        span_s = max(one.chunks[-1].at_s for one in good) - min(one.started_s for one in good)
    return DecodeRun(
        server=server,
        streams=len(records),
        repeat=repeat,
        stream_tok_s=tuple(1e3 / timing.tpot_ms for timing in timings if timing.tpot_ms),
        sum_tok_s=num_tokens / span_s if span_s > 0 else None,
        ttft_ms=tuple(timing.ttft_ms for timing in timings if timing.ttft_ms is not None),
        prompt_tokens=tuple(usage.prompt_tokens for usage in (record.usage for record in good) if usage),
        failures=tuple(record.failure.label for record in records if record.failure is not None),
        disobeyed=sum(obeyed_length(record, shape) is False for record in good),
    )


def figure_of(server: str, streams: int, runs: Sequence[DecodeRun]) -> DecodeFigure:
    mine = [run for run in runs if run.server == server and run.streams == streams]
    return DecodeFigure(
        server=server,
        streams=streams,
        stream_tok_s=median([rate for run in mine for rate in run.stream_tok_s]),
        sum_tok_s=median([run.sum_tok_s for run in mine if run.sum_tok_s is not None]),
        ttft_ms=median([ttft for run in mine for ttft in run.ttft_ms]),
        prompt_tokens=median([tokens for run in mine for tokens in run.prompt_tokens]),
        num_failed=sum(len(run.failures) for run in mine),
    )


def _warnings(servers: Sequence[_Server], runs: Sequence[DecodeRun]) -> list[str]:
    found: list[str] = []
    for server in servers:
        if not server.shape.pin_length:
            found.append(f"{server.name} rejects ignore_eos/min_tokens: its answers may end early")
        disobeyed = sum(run.disobeyed for run in runs if run.server == server.name)
        if disobeyed:
            found.append(
                f"{server.name}: {disobeyed} answers are not {server.shape.output_tokens} tokens long"
            )
    return found


def format_report(report: DecodeReport) -> str:
    rows = [
        [
            f"{figure.server} x{figure.streams}",
            number(figure.stream_tok_s),
            number(figure.sum_tok_s),
            number(figure.ttft_ms),
            number(figure.prompt_tokens),
            str(figure.num_failed),
            number(report.floor_tok_s),
        ]
        for figure in report.figures
    ]
    header = [
        "server x streams",
        "tok/s a stream",
        "tok/s in sum",
        "TTFT ms",
        "prompt tokens",
        "failed",
        "ceiling tok/s a stream",
    ]
    servers = [
        f"{name.ljust(9)} {info.url} {info.model or '(its only model)'} {info.version or ''}".rstrip()
        for name, info in report.servers.items()
    ]
    about = (
        f"medians of {report.repeats} rounds, {report.output_tokens} tokens out,"
        f" prompts of {report.prompt_words} words"
    )
    warnings = [f"warning: {warning}" for warning in report.warnings]
    return "\n".join([*report.environment.lines(), *servers, about, "", render(header, rows), *warnings])


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="omnistage bench decode", description="Decoding speed over HTTP.")
    parser.add_argument(
        "--url",
        action="append",
        default=[],
        metavar="[NAME=]URL",
        help=f"several are measured in turns (default: {DEFAULT_URL}, without --transformers)",
    )
    parser.add_argument(
        "--transformers", type=Path, metavar="MODEL", help="also start `transformers serve` with this folder"
    )
    add_server_arguments(parser)
    parser.add_argument("--streams", default="1,8", metavar="N,N")
    parser.add_argument("--prompt-words", type=int, default=PROMPT_WORDS, metavar="N")
    parser.add_argument("--output-tokens", type=int, default=64, metavar="N")
    parser.add_argument("--repeats", type=int, default=5, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ceiling", type=float, metavar="TOK_S", help="what the hardware allows one stream")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser


def options_of(args: argparse.Namespace, argv: Sequence[str]) -> DecodeOptions:
    urls: dict[str, str] = {}
    for entry in args.url or ([] if args.transformers else [DEFAULT_URL]):
        name, separator, url = entry.partition("=")
        urls[name if separator else entry] = url if separator else entry
    return DecodeOptions(
        urls=urls,
        streams=tuple(int(part) for part in args.streams.split(",")),
        output_tokens=args.output_tokens,
        repeats=args.repeats,
        model=args.model,
        api_key=args.api_key,
        timeout_s=args.timeout,
        extra_json=args.extra_body,
        seed=args.seed,
        floor_tok_s=args.ceiling,
        command=command_line("decode", argv),
        prompt_words=args.prompt_words,
    )


def main(argv: Sequence[str]) -> int:
    """0; 1 when a server cannot be measured or some stream failed."""
    args = build_parser().parse_args(argv)
    options = options_of(args, argv)
    try:
        with ExitStack() as rivals:
            if args.transformers is not None:
                exit_on_sigterm()
                options.urls["transformers"] = rivals.enter_context(TransformersServe(args.transformers)).url
            report = run(measure(options, MonotonicClock()))
    except (ProbeFailed, RivalFailed) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(format_report(report))
    if args.json is not None:
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1))
    return 1 if any(figure.num_failed for figure in report.figures) else 0
