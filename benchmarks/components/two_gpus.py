"""Everything that two GPUs of one host are for, measured in one run.

    python -m benchmarks.components.two_gpus --out DIR [--only tests,speech,death,links,chat,decode]

`--only` also takes together: spoken answers of a talker and a vocoder in one process, as the deployment's
file has not chosen.

Servers of the deployments in `examples/deployments` for speech are started one after the other, each once for
all that is measured on it. Those for chat are started beside each other and then measured in turns: one that
nobody asks anything uses neither its GPU nor a core. Two that need one GPU each are measured side by side,
each with a GPU and half of the cores of its own. Parts run in the order above. One that fails leaves its log
and does not stop the others; one for which too little time is left is named as not run. DIR gets two_gpus.txt
(the tables, printed last), two_gpus.json and two_gpus.logs.tar.gz after every part.
"""

from __future__ import annotations

import argparse
import http.client
import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.components.one_gpu_table import FRAME_FLOORS_MS, FRAME_MS
from benchmarks.components.requirements import complaint
from benchmarks.components.run_loads import (
    CHAT_HEADER,
    CHAT_LOAD,
    DECODE_HEADER,
    QUICK_CHAT_LOAD,
    SPEECH_HEADER,
    SPOKEN,
    WORK_HEADER,
    audio_s_per_s,
    bench,
    chat_cells,
    decode_report,
    decode_rows,
    figure,
    links_report,
    speech_cells,
    speech_report,
    speech_work,
    voice_of,
)
from benchmarks.components.run_processes import (
    Run,
    finish,
    measured,
    python,
    read,
    spawn,
    stop,
    tail,
    try_part,
)
from benchmarks.components.run_servers import (
    CHAT_MODEL,
    SPEECH_MODEL,
    Running,
    Server,
    folder,
    log_of,
    prepare,
    servers,
    steps_table,
    used_mib_of_gpus,
)
from benchmarks.components.two_gpus_servers import CHAT, SPEECH, TOGETHER
from benchmarks.text_table import number, render

GREEDY_PROMPTS = 8
GREEDY_TOKENS = 48
PARTS = ("tests", "speech", "death", "links", "chat", "decode")
SPEECH_CASES = ((16, 48), (64, 128))  # streams, requests
DEATH_CASES = ((16, 192), (64, 320))
KILLED_AFTER_S = 3.0  # of at least 5 that the answers take
SPEECH_START_LIMIT_S, CHAT_START_LIMIT_S = 130.0, 110.0
TESTS_LIMIT_S = 200.0
# Measuring alone, with what is started for it; and what a part is not begun without.
LIMITS_S = {"speech": 100.0, "death": 110.0, "links": 150.0, "chat": 200.0, "decode": 90.0}
LEAST_S = {"tests": 60.0, "speech": 90.0, "links": 40.0, "chat": 120.0, "decode": 60.0}


# --- parts --------------------------------------------------------------------------------------------------
def links(run: Run) -> None:
    """Alone on the machine."""
    between = [("cuda:0,cuda:1", connector) for connector in ("cuda_ipc", "shm", "nixl")]
    cases = [*between, ("cuda:0,cuda:0", "cuda_ipc")]
    for devices, connector in [("cpu,cpu", "shm")] if run.quick else cases:  # one that hangs spoils no other
        if not links_report(run, devices, connector, connector) and connector == "nixl":
            # Its memory is the host's: whether it is UCX's own dealings with CUDA that fail.
            links_report(run, devices, connector, "nixl, UCX without CUDA", UCX_TLS="^cuda")


def chat(run: Run, there: dict[str, Running]) -> None:
    """The first two side by side, the others one after another."""
    load = QUICK_CHAT_LOAD if run.quick else CHAT_LOAD
    names = [server.name for server in CHAT[:5] if server.name in there]
    beside = [name for name in names if there[name].server.half is not None]
    for group in [beside, *([name] for name in names if name not in beside)]:
        begun = {name: bench(run, there[name], "chat", *load, "--no-overhead") for name in group}
        finish(run, {f"chat {name}": process for name, (process, _) in begun.items()}, 75)
        for name, (_, result) in begun.items():
            run.results[f"chat {name}"] = read(result)
            run.say(f"chat, {name}: done")
    run.show(chat_table(run, names))


