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
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.components.two_gpus_servers import (
    CHAT,
    CHAT_MODEL,
    SPEECH,
    SPEECH_MODEL,
    Run,
    Running,
    Server,
    bench,
    figure,
    finish,
    python,
    read,
    servers,
    spawn,
    tail,
)
from benchmarks.samples import median
from benchmarks.text_table import number, render

GREEDY_PROMPTS = 8
GREEDY_TOKENS = 48
SPOKEN = '{"max_tokens": 40, "ignore_eos": true}'


# --- parts --------------------------------------------------------------------------------------------------
def links(run: Run) -> None:
    """Alone on the machine."""
    cases = [("cuda:0,cuda:1", "cuda_ipc,shm,nixl"), ("cuda:0,cuda:0", "cuda_ipc")]
    if run.quick:
        cases = [("cpu,cpu", "shm")]
    for devices, connectors in cases:
        name = f"links {devices.replace(':', '').replace(',', '-')}"
        result = run.log(name).with_suffix(".json")
        command = python("benchmarks.components.gpu_links", "--devices", devices, "--connectors", connectors)
        command += ["--json", str(result), "--pings", "20" if run.quick else "200"]
        command += ["--max-size", "65536", "--rounds", "1"] if run.quick else []
        finish(run, {name: spawn(run, name, command)}, 60)
        print(run.log(name).read_text(errors="replace"), flush=True)
        run.results[name] = read(result)


def chat(run: Run, there: dict[str, Running]) -> None:
    """The first two side by side, the others one after another."""
    load = ["--sessions", "96", "--warmup", "16", "--turns", "5", "--image-size", "1024x1024"]
    load += ["--output-tokens", "64", "--concurrency", "32"]
    if run.quick:
        load = ["--sessions", "3", "--warmup", "1", "--turns", "2", "--image-size", "64x64"]
        load += ["--output-tokens", "4", "--concurrency", "2"]
    names = [server.name for server in CHAT[:5] if server.name in there]
    beside = [name for name in names if there[name].server.half is not None]
    for group in [beside, *([name] for name in names if name not in beside)]:
        begun = {name: bench(run, there[name], "chat", *load, "--no-overhead") for name in group}
        finish(run, {f"chat {name}": process for name, (process, _) in begun.items()}, 75)
        for name, (_, result) in begun.items():
            run.results[f"chat {name}"] = read(result)
            run.say(f"chat, {name}: done")
    print(chat_table(run, names), flush=True)


def chat_table(run: Run, names: Sequence[str]) -> str:
    rows = []
    for server in CHAT:
        report = run.results.get(f"chat {server.name}") if server.name in names else None
        if report is None:
            continue
        latency, rate = report["latency"], report["throughput"]["requests_per_s"]
        cold, warm = latency["ttft_cold"], latency["ttft_warm"]
        cells = [number(rate), number(rate / server.num_gpus), figure(cold, "p50"), figure(cold, "p99")]
        cells += [figure(warm, "p50"), figure(warm, "p99"), figure(latency["itl"], "p50")]
        rows.append(
            [server.name, *cells, figure(latency["itl"], "p99"), str(sum(report["failures"].values()))]
        )
    header = [
        "chat, 32 users",
        "req/s",
        "a GPU",
        "cold TTFT",
        "p99",
        "warm TTFT",
        "p99",
        "ITL p50",
        "p99",
        "failed",
    ]
    return render(header, rows)


def decode(run: Run, there: dict[str, Running]) -> None:
    """Tensor parallel beside one GPU, in turns."""
    one, divided = there.get(CHAT[0].name), there.get(CHAT[5].name)
    pair = [running for running in (one, divided) if running is not None]
    urls = [
        part for running in pair for part in ("--url", f"{running.server.name.split(',')[0]}={running.url}")
    ]
    tokens, streams = ("8", "1,2") if run.quick else ("128", "1,32")
    result = run.work / "decode.json"
    command = python("api.cli", "bench", "decode", *urls, "--streams", streams, "--output-tokens", tokens)
    command += ["--repeats", "1" if run.quick else "3", "--json", str(result)]
    finish(run, {"decode": spawn(run, "decode", command)}, 60)
    report = run.results["decode"] = read(result)
    if report is not None:
        rows = []
        for one_figure in report["figures"]:
            rate = one_figure["stream_tok_s"]
            cells = [number(1e3 / rate if rate else None), number(one_figure["sum_tok_s"])]
            cells += [number(one_figure["ttft_ms"]), str(one_figure["num_failed"])]
            rows.append([one_figure["server"], str(one_figure["streams"]), *cells])
        print(render(["decode", "streams", "TPOT ms", "tok/s", "TTFT ms", "failed"], rows), flush=True)
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


def voice_of(running: Running) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=10)
    try:
        connection.request("GET", "/v1/audio/voices")
        return str(json.loads(connection.getresponse().read())["voices"][0])
    finally:
        connection.close()


