"""The command line of `omnistage bench chat`, read into one frozen value."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import msgspec

from benchmarks.chat.distribution import Numbers, Sizes
from benchmarks.chat.images import ImageFormat
from benchmarks.chat.slo import Floor, Slo
from benchmarks.chat.workload import Reuse, WorkloadConfig

DEFAULT_URL = "http://127.0.0.1:8000"  # where `omnistage serve` listens
DEFAULT_CONCURRENCY = 8


@dataclass(frozen=True)
class ChatOptions:
    """`rate` None: closed loop of `concurrency` sessions; else open loop, sessions per second."""

    url: str
    model: str | None
    api_key: str | None
    workload: WorkloadConfig
    conversations: Path | None
    concurrency: int
    rate: float | None
    own_history: bool
    slo: Slo | None
    floors: tuple[Floor, ...]
    timeout_s: float
    pin_length: bool
    extra_json: bytes
    pixels_per_token: float
    measure_overhead: bool
    command: tuple[str, ...]


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="omnistage bench chat",
        description="Sessions of several turns about images against any OpenAI-compatible server."
        " Numbers may be fixed (4), uniform (2-6) or a choice (2,4,8); sizes too (256x256-1024x1024).",
    )
    _add_server(parser)
    _add_workload(parser)
    _add_load(parser)
    _add_output(parser)
    return parser


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """What every benchmark needs to reach a server, but for its address."""
    parser.add_argument("--model", help="default: the first that the server lists")
    key = os.environ.get("OMNISTAGE_API_KEY")
    parser.add_argument("--api-key", default=key, help="Bearer token (or OMNISTAGE_API_KEY)")
    parser.add_argument("--timeout", type=_positive_float, default=600.0, metavar="S", help="of one request")
    parser.add_argument(
        "--extra-body",
        type=_json_object,
        default=b"{}",
        metavar="JSON",
        help="merged over every request's body",
    )


def _add_server(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default=DEFAULT_URL, help="of the server (default: %(default)s)")
    add_server_arguments(parser)


def _add_workload(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("workload")
    group.add_argument("--sessions", type=_positive, default=16, metavar="N")
    group.add_argument("--warmup", type=int, default=2, metavar="N", help="sessions before the measured ones")
    group.add_argument("--turns", type=Numbers.parse, default="3", metavar="N")
    group.add_argument(
        "--images", type=Numbers.parse, default="1", metavar="N", help="per session, spread over its turns"
    )
    group.add_argument("--image-size", type=Sizes.parse, default="1024x1024", metavar="WxH")
    group.add_argument("--image-format", choices=get_args(ImageFormat), default="jpeg")
    group.add_argument("--reuse", choices=get_args(Reuse), default="new", help="which images come again")
    group.add_argument("--pool", type=_positive, default=8, metavar="N", help="images of --reuse pool")
    group.add_argument(
        "--window", type=_positive, default=2, metavar="N", help="images kept by --reuse window"
    )
    group.add_argument(
        "--prompt-words", type=Numbers.parse, default="32", metavar="N", help="per user message"
    )
    group.add_argument("--output-tokens", type=_positive, default=64, metavar="N")
    group.add_argument(
        "--history",
        choices=("fixed", "own"),
        default="fixed",
        help="assistant turns: synthetic, or the answers",
    )
    group.add_argument("--no-pin", action="store_true", help="let the model end its answers")
    group.add_argument("--conversations", type=Path, metavar="FILE", help="JSON lines of your own instead")
    group.add_argument("--seed", type=int, default=0)
    group.add_argument(
        "--pixels-per-token",
        type=_positive_float,
        default=784.0,
        metavar="N",
        help="for the expected cache share",
    )


def _add_load(parser: argparse.ArgumentParser) -> None:
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--concurrency",
        type=_positive,
        default=DEFAULT_CONCURRENCY,
        metavar="N",
        help="closed loop: sessions at once",
    )
    group.add_argument(
        "--rate", type=_positive_float, metavar="R", help="open loop: Poisson arrivals of sessions per second"
    )


def _add_output(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    group.add_argument("--json", type=Path, metavar="FILE")
    group.add_argument("--plot", type=Path, metavar="DIR", help="charts and one HTML page")
    group.add_argument("--slo", type=Slo.parse, metavar="LIMITS", help="ttft=200ms,tpot=20ms,e2e=5s")
    group.add_argument(
        "--floor",
        type=Floor.parse,
        action="append",
        default=[],
        metavar="METRIC=TIME:WHY",
        help="shown beside",
    )
    group.add_argument("--no-overhead", action="store_true", help="do not measure the client itself first")
    group.add_argument(
        "--compare", type=Path, nargs=2, metavar="JSON", help="print two saved runs side by side"
    )


def options_of(args: argparse.Namespace, argv: Sequence[str]) -> ChatOptions:
    workload = WorkloadConfig(
        num_sessions=args.sessions,
        num_warmup=args.warmup,
        turns=args.turns,
        images=args.images,
        image_size=args.image_size,
        image_format=args.image_format,
        reuse=args.reuse,
        pool_size=args.pool,
        window=args.window,
        prompt_words=args.prompt_words,
        output_tokens=args.output_tokens,
        seed=args.seed,
    )
    return ChatOptions(
        url=args.url,
        model=args.model,
        api_key=args.api_key,
        workload=workload,
        conversations=args.conversations,
        concurrency=args.concurrency,
        rate=args.rate,
        own_history=args.history == "own",
        slo=args.slo,
        floors=tuple(args.floor),
        timeout_s=args.timeout,
        pin_length=not args.no_pin,
        extra_json=args.extra_body,
        pixels_per_token=args.pixels_per_token,
        measure_overhead=not args.no_overhead,
        command=command_line("chat", argv),
    )


def command_line(subcommand: str, argv: Sequence[str]) -> tuple[str, ...]:
    """The command that reproduces a run, without the key."""
    hidden = [
        "***" if before == "--api-key" else re.sub(r"^(--api-key=).*", r"\1***", argument)
        for before, argument in zip(["", *argv], argv, strict=False)
    ]
    return ("omnistage", "bench", subcommand, *hidden)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError(f"{text} is not positive")
    return value


def _positive_float(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise ValueError(f"{text} is not positive")
    return value


def _json_object(text: str) -> bytes:
    try:
        msgspec.json.decode(text, type=dict[str, object])
    except msgspec.DecodeError as error:
        raise argparse.ArgumentTypeError(f"not a JSON object: {error}") from error
    return text.encode()
