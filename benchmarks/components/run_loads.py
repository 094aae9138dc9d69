"""What the servers of a run are asked, by `omnistage bench`, and the rows that say what it found."""

from __future__ import annotations

import http.client
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.components.run_processes import Run, finish, python, read, spawn
from benchmarks.components.run_servers import Running
from benchmarks.text_table import number

Report = dict[str, Any]
SPOKEN = '{"max_tokens": 40, "ignore_eos": true}'
SPOKEN_S = "server.max_speech_s=8.08"  # 101 frames: what noise speaks would not end by itself
CHAT_HEADER = ["req/s", "cold TTFT", "p99", "warm TTFT", "p99", "ITL p50", "p99", "failed"]
DECODE_HEADER = ["decode", "streams", "tokens in", "TPOT ms", "tok/s", "TTFT ms", "failed"]
SPEECH_HEADER = ["streams", "s each", "first packet", "p99", "audio-s/s", "RTF p50", "underrun p99", "failed"]
# What a step of thinker and talker, a decode, a packet and a chunk between talker and vocoder held and took.
WORK_HEADER = [
    *("streams", "thinker ms", "talker frames", "talker ms", "sending ms"),
    *("decode rows", "frames", "decode ms", "packet frames", "edge ms"),
]
# Of 32 users, and what a small machine can do of it.
CHAT_LOAD = (
    *("--sessions", "96", "--warmup", "16", "--turns", "5", "--image-size", "1024x1024"),
    *("--output-tokens", "64", "--concurrency", "32"),
)
QUICK_CHAT_LOAD = (
    *("--sessions", "3", "--warmup", "1", "--turns", "2", "--image-size", "64x64"),
    *("--output-tokens", "4", "--concurrency", "2"),
)


def bench(run: Run, running: Running, what: str, *arguments: str) -> tuple[subprocess.Popen[bytes], Path]:
    """`what` begins with the name of the benchmark."""
    name = f"{what} {running.server.name}"
    result = run.json(name)
    command = python(
        "api.cli", "bench", what.split()[0], "--url", running.url, *arguments, "--json", str(result)
    )
    return spawn(run, name, command, running.server.half), result


# --- chat ---------------------------------------------------------------------------------------------------
def chat_report(
    run: Run, running: Running, load: Sequence[str], limit_s: float, name: str = ""
) -> Report | None:
    """Of one server; `name` parts this load from others of the server."""
    what = f"chat {name}".rstrip()
    process, result = bench(run, running, what, *load, "--no-overhead")
    finish(run, {f"{what} {running.server.name}": process}, limit_s)
    report: Report | None = read(result)
    run.results[f"{what} {running.server.name}"] = report
    return report


def chat_cells(report: Report) -> list[str]:
    """Under `CHAT_HEADER`."""
    latency = report["latency"]
    cold, warm, itl = latency["ttft_cold"], latency["ttft_warm"], latency["itl"]
    cells = [number(report["throughput"]["requests_per_s"]), figure(cold, "p50"), figure(cold, "p99")]
    cells += [figure(warm, "p50"), figure(warm, "p99"), figure(itl, "p50"), figure(itl, "p99")]
    return [*cells, str(sum(report["failures"].values()))]


# --- decoding -----------------------------------------------------------------------------------------------
def decode_report(
    run: Run, name: str, those: Sequence[Running], streams: str, output_tokens: int, *more: str
) -> Report | None:
    """Of several servers, in turns; named by what stands before a comma in their names."""
    urls = [
        part for running in those for part in ("--url", f"{running.server.name.split(',')[0]}={running.url}")
    ]
    result = run.json(name)
    command = python("api.cli", "bench", "decode", *urls, "--streams", streams)
    command += ["--output-tokens", str(output_tokens), *more, "--json", str(result)]
    finish(run, {name: spawn(run, name, command)}, 60)
    report: Report | None = read(result)
    run.results[name] = report
    return report


def decode_rows(report: Report) -> list[list[str]]:
    """Under `DECODE_HEADER`."""
    rows = []
    for one in report["figures"]:
        cells = [number(tpot_ms(one)), number(one["sum_tok_s"]), number(one["ttft_ms"])]
        begin = [one["server"], str(one["streams"]), number(one["prompt_tokens"])]
        rows.append([*begin, *cells, str(one["num_failed"])])
    return rows