def speech(run: Run, there: dict[str, Running]) -> None:
    """One server after the other."""
    names = [server.name for server in SPEECH if server.name in there]
    for streams in (2,) if run.quick else (16, 64):
        for name in names:
            requests = streams * (2 if streams == 16 else 1)
            asked = ["--chat", "--words", "15", "--extra-body", SPOKEN, "--timeout", "60"]
            asked += ["--voice", voice_of(there[name])]
            asked += ["--requests", str(requests), "--concurrency", str(streams)]
            process, result = bench(run, there[name], f"speech {streams}", *asked)
            finish(run, {f"speech {streams} {name}": process}, 80)
            run.results[f"speech {streams} {name}"] = read(result)
            run.say(f"speech, {streams} streams, {name}: done")
    print(speech_table(run), flush=True)


def speech_table(run: Run) -> str:
    rows = []
    for server in SPEECH:
        for streams in (2, 16, 64):
            report = run.results.get(f"speech {streams} {server.name}")
            if report is None:
                continue
            rate = report["audio_s"] / report["wall_s"] if report["wall_s"] else 0.0
            first, silence = report["first_packet_ms"], report["underrun_ms"]
            cells = [str(streams), figure(first, "p50"), figure(first, "p99"), number(rate)]
            cells += [number(rate / server.num_gpus), figure(report["rtf"], "p50"), figure(silence, "p99")]
            rows.append([server.name, *cells, str(sum(report["failures"].values()))])
    header = ["", "streams", "first packet", "p99", "audio-s/s", "a GPU", "RTF p50", "underrun p99", "failed"]
    return render(header, rows)


def death(run: Run, there: dict[str, Running]) -> None:
    running = there.get(SPEECH[1].name)
    if running is None:
        return
    result = run.work / "death.json"
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
    print(tail(run.log("death"), 6), flush=True)
    run.results["death"] = read(result)


# --- all of it ----------------------------------------------------------------------------------------------
def try_part(run: Run, name: str, part: Callable[[], None]) -> None:
    """What one part cannot do is written down, and the next one begins."""
    if run.left_s < 5:
        run.failures.append(f"{name}: no time left")
        return
    run.say(f"== {name}")
    try:
        part()
    except (AssertionError, OSError, ValueError, KeyError, subprocess.SubprocessError) as error:
        run.failures.append(f"{name}: {type(error).__name__}: {error}")
        run.say(f"FAILED {run.failures[-1]}")


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
        with servers(run, wanted, 8100) as there:
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
        with servers(run, [server], 8200) as there:
            for name, measuring in (("speech", speech), ("death", death)):
                if name in wanted_parts and there:
                    try_part(run, f"{name}, {server.name}", partial(measuring, run, there))


def write_folders(run: Run) -> dict[str, subprocess.Popen[bytes]]:
    """Of the shapes for which no folder was given; under way."""
    writing = {}
    for shape in [shape for shape, folder in run.models.items() if folder is None]:
        folder = run.models[shape] = run.work / shape
        command = python("benchmarks.components.shape_folder", shape, str(folder))
        writing[shape] = spawn(run, shape, command)
    return writing


def report_tests(run: Run, process: subprocess.Popen[bytes]) -> None:
    good = finish(run, {"tests": process}, 170)
    print(tail(run.log("tests"), 10 if good else 60), flush=True)
    run.results["tests"] = tail(run.log("tests"), 60)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="takes two_gpus.json and logs.tar.gz")
    parser.add_argument("--only", default="links,tests,chat,decode,speech,death")
    parser.add_argument("--budget-s", type=float, default=530.0)
    parser.add_argument("--chat-model", type=Path, help="default: the 3B shape")
    parser.add_argument("--speech-model", type=Path, help="default: the 30B shape")
    parser.add_argument(
        "--servers", action="append", default=[], metavar="PART", help="of a name; may come again"
    )
    parser.add_argument("--quick", action="store_true", help="loads for a small machine, and no GPU")
    args = parser.parse_args(argv)
    work = args.out / "logs"
    work.mkdir(parents=True, exist_ok=True)
    models = {CHAT_MODEL: args.chat_model, SPEECH_MODEL: args.speech_model}
    run = Run(args.out, work, args.budget_s, models, args.quick, tuple(args.servers))
    parts = args.only.split(",")
    run.say(" ".join(sys.argv))
    try:
        writing = write_folders(run)
        if "links" in parts:
            try_part(run, "links", lambda: links(run))
        finish(run, writing, 60)
        measure(run, parts)
    finally:
        run.results["failures"] = run.failures
        (args.out / "two_gpus.json").write_text(json.dumps(run.results))
        logs = [path.name for path in work.iterdir() if path.is_file()]
        subprocess.run(["tar", "czf", str(args.out / "logs.tar.gz"), "-C", str(work), *logs], check=True)
    run.say("failed: " + ("; ".join(run.failures) or "nothing"))
    for table in (chat_table(run, [s.name for s in CHAT]), speech_table(run)):
        print(table)
    return 1 if run.failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
