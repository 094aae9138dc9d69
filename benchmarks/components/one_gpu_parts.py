"""The parts of a run on one GPU but speech: decoding, chat, starts, what is measured alone, edges."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from benchmarks.components.counted import Counts, between, counted, counted_lines
from benchmarks.components.one_gpu_table import put
from benchmarks.components.run_loads import (
    CHAT_HEADER,
    CHAT_LOAD,
    DECODE_HEADER,
    QUICK_CHAT_LOAD,
    Report,
    chat_cells,
    chat_report,
    decode_report,
    decode_rows,
    links_report,
    summary,
    tpot_ms,
)
from benchmarks.components.run_processes import Run, finish, python, read, spawn, tail, try_part
from benchmarks.components.run_servers import (
    CHAT_MODEL,
    SPEECH_MODEL,
    Running,
    Server,
    first_answer_s,
    folder_of,
    log_of,
    servers,
    steps_table,
)
from benchmarks.text_table import render

CONTEXT = "thinker.max_context=16384"
# The second and the third are beside the first, which takes what its file says.
FP8 = ("vision.memory=7GiB", "vision.embedding_cache=1GiB", "thinker.memory=20GiB", "thinker.kv_dtype=fp8")
DEFAULTS = ("thinker.memory=32GiB",)
WORDS = 99  # 518 tokens by the median, of one character each
DECODE_CASES = ((1, 256), (32, 128))  # streams, tokens out
PICTURE = ("--image-size", "1024x1024")
CHAT_CASES: dict[str, tuple[str, ...]] = {
    "1 user": (
        *("--sessions", "8", "--warmup", "2", "--turns", "4", *PICTURE),
        *("--output-tokens", "64", "--concurrency", "1"),
    ),
    "8 users": (
        *("--sessions", "24", "--warmup", "8", "--turns", "5", *PICTURE),
        *("--output-tokens", "64", "--concurrency", "8"),
    ),
    "32 users": CHAT_LOAD,
    "one image for all": (
        *("--sessions", "96", "--warmup", "16", "--turns", "2", *PICTURE, "--reuse", "one"),
        *("--output-tokens", "32", "--concurrency", "32"),
    ),
}
QUICK_CASES: dict[str, tuple[str, ...]] = {
    "1 user": (*QUICK_CHAT_LOAD, "--concurrency", "1"),
    "8 users": QUICK_CHAT_LOAD,
    "32 users": QUICK_CHAT_LOAD,
    "one image for all": (*QUICK_CHAT_LOAD, "--reuse", "one"),
}
CHAT_LIMIT_S = 45.0  # of one case
SHOWN_SIZES = {4 << 10: "4 KiB", 1 << 20: "1 MiB", 16 << 20: "16 MiB"}


def chat_server(run: Run, name: str, deployment: str | None, *sets: str, cache: str = "chat") -> Server:
    env = (("TRITON_CACHE_DIR", str(run.work / f"triton-{cache}")),)
    if run.quick and "thinker.kv_dtype=fp8" in sets:
        sets = (*sets, "thinker.kernels=reference")
    return Server(name, CHAT_MODEL, deployment, sets=(CONTEXT, *sets), env=env)


def servers_for(run: Run, parts: Sequence[str]) -> list[Server]:
    wanted = [chat_server(run, "bf16, one-gpu.toml", "one-gpu.toml")] if parts else []
    if "decode" in parts:
        wanted.append(chat_server(run, "fp8, one-gpu.toml", "one-gpu.toml", *FP8))
    if "chat" in parts:
        wanted.append(chat_server(run, "defaults", None, *DEFAULTS))
    return wanted


def with_name(there: dict[str, Running], start: str) -> list[Running]:
    return [running for name, running in there.items() if name.startswith(start)]


# --- decoding and chat --------------------------------------------------------------------------------------
def decode(run: Run, there: dict[str, Running]) -> None:
    """A cache of bfloat16 beside one of fp8, in turns."""
    those, rows = [*with_name(there, "bf16"), *with_name(there, "fp8")], []
    assert those, "no server for it got ready"
    for streams, tokens in ((1, 8), (2, 4)) if run.quick else DECODE_CASES:
        more = ("--prompt-words", str(WORDS), "--repeats", "1" if run.quick else "5")
        report = decode_report(run, f"decode {streams}", those, str(streams), tokens, *more)
        if report is None:
            continue
        rows += decode_rows(report)
        for one in report["figures"]:
            stream = "stream" if streams == 1 else "streams"
            name, value = ("TPOT, ms", tpot_ms(one)) if streams == 1 else ("tok/s", one["sum_tok_s"])
            put(run, f"{one['server']}, {streams} {stream}: {name}", value)
    run.show(render(DECODE_HEADER, rows))


def chat(run: Run, running: Running, deployment: str) -> None:
    rows = []
    for seed, (case, load) in enumerate((QUICK_CASES if run.quick else CHAT_CASES).items()):
        # Of another seed each: what one case has left in the caches is new to the next.
        before = counted(running)
        report = chat_report(run, running, (*load, "--seed", str(seed)), CHAT_LIMIT_S, case)
        if report is not None:
            tell_counted(run, f"{deployment}, {case}", between(before, counted(running)))
            rows.append([f"{deployment}, {case}", *chat_cells(report)])
            put_chat(run, f"{deployment}, {case}", case, report)
    run.show(render(["chat", *CHAT_HEADER], rows))


def tell_counted(run: Run, name: str, found: Counts) -> None:
    """Warm-up included."""
    run.results[f"counted, {name}"] = found
    run.show("\n  ".join([name, *counted_lines(found)]))


def put_chat(run: Run, name: str, case: str, report: Report) -> None:
    latency = report["latency"]
    if case != "1 user":
        put(run, f"{name}: req/s", summary(report["throughput"], "requests_per_s"))
    if case in ("1 user", "32 users"):
        put(run, f"{name}: TTFT cold p50, ms", summary(latency["ttft_cold"], "p50"))
        put(run, f"{name}: TTFT warm p50, ms", summary(latency["ttft_warm"], "p50"))
    if case == "32 users":
        put(run, f"{name}: ITL p99, ms", summary(latency["itl"], "p99"))


# --- starts -------------------------------------------------------------------------------------------------
def start(run: Run) -> None:
    """With kernels that are not compiled yet, and with those that the first one has compiled; byte code and
    the pages of libraries are there both times."""
    logs = {}
    for cache in ("cold", "warm"):
        server = chat_server(run, f"start, {cache}", None, cache="start")
        with servers(run, [server]) as there:
            for running in there.values():
                first_s = first_answer_s(running)
                put(run, f"start, {cache}: ready, s", running.ready_s)
                put(run, f"start, {cache}: first token, s", first_s)
        logs[cache] = log_of(run, server)
    run.show(steps_table(logs))


# --- alone --------------------------------------------------------------------------------------------------
def alone(run: Run) -> None:
    try_part(run, "alone, decode", partial(alone_decode, run), limit_s=60)
    try_part(run, "alone, encoder", partial(alone_encoder, run), limit_s=60)
    try_part(run, "alone, speech", partial(alone_speech, run), limit_s=150, needs_s=30)


def component(run: Run, name: str, *arguments: str, limit_s: float) -> Any:
    """What it has found, as far as it came."""
    command = python(f"benchmarks.components.{name}", *arguments, "--json", str(run.json(name)))
    finish(run, {name: spawn(run, name, command)}, limit_s)
    run.show(tail(run.log(name), 25))
    found = run.results[name] = read(run.json(name))
    return found


def alone_decode(run: Run) -> None:
    small = ("--tiny", "--batches", "1", "--context", "20", "--steps", "4") if run.quick else ()
    for one in component(run, "gpu_decode", *small, limit_s=60) or ():
        put(run, f"alone, decode x{one['batch']}: step, ms", one["tpot_ms"], one["floor_ms"])


def alone_encoder(run: Run) -> None:
    small = ("--device", "cpu", "--images", "1", "--grid", "4x4", "--rounds", "1") if run.quick else ()
    folder = str(folder_of(run, CHAT_MODEL))
    found: list[dict[str, Any]] = component(run, "gpu_encoder", folder, *small, limit_s=60) or []
    for one in found:
        what = "1 picture" if one["images"] == 1 else f"{one['images']} pictures"
        if one["grid"] != found[0]["grid"]:
            what = "a small picture"
        way = ", by graph" if one["graphs"] else ""
        put(run, f"alone, encoder: {what}{way}, ms", one["encode_ms"], one["floor_ms"])


def alone_speech(run: Run) -> None:
    small = ("--device", "cpu", "--streams", "1", "--frames", "3", "--chunks", "1x1") if run.quick else ()
    folder = str(folder_of(run, SPEECH_MODEL))
    found = component(run, "gpu_speech", folder, *small, limit_s=150) or {"talker": [], "vocoder": []}
    for one in found["talker"]:
        put(run, f"alone, talker x{one['streams']}: frame, ms", one["frame_ms"])
    for one in found["vocoder"]:
        if (one["rows"], one["frames"]) == (1, 1):
            put(run, "alone, vocoder: 1 frame of 1, ms", one["decode_ms"])
        if (one["rows"], one["frames"]) == (16, 16):
            put(run, "alone, vocoder: 16 frames of 16, ms", one["decode_ms"])


def kernels(run: Run) -> None:
    """After what is measured alone, which has compiled most of them."""
    found = component(run, "gpu_kernels", *(("--quick",) if run.quick else ()), limit_s=90)
    for one in found["kernels"] if found else ():
        put(run, f"kernels, {one['name']}: us", one["time_us"], one["floor_us"])


# --- edges --------------------------------------------------------------------------------------------------
def links(run: Run) -> None:
    """Two processes of one GPU."""
    devices, connectors = ("cpu,cpu", "shm") if run.quick else ("cuda:0,cuda:0", "cuda_ipc,shm")
    for one in links_report(run, devices, connectors):
        if one["nbytes"] in SHOWN_SIZES:
            name = f"links, {one['connector']}, {SHOWN_SIZES[one['nbytes']]}: one way p50, µs"
            put(run, name, one["latency_us"], one["floor_us"])
