"""What each optimisation is worth: the same loads with one of them switched off, one at a time."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from benchmarks.components.one_gpu_parts import CONTEXT, component
from benchmarks.components.one_gpu_table import put
from benchmarks.components.run_loads import (
    CHAT_HEADER,
    QUICK_CHAT_LOAD,
    chat_cells,
    chat_report,
    summary,
)
from benchmarks.components.run_processes import Run, try_part
from benchmarks.components.run_servers import CHAT_MODEL, Running, Server, servers
from benchmarks.text_table import render

EVERYTHING = "everything on"
# What `omnistage serve --set` takes.
SWITCHES: dict[str, tuple[str, ...]] = {
    EVERYTHING: (),
    "no prefix cache": ("thinker.prefix_cache=false",),
    "no step ahead": ("thinker.overlap=false",),
    "attention in tiles": ("thinker.mixed_attention=tiles",),
    "pictures encoded one by one": ("vision.max_batch_items=1",),
    "steps of 1,664 beside decodes": ("thinker.mixed_step_tokens=1664",),
    "steps of 2,048 beside decodes": ("thinker.mixed_step_tokens=2048",),
    "no embedding cache": ("vision.embedding_cache=0", "vision.embedding_cache_host=0"),
    "no CUDA graphs": ("thinker.cuda_graphs=false",),
    "no CUDA graphs of the encoder": ("vision.cuda_graphs=false",),
    "prompts beside the encoder": ("thinker.encoder_step_tokens=512",),
    "an encoder that does not give way": ("vision.max_tokens_ahead=1000000",),
    "an encoder two pictures ahead": ("vision.max_tokens_ahead=2048",),
}
AT_ONCE = 3  # servers, each idle while another is measured
MEMORY = ("vision.memory=8GiB", "vision.embedding_cache=1GiB", "thinker.memory=30GiB")
CHAT_LIMIT_S = 40.0
LOAD = (
    *("--sessions", "48", "--warmup", "16", "--turns", "5", "--image-size", "1024x1024"),
    *("--output-tokens", "64", "--concurrency", "32"),
)
HEADER = ["32 users, with one thing less or otherwise", *CHAT_HEADER]


def ablation(run: Run) -> None:
    rows: list[list[str]] = []
    for group in groups_of(list(SWITCHES), AT_ONCE):
        wanted = [server_of(run, name) for name in group]
        with servers(run, wanted) as there:
            for name, running in there.items():
                try_part(run, f"ablation, {name}", partial(one_off, run, running, rows), limit_s=80)
    run.show(render(HEADER, rows))
    try_part(run, "ablation, decode steps", partial(decode_steps, run), limit_s=90, needs_s=30)


def groups_of(names: list[str], size: int) -> Iterator[list[str]]:
    yield from (names[first : first + size] for first in range(0, len(names), size))


def server_of(run: Run, name: str) -> Server:
    env = (("TRITON_CACHE_DIR", str(run.work / "triton-chat")),)
    sets = () if run.quick else MEMORY
    return Server(name, CHAT_MODEL, "one-gpu.toml", sets=(CONTEXT, *sets, *SWITCHES[name]), env=env)


def one_off(run: Run, running: Running, rows: list[list[str]]) -> None:
    name = running.server.name
    load = QUICK_CHAT_LOAD if run.quick else LOAD
    chat = chat_report(run, running, (*load, "--seed", "1"), CHAT_LIMIT_S)
    if chat is None:
        return
    latency = chat["latency"]
    put(run, f"{name}: req/s", summary(chat["throughput"], "requests_per_s"))
    put(run, f"{name}: TTFT cold p50, ms", summary(latency["ttft_cold"], "p50"))
    put(run, f"{name}: TTFT warm p50, ms", summary(latency["ttft_warm"], "p50"))
    put(run, f"{name}: ITL p99, ms", summary(latency["itl"], "p99"))
    rows.append([name, *chat_cells(chat)])


def decode_steps(run: Run) -> None:
    """Through the runner alone, where more can be switched."""
    small = ("--tiny", "--batches", "1", "--context", "20", "--steps", "4") if run.quick else ()
    batches = () if run.quick else ("--batches", "1", "32")
    for one in component(run, "gpu_decode", "--ablate", *batches, *small, limit_s=90) or ():
        without = one["without"]
        name = "everything on" if without is None else f"without {without}"
        put(run, f"decode x{one['batch']}, {name}: step, ms", one["tpot_ms"], one["floor_ms"])
