"""What each optimisation is worth: the same loads with one of them switched off, one at a time."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from benchmarks.components.one_gpu_parts import CHAT_CASES, CONTEXT, QUICK_CASES, component
from benchmarks.components.one_gpu_table import put
from benchmarks.components.run_loads import (
    CHAT_HEADER,
    chat_cells,
    chat_report,
    decode_report,
    summary,
    tpot_ms,
)
from benchmarks.components.run_processes import Run, try_part
from benchmarks.components.run_servers import CHAT_MODEL, Running, Server, servers
from benchmarks.text_table import number, render

EVERYTHING = "everything on"
# What `omnistage serve --set` takes. "reference" is the plain path of all kernels, without graphs.
SWITCHES: dict[str, tuple[str, ...]] = {
    EVERYTHING: (),
    "no CUDA graphs": ("thinker.cuda_graphs=false",),
    "no step ahead": ("thinker.overlap=false",),
    "no prefix cache": ("thinker.prefix_cache=false",),
    "no embedding cache": ("vision.embedding_cache=0", "vision.embedding_cache_host=0"),
    "steps of 2,048 beside decodes": ("thinker.mixed_step_tokens=2048",),
    "pictures encoded one by one": ("vision.max_batch_items=1",),
    "an encoder that does not give way": ("vision.max_tokens_ahead=1000000",),
    "an encoder two pictures ahead": ("vision.max_tokens_ahead=2048",),
    "steps as large beside the encoder": ("thinker.encoder_step_tokens=1024",),
}
AT_ONCE = 3  # servers, each idle while another is measured
MEMORY = ("vision.memory=8GiB", "vision.embedding_cache=1GiB", "thinker.memory=30GiB")
CHAT_CASE, CHAT_LIMIT_S, DECODE_LIMIT_S = "8 users", 40.0, 30.0


def ablation(run: Run) -> None:
    try_part(run, "ablation, decode steps", partial(decode_steps, run), limit_s=90)
    rows: list[list[str]] = []
    for group in groups_of(list(SWITCHES), AT_ONCE):
        wanted = [server_of(run, name) for name in group]
        with servers(run, wanted) as there:
            for name, running in there.items():
                try_part(run, f"ablation, {name}", partial(one_off, run, running, rows), limit_s=80)
    run.show(render(["with one thing less", "TPOT ms", *CHAT_HEADER], rows))


def groups_of(names: list[str], size: int) -> Iterator[list[str]]:
    yield from (names[first : first + size] for first in range(0, len(names), size))


def server_of(run: Run, name: str) -> Server:
    env = (("TRITON_CACHE_DIR", str(run.work / "triton-chat")),)
    sets = () if run.quick else MEMORY
    return Server(name, CHAT_MODEL, "one-gpu.toml", sets=(CONTEXT, *sets, *SWITCHES[name]), env=env)


def one_off(run: Run, running: Running, rows: list[list[str]]) -> None:
    name = running.server.name
    load = (QUICK_CASES if run.quick else CHAT_CASES)[CHAT_CASE]
    tokens = 8 if run.quick else 128
    alone = decode_report(run, f"decode 1 {name}", [running], "1", tokens, "--repeats", "2")
    tpot = tpot_ms(alone["figures"][0]) if alone is not None else None
    put(run, f"{name}: 1 stream, TPOT, ms", tpot)
    chat = chat_report(run, running, (*load, "--seed", "1"), CHAT_LIMIT_S, f"{CHAT_CASE} {name}")
    if chat is None:
        rows.append([name, number(tpot), *["-"] * len(CHAT_HEADER)])
        return
    put(run, f"{name}: {CHAT_CASE}, req/s", summary(chat["throughput"], "requests_per_s"))
    put(run, f"{name}: {CHAT_CASE}, TTFT warm p50, ms", summary(chat["latency"]["ttft_warm"], "p50"))
    rows.append([name, number(tpot), *chat_cells(chat)])


def decode_steps(run: Run) -> None:
    """Through the runner alone, where more can be switched."""
    small = ("--tiny", "--batches", "1", "--context", "20", "--steps", "4") if run.quick else ()
    batches = () if run.quick else ("--batches", "1", "32")
    for one in component(run, "gpu_decode", "--ablate", *batches, *small, limit_s=90) or ():
        without = one["without"]
        name = "everything on" if without is None else f"without {without}"
        put(run, f"decode x{one['batch']}, {name}: step, ms", one["tpot_ms"], one["floor_ms"])
