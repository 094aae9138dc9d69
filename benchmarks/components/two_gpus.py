"""Everything that two GPUs of one host are for, measured in one run.

    python -m benchmarks.components.two_gpus --out DIR [--only links,tests,chat,decode,speech,death]

Servers of the deployments in `examples/deployments` for chat are started beside each other and then measured
in turns: one that nobody asks anything uses neither its GPU nor a core. Two that need one GPU each are
measured side by side, each with a GPU and half of the cores of its own. A part that fails leaves its log and
does not stop the others.
"""

from __future__ import annotations

import argparse
import http.client
import json
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.components.requirements import complaint
from benchmarks.components.run_loads import (
    CHAT_HEADER,
    CHAT_LOAD,
    DECODE_HEADER,
    QUICK_CHAT_LOAD,
    SPEECH_HEADER,
    SPOKEN,
    audio_s_per_s,
    bench,
    chat_cells,
    decode_report,
    decode_rows,
    links_report,
    speech_cells,
    speech_report,
    voice_of,
)
from benchmarks.components.run_processes import (
    Run,
    finish,
    measured,
    python,
    read,
    spawn,
    tail,
    try_part,
)
from benchmarks.components.run_servers import (
    CHAT_MODEL,
    SPEECH_MODEL,
    Running,
    Server,
    folder,
    prepare,
    servers,
)
from benchmarks.components.two_gpus_servers import CHAT, SPEECH
from benchmarks.text_table import number, render

GREEDY_PROMPTS = 8
GREEDY_TOKENS = 48


# --- parts --------------------------------------------------------------------------------------------------
def links(run: Run) -> None:
    """Alone on the machine."""
    cases = [("cuda:0,cuda:1", "cuda_ipc,shm,nixl"), ("cuda:0,cuda:0", "cuda_ipc")]
    for devices, connectors in [("cpu,cpu", "shm")] if run.quick else cases:
        links_report(run, devices, connectors)


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
    """One server after the other."""
    for streams in (2,) if run.quick else (16, 64):
        for server in SPEECH:
            if server.name in there:
                speech_report(run, there[server.name], streams, streams * (2 if streams == 16 else 1))
    run.show(speech_table(run))


def speech_table(run: Run) -> str:
    rows = []
    for server in SPEECH:
        for streams in (2, 16, 64):
            report = run.results.get(f"speech {streams} {server.name}")
            if report is not None:
                each = number(audio_s_per_s(report) / server.num_gpus)
                rows.append([server.name, *speech_cells(report), each])
    return render(["", *SPEECH_HEADER, "audio-s/s a GPU"], rows)


def death(run: Run, there: dict[str, Running]) -> None:
    running = there.get(SPEECH[1].name)
    if running is None:
        return
    result = run.json("death")
    command = python("benchmarks.components.speech_death", "--url", running.url, "--stage", "talker")
    command += [
        "--extra-body",
        SPOKEN,
        "--json",
        str(result),
        "--timeout",
        "75",
        "--voice",
        voice_of(running),
    ]
    command += (
        ["--requests", "4", "--concurrency", "2", "--after-s", "2"] if run.quick else ["--after-s", "3"]
    )
    finish(run, {"death": spawn(run, "death", command)}, 90)
    run.show(tail(run.log("death"), 6))
    run.results["death"] = read(result)


# --- all of it ----------------------------------------------------------------------------------------------
def measure(run: Run, parts: Sequence[str]) -> None:
    chat_parts = [part for part in ("chat", "decode") if part in parts]
    if chat_parts or "tests" in parts:
        wanted: Sequence[Server] = ()
        if chat_parts:
            wanted = CHAT if "chat" in parts else (CHAT[0], CHAT[5])
        tests = None
        if "tests" in parts and not run.quick:
            command = python("pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "-s")
            command += ["tests/gpu/test_cuda_ipc.py", "tests/gpu/test_two_gpus.py"]
            tests = spawn(run, "tests", command)  # while servers start
        with servers(run, wanted) as there:
            if tests is not None:
                try_part(run, "tests", lambda: report_tests(run, tests))
            for name, measuring in (("chat", chat), ("decode", decode)):
                if name in parts and there:
                    try_part(run, name, partial(measuring, run, there))
    for server in SPEECH:  # one after the other: both would not fit with their graphs
        wanted_parts = [name for name in ("speech", "death") if name in parts]
        if server is SPEECH[0] and wanted_parts == ["death"]:
            wanted_parts = []
        if not wanted_parts:
            continue
        with servers(run, [server]) as there:
            for name, measuring in (("speech", speech), ("death", death)):
                if name in wanted_parts and there:
                    try_part(run, f"{name}, {server.name}", partial(measuring, run, there))


def tables(run: Run) -> str:
    return "\n".join([chat_table(run, [server.name for server in CHAT]), speech_table(run)])


def report_tests(run: Run, process: subprocess.Popen[bytes]) -> None:
    good = finish(run, {"tests": process}, 170)
    run.show(tail(run.log("tests"), 10 if good else 60))
    run.results["tests"] = tail(run.log("tests"), 60)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="takes two_gpus.json, .txt and .logs.tar.gz")
    parser.add_argument("--only", default="links,tests,chat,decode,speech,death")
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
        if "links" in parts:
            try_part(run, "links", lambda: links(run))
        measure(run, parts)
        run.say("failed: " + ("; ".join([*run.failures, *run.not_run]) or "nothing"))
        run.show(tables(run))
    return 1 if run.failures or run.not_run else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