def chat_table(run: Run, names: Sequence[str]) -> str:
    rows = []
    for server in CHAT:
        report = run.results.get(f"chat {server.name}") if server.name in names else None
        if report is not None:
            rate, *cells = chat_cells(report)
            each = number(report["throughput"]["requests_per_s"] / server.num_gpus)
            rows.append([server.name, rate, each, *cells])
    return render(["chat, 32 users", CHAT_HEADER[0], "a GPU", *CHAT_HEADER[1:]], rows)


def decode(run: Run, there: dict[str, Running]) -> None:
    """Tensor parallel beside one GPU, in turns."""
    one, divided = there.get(CHAT[0].name), there.get(CHAT[5].name)
    pair = [running for running in (one, divided) if running is not None]
    streams, tokens, repeats = ("1,2", 8, "1") if run.quick else ("1,32", 128, "3")
    report = decode_report(run, "decode", pair, streams, tokens, "--repeats", repeats)
    if report is not None:
        run.show(render(DECODE_HEADER, decode_rows(report)))
    if one is not None and divided is not None:
        run.results["greedy"] = compare_greedy(run, one, divided)


def compare_greedy(run: Run, one: Running, other: Running) -> dict[str, Any]:
    """How far the answers of two servers agree, beside how far one agrees with itself in another batch."""
    prompts = [f"Number {i}: tell me something about the number {i * 37}." for i in range(GREEDY_PROMPTS)]
    alone = [greedy(one, prompt) for prompt in prompts]
    divided = [greedy(other, prompt) for prompt in prompts]
    again = [greedy(one, prompt + prompts[0], 1) and greedy(one, prompt) for prompt in prompts]
    found = {
        "tokens": GREEDY_TOKENS,
        "same_first_token": sum(common(a[:1], b[:1]) == 1 for a, b in zip(alone, divided, strict=True)),
        "common_tokens_median": median([common(a, b) for a, b in zip(alone, divided, strict=True)]),
        "common_tokens_of_one_gpu_with_itself": median(
            [common(a, b) for a, b in zip(alone, again, strict=True)]
        ),
        "largest_first_logprob_difference": max(
            abs(a[0][1] - b[0][1]) for a, b in zip(alone, divided, strict=True) if a and b
        ),
        "prompts": len(prompts),
    }
    run.say(f"greedy tokens, tensor parallel 2 against one GPU: {found}")
    return found


def common(one: Sequence[tuple[str, float]], other: Sequence[tuple[str, float]]) -> float:
    """Tokens before the first that differs."""
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a[0] != b[0]:
            return float(index)
    return float(min(len(one), len(other)))


def greedy(running: Running, prompt: str, max_tokens: int = GREEDY_TOKENS) -> list[tuple[str, float]]:
    """(token, log-probability) of an answer."""
    body = {
        "messages": [{"role": "user", "content": prompt}],
        "temperature": 0,
        "max_tokens": max_tokens,
        "logprobs": True,
        "ignore_eos": True,
    }
    connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=60)
    try:
        connection.request(
            "POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"}
        )
        response = connection.getresponse()
        answer = json.loads(response.read())
        assert response.status == 200, str(answer)[:300]
    finally:
        connection.close()
    content = answer["choices"][0]["logprobs"]["content"]
    return [(str(entry["bytes"] or entry["token"]), float(entry["logprob"])) for entry in content]


def speech(run: Run, there: dict[str, Running]) -> None:
    memory = run.results.setdefault("memory_mib", {})
    for name, running in there.items():
        memory[f"{name}, ready"] = used_mib_of_gpus()
        run.show(steps_table({name: log_of(run, running.server)}))
        for streams, requests in ((2, 4),) if run.quick else SPEECH_CASES:
            speech_report(run, running, streams, requests)
        memory[f"{name}, in the end"] = used_mib_of_gpus()
    run.show(speech_table(run))


