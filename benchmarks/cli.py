"""`omnistage bench <name>`: finds the benchmark and hands it the rest of the command line."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple


class Benchmark(NamedTuple):
    """`module` has `main(argv) -> int`; it is imported only when asked for."""

    module: str
    summary: str


BENCHMARKS = {
    "chat": Benchmark("benchmarks.chat.command", "sessions of several turns about images, under load"),
    "decode": Benchmark("benchmarks.decode_http", "decoding speed at 1 and 8 streams, servers side by side"),
    "speech": Benchmark("benchmarks.speech.command", "spoken answers as a listener has them"),
    "repeat-image": Benchmark("benchmarks.repeat_image", "first token of a repeated image against a new one"),
}


def main(argv: Sequence[str]) -> int:
    """The exit status: 2 for an unknown benchmark, else what the benchmark returns."""
    if argv and argv[0] in BENCHMARKS:
        run: Callable[[Sequence[str]], int] = importlib.import_module(BENCHMARKS[argv[0]].module).main
        return run(argv[1:])
    wanted_help = bool(argv) and argv[0] in ("-h", "--help")
    width = max(len(name) for name in BENCHMARKS)
    lines = [f"  {name.ljust(width)}  {benchmark.summary}" for name, benchmark in BENCHMARKS.items()]
    text = "\n".join(["usage: omnistage bench NAME [options]", "", *lines])
    print(text, file=sys.stdout if wanted_help else sys.stderr)
    return 0 if wanted_help else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
