"""`omnistage bench speech`: speech or spoken chat answers of any OpenAI-compatible server, as a listener
has them.

JSON, version `omnistage.bench.speech/1`: `environment`, `server`, what was asked, `failures` by kind, and
    first_packet_ms   request written -> first bytes of sound
    first_audible_ms  request written -> a 1x player that began at once plays the first sample above -40 dBFS
    rtf               request written -> last bytes of sound, over the seconds of speech
    underrun_ms       how long that player stood still in all
    audio_s_per_s     seconds of speech of all requests over the seconds that all of them took
    server_s          seconds that the server itself counted meanwhile, by stage and edge, where it counts
                      them
    server_counts     how often; and steps, rows, frames, packets, chunks: what each of them held

With `--transformers FOLDER` the same is then measured of that checkpoint by `transformers` (`rival`).
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

from benchmarks.chat.options import DEFAULT_URL, add_server_arguments, command_line
from benchmarks.chat.words import text_of
from benchmarks.environment import Environment, describe_environment
from benchmarks.rivals.transformers_omni import TransformersOmni
from benchmarks.rivals.transformers_serve import exit_on_sigterm
from benchmarks.samples import Summary, summarize
from benchmarks.speech.listen import Heard, Kind, listen
from benchmarks.speech.playback import Playback, play
from benchmarks.speech.stage_seconds import counted, increase
from benchmarks.text_table import number, render
from benchmarks.wire.clock import Clock, MonotonicClock
from benchmarks.wire.connection import HttpPool
from benchmarks.wire.loop import run
from benchmarks.wire.server import ServerInfo, describe, own_voice

SCHEMA = "omnistage.bench.speech/1"
USUAL_VOICE = "alloy"
CHAT_TOKENS = 64  # of an answer, unless --extra-body says otherwise: a small model may talk without end


class SpeechOptions(msgspec.Struct, frozen=True, kw_only=True):
    kind: Kind
    requests: int
    concurrency: int
    words: int
    voice: str  # of a report; "" asks for the server's own
    sample_rate: int
    seed: int


class SpeechReport(msgspec.Struct, frozen=True, kw_only=True):
    schema: str
    environment: Environment
    server: ServerInfo
    options: SpeechOptions
    failures: dict[str, int]
    silent: int  # answers in which nothing was to be heard
    audio_s: float
    wall_s: float
    first_packet_ms: Summary | None
    first_audible_ms: Summary | None
    rtf: Summary | None
    underrun_ms: Summary | None
    server_s: dict[str, float] = {}
    server_counts: dict[str, float] = {}
    rival: SpeechReport | None = None

    @property
    def audio_s_per_s(self) -> float:
        return self.audio_s / self.wall_s


def main(argv: Sequence[str]) -> int:
    """0; 1 when every request failed."""
    args = _parser().parse_args(argv)
    options = SpeechOptions(
        kind="chat" if args.chat else "speech",
        requests=args.requests,
        concurrency=args.concurrency,
        words=args.words,
        voice=args.voice,
        sample_rate=args.sample_rate,
        seed=args.seed,
    )
    command = command_line("speech", argv)
    report = run(_measure(args, args.url, args.model, options, command, MonotonicClock()))
    print(format_report(report))
    if args.transformers is not None:
        rival = _rival(args, options, command)
        print("\ntransformers, whose answers come whole:\n" + format_report(rival))
        report = msgspec.structs.replace(report, rival=rival)
    if args.json is not None:
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2))
    return 0 if report.first_packet_ms is not None else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="omnistage bench speech", description="Speech, or spoken chat answers, as a listener has them."
    )
    parser.add_argument("--url", default=DEFAULT_URL, help="of the server (default: %(default)s)")
    add_server_arguments(parser)
    parser.add_argument("--chat", action="store_true", help="chat with audio out instead of /v1/audio/speech")
    parser.add_argument("--requests", type=int, default=16, metavar="N")
    parser.add_argument("--concurrency", type=int, default=1, metavar="N")
    parser.add_argument("--words", type=int, default=40, metavar="N", help="of each text or question")
    parser.add_argument("--voice", default="", help=f"default: the server's own, else {USUAL_VOICE}")
    parser.add_argument("--sample-rate", type=int, default=24_000, metavar="HZ", help="of the server's PCM")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--transformers", type=Path, metavar="FOLDER", help="measure this, too (with --chat)")
    parser.add_argument(
        "--max-frames", type=int, default=100, metavar="N", help="of codec, in an answer of --transformers"
    )
    return parser


def _rival(args: argparse.Namespace, options: SpeechOptions, command: tuple[str, ...]) -> SpeechReport:
    """Raises RivalFailed."""
    exit_on_sigterm()
    with TransformersOmni(args.transformers, max_frames=args.max_frames) as server:
        return run(_measure(args, server.url, None, options, command, MonotonicClock()))


async def _measure(
    args: argparse.Namespace,
    url: str,
    model: str | None,
    options: SpeechOptions,
    command: tuple[str, ...],
    clock: Clock,
) -> SpeechReport:
    pool = HttpPool(url, clock, api_key=args.api_key)
    try:
        server = await describe(pool, model)
        if not options.voice:
            options = msgspec.structs.replace(options, voice=await own_voice(pool, USUAL_VOICE))
        bodies = [body_of(options, server.model, args.extra_body, i) for i in range(-1, options.requests)]
        warm_up = await listen(pool, options.kind, bodies[0], args.timeout)  # is not counted
        if warm_up.failure is not None:
            print(f"warning: {pool.url} answered: {warm_up.failure.detail}", file=sys.stderr)
        before = await counted(pool)
        started_s = clock.now()
        heard = await listen_all(pool, options, bodies[1:], args.timeout)
        wall_s = clock.now() - started_s
        after = await counted(pool)
    finally:
        pool.close()
    report = report_of(heard, wall_s, options, server, describe_environment(command))
    return msgspec.structs.replace(
        report,
        server_s=increase(before.seconds, after.seconds),
        server_counts=increase(before.counts, after.counts),
    )


async def listen_all(
    pool: HttpPool, options: SpeechOptions, bodies: Sequence[bytes], timeout_s: float
) -> list[Heard]:
    """A closed loop of `concurrency` listeners."""
    waiting = iter(bodies)
    heard: list[Heard] = []

    async def listener() -> None:
        for body in waiting:
            heard.append(await listen(pool, options.kind, body, timeout_s))

    async with asyncio.TaskGroup() as listeners:
        for _ in range(options.concurrency):
            listeners.create_task(listener())
    return heard


def body_of(options: SpeechOptions, model: str | None, extra_json: bytes, index: int) -> bytes:
    """Another text for every request, the same for every run of a seed."""
    text = text_of(random.Random(f"{options.seed}:{index}"), options.words)
    body: dict[str, object] = {"model": model}
    if options.kind == "speech":
        body |= {"input": text, "voice": options.voice, "response_format": "pcm"}
    else:
        body |= {
            "messages": [{"role": "user", "content": text}],
            "modalities": ["text", "audio"],
            "audio": {"voice": options.voice, "format": "pcm16"},
            "stream": True,
            "max_tokens": CHAT_TOKENS,
        }
    body |= msgspec.json.decode(extra_json, type=dict[str, object])
    return msgspec.json.encode(body)


def report_of(
    heard: Sequence[Heard],
    wall_s: float,
    options: SpeechOptions,
    server: ServerInfo,
    environment: Environment,
) -> SpeechReport:
    failures = Counter(h.failure.label for h in heard if h.failure is not None)
    played: list[Playback] = []
    for one in heard:
        if one.failure is None:
            playback = play(one.packets, one.started_s, options.sample_rate)
            if playback is None:
                failures["no_audio"] += 1
            else:
                played.append(playback)
    audible_s = [p.audible_s for p in played if p.audible_s is not None]
    return SpeechReport(
        schema=SCHEMA,
        environment=environment,
        server=server,
        options=options,
        failures=dict(failures),
        silent=len(played) - len(audible_s),
        audio_s=sum(p.duration_s for p in played),
        wall_s=wall_s,
        first_packet_ms=summarize([p.first_packet_s * 1e3 for p in played]),
        first_audible_ms=summarize([s * 1e3 for s in audible_s]),
        rtf=summarize([p.rtf for p in played]),
        underrun_ms=summarize([p.underrun_s * 1e3 for p in played]),
    )


def format_report(report: SpeechReport) -> str:
    options = report.options
    rows = [
        [name, *_cells(summary)]
        for name, summary in (
            ("first packet, ms", report.first_packet_ms),
            ("first audible, ms", report.first_audible_ms),
            ("RTF", report.rtf),
            ("underrun, ms", report.underrun_ms),
        )
    ]
    failed = ", ".join(f"{kind} {count}" for kind, count in sorted(report.failures.items())) or "none"
    return "\n".join(
        [
            f"{options.kind} of {report.server.model} at {report.server.url}:"
            f" {options.requests} requests of {options.words} words, {options.concurrency} at a time",
            render(["", "mean", "p50", "p90", "p99", "max"], rows),
            f"{report.audio_s:.1f} s of speech in {report.wall_s:.1f} s:"
            f" {number(report.audio_s_per_s)} audio-s/s; failures: {failed}; silent answers: {report.silent}",
            *_server_lines(report),
            *report.environment.lines(),
        ]
    )


def _server_lines(report: SpeechReport) -> list[str]:
    lines = []
    for what, found in (("s", report.server_s), ("times", report.server_counts)):
        if found:
            counts = ", ".join(f"{name} {number(value)}" for name, value in found.items())
            lines.append(f"counted by the server, {what}: {counts}")
    return lines


def _cells(summary: Summary | None) -> list[str]:
    if summary is None:
        return ["-"] * 5
    return [number(v) for v in (summary.mean, summary.p50, summary.p90, summary.p99, summary.max)]
