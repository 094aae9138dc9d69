"""Each Triton kernel at the 3B shape, beside what the GPU itself reads and computes: seconds on a GPU.

    python -m benchmarks.components.gpu_kernels [--variants [mixed]] [--only TEXT] [--json FILE]

A case's launches are one CUDA graph, replayed; its rate is what it must move, or compute, at the least over
the time of a launch, and its share that of the nearer ceiling: of copying a large tensor, or of a large
product of matrices, measured in the same run. `--variants` sets ways to do the same beside each other,
`--variants mixed` those of attention in mixed steps alone. `--quick` runs every case once at tiny shapes in
Triton's interpreter.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from benchmarks.text_table import number, percent, render

if TYPE_CHECKING:
    from benchmarks.components.kernel_cases import Case

COPIED_BYTES, PRODUCT_SIZE = 1 << 30, 8192
LEAST_LAUNCHES, REPLAYS = 32, 5
ERROR = 1e-2  # of results that are to be the same, in bfloat16
HEADER = ["", "us", "GB/s", "TFLOP/s", "of the ceiling"]


@dataclass(frozen=True)
class Ceilings:
    bytes_per_s: float
    operations_per_s: float


@dataclass(frozen=True)
class Figures:
    name: str
    time_us: float  # of a run
    num_bytes: int
    num_operations: int
    floor_us: float | None  # by the ceiling that is nearer

    @property
    def row(self) -> list[str]:
        gigabytes, teraflops = (
            amount / self.time_us for amount in (self.num_bytes / 1e3, self.num_operations / 1e6)
        )
        return [
            self.name,
            number(self.time_us),
            number(gigabytes),
            number(teraflops if self.num_operations else None),
            percent(None if self.floor_us is None else self.floor_us / self.time_us),
        ]


def graph_us(runs: Iterable[Callable[[], object]]) -> float:
    """Time of one of the runs when a graph launches them again and again. On the GPU."""
    those = list(runs)
    for run in those:  # compiles
        run()
    torch.cuda.synchronize()
    repeats = -(-LEAST_LAUNCHES // len(those))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            for run in those:
                run()
    graph.replay()
    times_ms = []
    for _ in range(REPLAYS):
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times_ms.append(float(begin.elapsed_time(end)))
    return 1e3 * min(times_ms) / (repeats * len(those))


def once_us(runs: Iterable[Callable[[], object]]) -> float:
    those = list(runs)
    began_s = time.perf_counter()
    for run in those:
        run()
    return 1e6 * (time.perf_counter() - began_s) / len(those)


def measure_ceilings(device: torch.device) -> Ceilings:
    source = torch.empty(COPIED_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_us = graph_us([lambda: target.copy_(source)])
    left, right = torch.randn(2, PRODUCT_SIZE, PRODUCT_SIZE, device=device, dtype=torch.bfloat16)
    product_us = graph_us([lambda: left @ right])
    return Ceilings(2e6 * COPIED_BYTES / copy_us, 2e6 * PRODUCT_SIZE**3 / product_us)


def figures_of(case: Case, ceilings: Ceilings | None) -> Figures:
    """Without ceilings the case is run once, on whatever there is."""
    with torch.inference_mode():
        time_us = once_us(case.runs) if ceilings is None else graph_us(case.runs)
    floor_us = None
    if ceilings is not None:
        moving_s = case.num_bytes / ceilings.bytes_per_s
        floor_us = 1e6 * max(moving_s, case.num_operations / ceilings.operations_per_s)
    return Figures(case.name, time_us, case.num_bytes, case.num_operations, floor_us)


def measured(cases: Iterable[Case], ceilings: Ceilings | None) -> list[Figures]:
    """A case that fails is told of and left out; of one whose result differs, by how much."""
    found: list[Figures] = []
    results: dict[str, torch.Tensor] = {}
    for case in cases:
        try:
            if case.result is not None:
                with torch.inference_mode():
                    result = case.result().double()
                first = results.setdefault(case.same_as, result)
                error = float((result - first).norm() / first.norm())
                if not error < ERROR:
                    print(f"{case.name}: differs by {error:.2g}")
            found.append(figures_of(case, ceilings))
            print(f"{case.name}: {found[-1].time_us:.0f} us", flush=True)
            if case.apart and ceilings is not None:
                found += [figures_of(one, ceilings) for one in case.kernels()]
        except RuntimeError as error:  # of the library: a backend that does not take the shape
            print(f"{case.name}: {error}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose names have it")
    parser.add_argument(
        "--variants",
        nargs="?",
        const="all",
        choices=("all", "mixed"),
        help="other cases: ways to do the same",
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    if options.quick:
        os.environ["TRITON_INTERPRET"] = "1"  # read as Triton is imported
    from benchmarks.components.kernel_cases import TINY, Bench, Shapes
    from benchmarks.components.kernel_variants import Variants, compile_all
    from benchmarks.components.mixed_variants import MixedVariants

    made = {"all": Variants, "mixed": MixedVariants}.get(options.variants, Bench)
    if options.quick:
        bench, ceilings = made(TINY, torch.device("cpu"), torch.float32), None
        print("Triton's interpreter, tiny shapes: no figure below means anything")
    else:
        device = torch.device("cuda")
        bench, ceilings = made(Shapes(), device, torch.bfloat16), measure_ceilings(device)
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
        print(
            f"ceilings: {ceilings.bytes_per_s / 1e9:,.0f} GB/s copied,"
            f" {ceilings.operations_per_s / 1e12:,.0f} TFLOP/s in bfloat16"
        )
    if options.variants and not options.quick:
        compile_all(case for case in bench.cases() if options.only in case.name)
    found = measured((case for case in bench.cases() if options.only in case.name), ceilings)
    print(render(HEADER, [one.row for one in found]))
    if options.json is not None:
        kernels = [asdict(one) for one in found]
        limits = None if ceilings is None else asdict(ceilings)
        options.json.write_text(json.dumps({"ceilings": limits, "kernels": kernels}))


if __name__ == "__main__":
    main()