def speech_table(run: Run) -> str:
    """What was found of spoken answers, beside the floor of the rate; then what each stage's steps took."""
    found, works = [], []
    for server in (*SPEECH, TOGETHER):
        for streams in (2, *(streams for streams, _ in SPEECH_CASES)):
            report = run.results.get(f"speech {streams} {server.name}")
            if report is not None:
                frame_ms = FRAME_FLOORS_MS.get(streams)
                floor = None if frame_ms is None else streams * FRAME_MS / frame_ms
                each = number(audio_s_per_s(report) / server.num_gpus)
                found.append([server.name, *speech_cells(report), each, number(floor)])
                works.append([server.name, *speech_work(report)])
    header = ["speech", *SPEECH_HEADER, "audio-s/s a GPU", "floor"]
    return "\n".join([render(header, found), render(["steps of speech", *WORK_HEADER], works)])


def death(run: Run, there: dict[str, Running]) -> None:
    """Of the talker's worker, under each load; the next one begins when it is there again."""
    for running in there.values():
        for streams, requests in ((2, 6),) if run.quick else DEATH_CASES:
            name = f"death {streams} {running.server.name}"
            result = run.json(name)
            command = python("benchmarks.components.speech_death", "--url", running.url, "--stage", "talker")
            command += ["--extra-body", SPOKEN, "--json", str(result), "--voice", voice_of(running)]
            command += ["--requests", str(requests), "--concurrency", str(streams), "--timeout", "50"]
            command += ["--after-s", "0.3" if run.quick else str(KILLED_AFTER_S)]
            finish(run, {name: spawn(run, name, command)}, 60)
            run.results[name] = read(result)
    run.show(death_table(run))


def death_table(run: Run) -> str:
    """Milliseconds; "sounding": streams that the kill interrupted, of which the pauses are."""
    rows = []
    for name, report in run.results.items():
        if name.startswith("death ") and report is not None:
            pause, before, underrun = (report[key] for key in ("pause_ms", "gap_before_ms", "underrun_ms"))
            waits = report["first_packet_after_ms"]
            counts = [str(report[key]) for key in ("requests", "under_way", "restarts")]
            cells = [
                figure(pause, "p50"),
                figure(pause, "p99"),
                figure(before, "p99"),
                figure(underrun, "p99"),
            ]
            rows.append([name, *counts, *cells, figure(waits, "p99"), str(sum(report["failures"].values()))])
    header = ["talker killed", "requests", "sounding", "restarts", "pause p50", "p99", "gap before p99"]
    return render([*header, "underrun p99", "waited for sound p99", "failed"], rows)


def links_table(run: Run) -> str:
    rows = []
    for name, report in run.results.items():
        for one in report if name.startswith("links ") else ():
            times = [number(one[key]) for key in ("latency_us", "latency_p99_us", "floor_us")]
            rates = [number(one[key]) for key in ("gib_per_s", "floor_gib_per_s")]
            rows.append([name.removeprefix("links "), f"{one['nbytes'] >> 10} KiB", *times, *rates])
    return render(["edges", "size", "one way p50, µs", "p99", "floor", "GiB/s", "floor"], rows)


def tests(run: Run) -> None:
    """Those that one GPU skips. Should one hang, the stacks of its processes are at the end of the log."""
    command = python("pytest", "-v", "-s", "-m", "gpu", "-p", "no:cacheprovider")
    command += ["-o", "faulthandler_timeout=60", "-k", "cuda:1 or test_two_gpus"]
    process = spawn(run, "tests", [*command, "tests/gpu/test_cuda_ipc.py", "tests/gpu/test_two_gpus.py"])
    try:
        status = process.wait(max(1.0, min(TESTS_LIMIT_S, run.left_s)))
    except subprocess.TimeoutExpired:
        stop(process, signal.SIGABRT)
        status = None
    if status != 0:
        run.fail(f"tests: {'too late' if status is None else f'status {status}'}")
    run.results["tests"] = tail(run.log("tests"), 200)
    run.show(tail(run.log("tests"), 24 if status == 0 else 120))


