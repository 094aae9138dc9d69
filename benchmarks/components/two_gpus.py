"""Everything that two GPUs of one host are for, measured in one run.

    python -m benchmarks.components.two_gpus --out DIR [--only links,tests,chat,decode,speech,death]
    [--budget-s 530]

Servers of the deployments in `examples/deployments` for chat are started beside each other and then
measured in
turns: one that nobody asks anything uses neither its GPU nor a core. Two that need one GPU each are
measured side
by side, each with a GPU and half of the cores of its own. A part that fails leaves its log and does not
stop the
others.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.samples import median
from benchmarks.text_table import number, render

ROOT = Path(__file__).resolve().parent.parent.parent
DEPLOYMENTS = ROOT / "examples" / "deployments"
READY_LIMIT_S = 200.0
STOP_LIMIT_S = 6.0
GREEDY_PROMPTS = 8
GREEDY_TOKENS = 48
SPOKEN = '{"max_tokens": 40, "ignore_eos": true}'
CHAT_MODEL, SPEECH_MODEL = "qwen2_5_vl_3b", "qwen3_omni_30b_a3b"
# So that all servers of a group fit beside each other; a deployment alone takes what its file says.
CHAT_MEMORY = (
    *("vision.memory=7GiB", "vision.embedding_cache=1GiB", "vision.embedding_cache_host=1GiB"),
    *("thinker.memory=16GiB", "thinker.max_context=16384", "preprocess.workers=12"),
)
SPEECH_MEMORY = (
    *("vision.memory=4GiB", "vision.embedding_cache=512MiB", "vision.embedding_cache_host=512MiB"),
    *("audio.memory=3GiB", "audio.embedding_cache=256MiB", "audio.embedding_cache_host=256MiB"),
    *("thinker.memory=66GiB", "thinker.max_context=8192", "talker.memory=16GiB", "talker.max_sequences=64"),
    *("vocoder.memory=4GiB", "preprocess.workers=4"),
)


@dataclass(frozen=True)
class Server:
    """`gpus`: CUDA_VISIBLE_DEVICES. `half`: of the cores, for what is measured beside another; None: all."""

    name: str
    shape: str
    deployment: str
    gpus: str
    half: int | None = None
    replace: tuple[str, str] | None = None  # in the text of the deployment

    @property
    def num_gpus(self) -> int:
        return 1 if self.half is not None or self.name == "speech on one GPU" else 2


CHAT = (
    Server("one GPU, one worker", CHAT_MODEL, "one-gpu.toml", "0", 0),
    Server("one GPU, two processes", CHAT_MODEL, "one-gpu-two-processes.toml", "1", 1),
    Server("apart on two GPUs", CHAT_MODEL, "two-gpus.toml", "0,1"),
    Server(
        "apart, shared memory",
        CHAT_MODEL,
        "two-gpus.toml",
        "0,1",
        replace=('connector = "auto"', 'connector = "shm"'),
    ),
    Server("two replicas", CHAT_MODEL, "two-gpus-replicas.toml", "0,1"),
    Server("tensor parallel 2", CHAT_MODEL, "two-gpus-tensor-parallel.toml", "0,1"),
)
SPEECH = (
    Server("speech on one GPU", SPEECH_MODEL, "omni-one-gpu.toml", "0"),
    Server("speech on two GPUs", SPEECH_MODEL, "omni-two-gpus.toml", "0,1"),
)


@dataclass
class Run:
    out: Path
    work: Path
    budget_s: float
    models: dict[str, Path | None]
    quick: bool
    only_servers: tuple[str, ...]  # parts of their names; (): all
    started_s: float = field(default_factory=time.monotonic)
    results: dict[str, Any] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    @property
    def left_s(self) -> float:
        return self.budget_s - (time.monotonic() - self.started_s)

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.started_s:5.0f} s] {text}", flush=True)

    def log(self, name: str) -> Path:
        return self.work / (name.replace(" ", "-").replace(",", "") + ".log")


# --- processes ----------------------------------------------------------------------------------------------
def cores_of(half: int | None) -> set[int]:
    cores = sorted(os.sched_getaffinity(0))
    middle = len(cores) // 2
    return set(cores if half is None or middle == 0 else cores[:middle] if half == 0 else cores[middle:])


def spawn(
    run: Run, name: str, command: Sequence[str], half: int | None = None, **env: str
) -> subprocess.Popen[bytes]:
    """In a process group of its own, its output in a log."""
    cores = cores_of(half)
    with run.log(name).open("ab") as log:
        return subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | env,
            cwd=ROOT,
            start_new_session=True,
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )


def stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def finish(run: Run, processes: dict[str, subprocess.Popen[bytes]], limit_s: float) -> bool:
    """Waits for all; whether all went well. What is late is killed."""
    end_s = time.monotonic() + min(limit_s, max(1.0, run.left_s))
    good = True
    for name, process in processes.items():
        try:
            status = process.wait(max(0.1, end_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            stop(process)
            status = -1
        if status != 0:
            good = False
            run.failures.append(f"{name}: {'too late' if status == -1 else f'status {status}'}")
            run.say(f"FAILED {run.failures[-1]}\n" + tail(run.log(name)))
    return good


def tail(path: Path, num_lines: int = 12) -> str:
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    return "\n".join("    " + line[:220] for line in lines[-num_lines:])


def python(module: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", module, *arguments]


# --- servers ------------------------------------------------------------------------------------------------
@dataclass
class Running:
    server: Server
    port: int
    process: subprocess.Popen[bytes]
    ready_s: float | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


def start_server(run: Run, server: Server, port: int) -> Running:
    file = DEPLOYMENTS / server.deployment
    if server.replace is not None:
        text = file.read_text()
        assert server.replace[0] in text
        file = run.work / (run.log(server.name).stem + ".toml")
        file.write_text(text.replace(*server.replace))
    memory = SPEECH_MEMORY if server.shape == SPEECH_MODEL else CHAT_MEMORY
    small = small_settings(server) if run.quick else ()
    sets = [part for value in (*memory, *small) for part in ("--set", value)]
    command = python("api.cli", "serve", str(run.models[server.shape]), "--port", str(port))
    command += ["--deployment", str(file), *sets]
    process = spawn(run, server.name, command, server.half, CUDA_VISIBLE_DEVICES=server.gpus)
    return Running(server, port, process)


def small_settings(server: Server) -> tuple[str, ...]:
    """For a tiny model on a CPU."""
    speaks = server.shape == SPEECH_MODEL
    stages = ("vision", "audio", "thinker", "talker", "vocoder") if speaks else ("vision", "thinker")
    settings = [f"{stage}.devices=cpu" for stage in stages] + ["preprocess.workers=1"]
    for stage in ("thinker", "talker")[: 1 + speaks]:
        settings += [f"{stage}.kv_memory=32MiB", f"{stage}.max_step_tokens=256", f"{stage}.memory=2GiB"]
        settings += [f"{stage}.max_sequences=8", f"{stage}.max_context=2048"]
    return (*settings, "vision.memory=2GiB")


def is_ready(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/ready")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def wait_ready(run: Run, started: Sequence[Running], begun_s: float) -> None:
    """Returns when each is ready or has ended, or when it takes too long."""
    waiting = [one for one in started if one.ready_s is None]
    end_s = time.monotonic() + min(READY_LIMIT_S * (3 if run.quick else 1), run.left_s)
    while waiting and time.monotonic() < end_s:
        for one in list(waiting):
            if one.process.poll() is not None:
                waiting.remove(one)
            elif is_ready(one.port):
                one.ready_s = time.monotonic() - begun_s
                waiting.remove(one)
        time.sleep(0.25)


@contextmanager
def servers(run: Run, wanted: Sequence[Server], first_port: int) -> Iterator[dict[str, Running]]:
    """Those that got ready, by name."""
    begun_s = time.monotonic()
    if run.only_servers:
        wanted = [server for server in wanted if any(part in server.name for part in run.only_servers)]
    started: list[Running] = []
    try:
        for i, server in enumerate(wanted):
            started.append(start_server(run, server, first_port + i))
            if i == 0:  # it fills the cache of compiled kernels for the others
                wait_ready(run, started, begun_s)
        wait_ready(run, started, begun_s)
        for one in started:
            ready = "not ready" if one.ready_s is None else f"ready after {one.ready_s:.0f} s"
            run.say(f"{one.server.name}: {ready}")
            if one.ready_s is None:
                run.failures.append(f"{one.server.name}: not ready")
                print(tail(run.log(one.server.name), 25), flush=True)
        run.results.setdefault("ready_s", {}).update({one.server.name: one.ready_s for one in started})
        yield {one.server.name: one for one in started if one.ready_s is not None}
    finally:
        for one in started:
            one.process.terminate()
        for one in started:
            stop(one.process)


def bench(run: Run, running: Running, what: str, *arguments: str) -> tuple[subprocess.Popen[bytes], Path]:
    name = f"{what} {running.server.name}"
    result = run.log(name).with_suffix(".json")
    command = python(
        "api.cli", "bench", what.split()[0], "--url", running.url, *arguments, "--json", str(result)
    )
    return spawn(run, name, command, running.server.half), result


def read(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text()) if path.exists() else None


def figure(summary: dict[str, Any] | None, name: str) -> str:
    return number(None if summary is None else summary[name])


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
