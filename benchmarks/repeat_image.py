"""`omnistage bench repeat-image`: time to first token of an image that was sent before, against a new one.

Each repeat sends four requests to an otherwise idle server, one after the other:
    text    the question alone: what is left when the image costs nothing
    new     an image never sent before
    asked   the same image with another question (embedding cache, prefix up to the image's end)
    same    the very same request again (prefix cache)
JSON, version `omnistage.bench.repeat-image/1`: `environment`, `server`, `image_size`, summaries of TTFT in
milliseconds by kind, the failures, and all samples.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from benchmarks.chat.distribution import Size
from benchmarks.chat.images import synthesize
from benchmarks.chat.options import DEFAULT_URL, add_server_arguments, command_line
from benchmarks.chat.words import text_of
from benchmarks.chat.workload import Message
from benchmarks.environment import Environment, describe_environment
from benchmarks.samples import Summary, summarize
from benchmarks.text_table import number, percent, render
from benchmarks.wire.chat_stream import stream_chat
from benchmarks.wire.clock import Clock, MonotonicClock
from benchmarks.wire.connection import HttpPool
from benchmarks.wire.loop import run
from benchmarks.wire.request import ProbeFailed, RequestShape, probe
from benchmarks.wire.server import ServerInfo, describe
from benchmarks.wire.timing import timing_of

SCHEMA = "omnistage.bench.repeat-image/1"
QUESTION_WORDS = 24
KINDS = ("text", "new", "asked", "same")


class RepeatReport(msgspec.Struct, frozen=True):
    """`cached_share`: of prompt tokens, by the server's usage; absent where it does not tell."""

    environment: Environment
    server: ServerInfo
    image_size: str
    ttft_ms: dict[str, Summary]
    cached_share: dict[str, float]
    failures: dict[str, int]
    samples_ms: dict[str, tuple[float, ...]]
    schema: str = SCHEMA


@dataclass(frozen=True)
class RepeatOptions:
    url: str
    model: str | None
    api_key: str | None
    timeout_s: float
    extra_json: bytes
    image_size: Size
    output_tokens: int
    repeats: int
    warmup: int
    seed: int
    command: tuple[str, ...]


def requests_of(options: RepeatOptions, repeat: int) -> dict[str, Message]:
    """The four messages of one repeat, by kind, in the order they are sent."""
    rng = random.Random(f"{options.seed}:{repeat}")
    image = synthesize(rng.getrandbits(63), options.image_size, "jpeg")
    first, other, plain = (text_of(rng, QUESTION_WORDS) for _ in range(3))
    return {
        "text": Message("user", plain),
        "new": Message("user", first, (image,)),
        "asked": Message("user", other, (image,)),
        "same": Message("user", first, (image,)),
    }


async def measure(options: RepeatOptions, clock: Clock) -> RepeatReport:
    """Raises ProbeFailed when the server does not answer at all."""
    samples: dict[str, list[float]] = {kind: [] for kind in KINDS}
    cached: dict[str, list[float]] = {kind: [] for kind in KINDS}
    failures: Counter[str] = Counter()
    pool = HttpPool(options.url, clock, api_key=options.api_key)
    try:
        server = await describe(pool, options.model)
        asked = RequestShape(server.model, options.output_tokens, extra_json=options.extra_json)
        shape = await probe(pool, asked, options.timeout_s)
        for repeat in range(-options.warmup, options.repeats):
            for kind, message in requests_of(options, repeat).items():
                record = await stream_chat(pool, shape.body([message.encode()]), options.timeout_s)
                ttft_ms = timing_of(record).ttft_ms
                if record.failure is not None:
                    failures[record.failure.label] += 1
                elif repeat >= 0 and ttft_ms is not None:
                    samples[kind].append(ttft_ms)
                    usage = record.usage
                    if usage is not None and usage.cached_tokens is not None and usage.prompt_tokens:
                        cached[kind].append(usage.cached_tokens / usage.prompt_tokens)
    finally:
        pool.close()
    summaries = {kind: summarize(values) for kind, values in samples.items()}
    return RepeatReport(
        environment=describe_environment(options.command),
        server=server,
        image_size=f"{options.image_size.width}x{options.image_size.height}",
        ttft_ms={kind: summary for kind, summary in summaries.items() if summary is not None},
        cached_share={kind: sum(shares) / len(shares) for kind, shares in cached.items() if shares},
        failures=dict(failures),
        samples_ms={kind: tuple(values) for kind, values in samples.items()},
    )


def format_report(report: RepeatReport) -> str:
    new = report.ttft_ms.get("new")
    rows = [
        [
            kind,
            *(number(value) for value in (one.p50, one.p90, one.p99)),
            str(one.count),
            number(one.p50 / new.p50 if new and new.p50 else None, "x"),
            percent(report.cached_share.get(kind)),
        ]
        for kind, one in report.ttft_ms.items()
    ]
    server = f"server    {report.server.url} {report.server.model or '(its only model)'}"
    failures = ", ".join(f"{kind} {count}" for kind, count in report.failures.items()) or "none"
    table = render(["TTFT ms", "p50", "p90", "p99", "n", "of new", "cached tokens"], rows)
    about = f"image {report.image_size}; `text` is the floor: the same request without an image"
    return "\n".join([*report.environment.lines(), server, about, "", table, f"failures  {failures}"])


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="omnistage bench repeat-image", description="First token of a repeated image against a new one."
    )
    parser.add_argument("--url", default=DEFAULT_URL, help="of the server (default: %(default)s)")
    add_server_arguments(parser)
    parser.add_argument("--image-size", type=Size.parse, default="1024x1024", metavar="WxH")
    parser.add_argument("--output-tokens", type=int, default=4, metavar="N")
    parser.add_argument("--repeats", type=int, default=10, metavar="N")
    parser.add_argument("--warmup", type=int, default=1, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser


def main(argv: Sequence[str]) -> int:
    """0; 1 when the server cannot be measured or a request failed."""
    args = build_parser().parse_args(argv)
    options = RepeatOptions(
        url=args.url,
        model=args.model,
        api_key=args.api_key,
        timeout_s=args.timeout,
        extra_json=args.extra_body,
        image_size=args.image_size,
        output_tokens=args.output_tokens,
        repeats=args.repeats,
        warmup=args.warmup,
        seed=args.seed,
        command=command_line("repeat-image", argv),
    )
    try:
        report = run(measure(options, MonotonicClock()))
    except ProbeFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(format_report(report))
    if args.json is not None:
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1))
    return 1 if report.failures else 0
