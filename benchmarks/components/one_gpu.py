"""Everything that one GPU is for, measured in one run.

    python -m benchmarks.components.one_gpu --out DIR
        [--only speech,tests,decode,chat,start,alone,kernels,links]

`--only` also takes placements: spoken answers as the deployment's file has not chosen; and ablation: decoding
and chat with one optimisation less, one at a time.

Parts run in the order in which they are named, those that share servers together; the tests run while servers
start that are not timed. A part that fails leaves its log and does not stop the others; one for which too
little time is left is named as not run. DIR gets one_gpu.json, one_gpu.txt and one_gpu.logs.tar.gz after
every part.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from benchmarks.components.one_gpu_ablation import ablation
from benchmarks.components.one_gpu_parts import (
    alone,
    chat,
    decode,
    kernels,
    links,
    servers_for,
    start,
    with_name,
)
from benchmarks.components.one_gpu_speech import placements, speech
from benchmarks.components.one_gpu_table import table_of
from benchmarks.components.requirements import complaint
from benchmarks.components.run_processes import (
    Run,
    finish,
    measured,
    python,
    spawn,
    stop,
    tail,
    try_part,
)
from benchmarks.components.run_servers import (
    CHAT_MODEL,
    SPEECH_MODEL,
    folder,
    prepare,
    servers,
    used_gpu_mib,
)

SERVED = ("tests", "decode", "chat")  # of one group when they follow one another
BY_ITSELF: dict[str, Callable[[Run], None]] = {
    "speech": speech,
    "placements": placements,
    "ablation": ablation,
    "start": start,
    "alone": alone,
    "kernels": kernels,
    "links": links,
}
PARTS = ("speech", "tests", "decode", "chat", "start", "alone", "kernels", "links")
ASKED_FOR = (*PARTS, "placements", "ablation")
TAKES_S = {
    "speech": 150,
    "placements": 150,
    "ablation": 180,
    "tests": 80,
    "decode": 80,
    "chat": 110,
    "start": 80,
    "alone": 120,
    "kernels": 50,
    "links": 30,
}
WORTH_BEGINNING = 0.5  # with so much of that left
LIMITS_S = {
    "speech": 300,
    "placements": 300,
    "ablation": 300,
    "start": 120,
    "alone": 200,
    "kernels": 90,
    "links": 60,
}
USE = {
    CHAT_MODEL: {"decode", "chat", "start", "alone", "ablation"},
    SPEECH_MODEL: {"speech", "placements", "alone"},
}
TESTS_LIMIT_S = 100.0  # once the servers that they began beside are ready
DEFAULTS_NEED_S = 60.0  # chat once more, with the defaults: only if nothing else is lost by it


def grouped(parts: Sequence[str]) -> list[list[str]]:
    groups: list[list[str]] = []
    for part in parts:
        if groups and part in SERVED and groups[-1][0] in SERVED:
            groups[-1].append(part)
        else:
            groups.append([part])
    return groups


def measure(run: Run, parts: Sequence[str]) -> None:
    groups = grouped(parts)
    for i, group in enumerate(groups):
        if group[0] in SERVED:
            later_s = float(sum(TAKES_S[part] for later in groups[i + 1 :] for part in later))
            needs_s = WORTH_BEGINNING * max(TAKES_S[part] for part in group)
            try_part(run, ", ".join(group), partial(served, run, group, later_s), needs_s=needs_s)
        else:
            (part,) = group
            work, needs_s = partial(BY_ITSELF[part], run), WORTH_BEGINNING * TAKES_S[part]
            try_part(run, part, work, limit_s=LIMITS_S[part], needs_s=needs_s)


def served(run: Run, parts: Sequence[str], later_s: float) -> None:
    """`later_s`: what other parts still need."""
    tests = spawn(run, "tests", test_command(run)) if "tests" in parts else None
    try:
        asked = [part for part in parts if part != "tests"]
        with servers(run, servers_for(run, asked)) as there:
            if tests is not None:
                try_part(run, "tests", partial(report_tests, run, tests))
            for part in asked:
                if part == "decode":
                    try_part(run, part, partial(decode, run, there), limit_s=60)
                    continue
                for running in with_name(there, "bf16"):
                    try_part(run, part, partial(chat, run, running, "one-gpu.toml"), limit_s=130)
                for running in with_name(there, "defaults"):
                    work = partial(chat, run, running, "defaults")
                    try_part(run, "chat, defaults", work, limit_s=130, needs_s=DEFAULTS_NEED_S + later_s)
    finally:
        if tests is not None:
            stop(tests)


def test_command(run: Run) -> list[str]:
    what = "tests/gpu/test_shm.py" if run.quick else "tests/gpu"
    options = ("-q", "-m", "gpu", "-p", "no:cacheprovider", "-o", "faulthandler_timeout=60", "--durations=8")
    return python("pytest", *options, what)


def report_tests(run: Run, process: subprocess.Popen[bytes]) -> None:
    good = finish(run, {"tests": process}, TESTS_LIMIT_S)
    run.results["tests"] = tail(run.log("tests"), 200)
    run.show(tail(run.log("tests"), 14 if good else 60))


def main(argv: Sequence[str]) -> int:
    """0; 1 when something failed or was not run; 2 when packages are missing."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--budget-s", type=float, default=560.0)
    parser.add_argument("--chat-model", type=folder, help="default: the 3B shape")
    parser.add_argument("--speech-model", type=folder, help="default: the 30B shape")
    parser.add_argument("--quick", action="store_true", help="tiny models' loads, and no GPU")
    args = parser.parse_args(argv)
    parts = args.only.split(",")
    if unknown := [part for part in parts if part not in ASKED_FOR]:
        parser.error(f"no part {unknown[0]!r}; there are {', '.join(ASKED_FOR)}")
    if absent := complaint(gpu=not args.quick):
        print(absent, file=sys.stderr)
        return 2
    given = {CHAT_MODEL: args.chat_model, SPEECH_MODEL: args.speech_model}
    models = {shape: folder for shape, folder in given.items() if USE[shape] & set(parts)}
    with measured("one_gpu", args.out, args.budget_s, models, quick=args.quick, table=table_of) as run:
        run.results["parts"] = parts
        used_mib = used_gpu_mib()
        run.say("no GPU is seen" if used_mib is None else f"{used_mib:.0f} MiB of the GPU are in use")
        prepare(run)
        measure(run, parts)
        return conclude(run)


def conclude(run: Run) -> int:
    run.say("failed: " + ("; ".join(run.failures) or "nothing"))
    run.say("not run: " + ("; ".join(run.not_run) or "nothing"))
    run.show(table_of(run))
    return 1 if run.failures or run.not_run else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