# --- all of it ----------------------------------------------------------------------------------------------
def measure(run: Run, parts: Sequence[str]) -> None:
    if "tests" in parts and not run.quick:
        try_part(run, "tests", partial(tests, run), needs_s=LEAST_S["tests"])
    for server in (*SPEECH, TOGETHER):  # one after the other: both would not fit with their graphs
        speech_parts = spoken_parts(server, parts)
        if speech_parts:
            limit_s = SPEECH_START_LIMIT_S + sum(LIMITS_S[name] for name in speech_parts)
            with_servers = partial(on_servers, run, [server], speech_parts, SPEECH_START_LIMIT_S)
            try_part(run, server.name, with_servers, limit_s=limit_s, needs_s=LEAST_S["speech"])
    if "links" in parts:
        try_part(run, "links", partial(links, run), limit_s=LIMITS_S["links"], needs_s=LEAST_S["links"])
    chat_parts = [part for part in ("chat", "decode") if part in parts]
    if chat_parts:
        wanted = [CHAT[0], CHAT[5]] if chat_parts == ["decode"] else CHAT if "decode" in parts else CHAT[:5]
        with_servers = partial(on_servers, run, wanted, chat_parts, CHAT_START_LIMIT_S)
        try_part(run, "servers of chat", with_servers, needs_s=LEAST_S[chat_parts[0]])


def spoken_parts(server: Server, parts: Sequence[str]) -> list[str]:
    """What is measured on the server."""
    if server is TOGETHER:
        return ["speech"] if "together" in parts else []
    wanted = ("speech", "death") if server is SPEECH[1] else ("speech",)
    return [part for part in wanted if part in parts]


def on_servers(run: Run, wanted: Sequence[Server], parts: Sequence[str], start_limit_s: float) -> None:
    measuring = {"speech": speech, "death": death, "chat": chat, "decode": decode}
    with servers(run, wanted, limit_s=start_limit_s) as there:
        for part in parts if there else ():
            name = f"{part}, {wanted[0].name}" if len(wanted) == 1 else part
            try_part(run, name, partial(measuring[part], run, there), limit_s=LIMITS_S[part])


def tables(run: Run) -> str:
    found = [chat_table(run, [server.name for server in CHAT]), speech_table(run), death_table(run)]
    found += [
        render(DECODE_HEADER, decode_rows(run.results.get("decode") or {"figures": []})),
        links_table(run),
    ]
    others = [f"{what}: {json.dumps(run.results.get(what))}" for what in ("ready_s", "memory_mib", "greedy")]
    return "\n".join([*found, *others])


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="takes two_gpus.json, .txt and .logs.tar.gz")
    parser.add_argument("--only", default=",".join(PARTS), help=f"of {', '.join(PARTS)}, together")
    parser.add_argument("--budget-s", type=float, default=530.0)
    parser.add_argument("--chat-model", type=folder, help="default: the 3B shape")
    parser.add_argument("--speech-model", type=folder, help="default: the 30B shape")
    parser.add_argument(
        "--servers", action="append", default=[], metavar="PART", help="of a name; may come again"
    )
    parser.add_argument("--quick", action="store_true", help="loads for a small machine, and no GPU")
    args = parser.parse_args(argv)
    models = {CHAT_MODEL: args.chat_model, SPEECH_MODEL: args.speech_model}
    parts = args.only.split(",")
    if unknown := set(parts) - {*PARTS, "together"}:
        parser.error(f"--only: no part {', '.join(sorted(unknown))}")
    if absent := complaint(gpu=not args.quick):
        print(absent, file=sys.stderr)
        return 2
    with measured(
        "two_gpus",
        args.out,
        args.budget_s,
        models,
        quick=args.quick,
        table=tables,
        only_servers=args.servers,
    ) as run:
        prepare(run)
        measure(run, parts)
        run.say("failed: " + ("; ".join([*run.failures, *run.not_run]) or "nothing"))
        run.show(tables(run))
    return 1 if run.failures or run.not_run else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