def tpot_ms(decode_figure: Report) -> float | None:
    rate = decode_figure["stream_tok_s"]
    return 1e3 / rate if rate else None


# --- speech -------------------------------------------------------------------------------------------------
def voice_of(running: Running) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=10)
    try:
        connection.request("GET", "/v1/audio/voices")
        return str(json.loads(connection.getresponse().read())["voices"][0])
    finally:
        connection.close()


def speech_report(run: Run, running: Running, streams: int, requests: int) -> Report | None:
    """Of answers of 40 tokens, each heard as it comes."""
    asked = ["--chat", "--words", "15", "--extra-body", SPOKEN, "--timeout", "60"]
    asked += ["--voice", voice_of(running), "--requests", str(requests), "--concurrency", str(streams)]
    name = f"speech {streams}"
    process, result = bench(run, running, name, *asked)
    finish(run, {f"{name} {running.server.name}": process}, 80)
    report: Report | None = read(result)
    run.results[f"{name} {running.server.name}"] = report
    run.say(f"speech, {streams} streams, {running.server.name}: done")
    return report


def audio_s_per_s(report: Report) -> float:
    return float(report["audio_s"] / report["wall_s"]) if report["wall_s"] else 0.0


def speech_cells(report: Report) -> list[str]:
    """Under `SPEECH_HEADER`."""
    first, underrun, failed = report["first_packet_ms"], report["underrun_ms"], report["failures"]
    answered = report["options"]["requests"] - sum(failed.values())
    each_s = report["audio_s"] / answered if answered else None
    cells = [str(report["options"]["concurrency"]), number(each_s)]
    cells += [figure(first, "p50"), figure(first, "p99"), number(audio_s_per_s(report))]
    return [*cells, figure(report["rtf"], "p50"), figure(underrun, "p99"), str(sum(failed.values()))]


def speech_work(report: Report) -> list[str]:
    """Under `WORK_HEADER`: what each stage's steps held and took, which explains the figures beside it."""
    seconds, counts = report["server_s"], report["server_counts"]

    def of(found: dict[str, float], what: str, among: str, factor: float = 1.0) -> str:
        steps = counts.get(among, 0.0)
        return number(factor * found.get(what, 0.0) / steps) if steps else "-"

    talker, thinker, vocoder = "talker num steps", "thinker num steps", "vocoder vocoder steps"
    return [
        str(report["options"]["concurrency"]),
        of(seconds, "thinker busy", thinker, 1e3),
        of(counts, "talker frames", talker),
        of(seconds, "talker busy", talker, 1e3),
        of(seconds, "talker sending", talker, 1e3),
        of(counts, "vocoder vocoder rows", vocoder),
        of(counts, "vocoder vocoder frames", vocoder),
        of(seconds, "vocoder vocoder busy", vocoder, 1e3),
        of(counts, "vocoder vocoder frames", "vocoder vocoder packets"),
        of(seconds, "talker->vocoder edge delivery", "talker->vocoder edge delivery", 1e3),
    ]


# --- edges --------------------------------------------------------------------------------------------------
def links_report(run: Run, devices: str, connectors: str, case: str = "", **env: str) -> list[Report]:
    """Of the edges between two processes, by connector and size. Alone on the machine. `case` parts it from
    others of the same devices."""
    name = f"links {devices.replace(':', '').replace(',', '-')} {case}".rstrip()
    result = run.json(name)
    command = python("benchmarks.components.gpu_links", "--devices", devices, "--connectors", connectors)
    command += ["--json", str(result), "--pings", "20" if run.quick else "200"]
    command += ["--max-size", "65536", "--rounds", "1"] if run.quick else []
    finish(run, {name: spawn(run, name, command, None, **env)}, 60)
    run.show(run.log(name).read_text(errors="replace"))
    report: list[Report] = read(result) or []
    run.results[name] = report
    return report


def summary(report: Report | None, *path: str) -> float | None:
    """A figure inside a report; None where it was not measured."""
    found: Any = report
    for key in path:
        if found is None:
            return None
        found = found[key]
    return None if found is None else float(found)


def figure(found: Report | None, name: str) -> str:
    return number(summary(found, name))
