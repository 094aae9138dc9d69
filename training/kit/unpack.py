"""`unpack FOLDER --to ROOT`: takes in one carried folder, does what can be done with what is there by then.

Packages are installed, speakers started and, once the language model is whole, the checkpoint built that
training begins with. Whatever is wrong is said at once.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

from training.kit.layout import PROGRAMS, Layout, speaker
from training.kit.pieces import take_folder

SPARE_CORES = 2  # that no speaker takes


def unpack(folder: Path, kit: Layout, *, speak_s: float) -> bool:
    """Whether the kit is whole. Raises SystemExit for what is damaged, or cannot be imported."""
    began = time.monotonic()
    kit.root.mkdir(parents=True, exist_ok=True)
    lacking = take_folder(folder, kit.root)
    if not any(path.startswith("wheels/") for path in lacking) and not kit.site.exists():
        install(kit)
        check_imports(kit)
    if (
        kit.site.exists()
        and (kit.assets / "table.safetensors").exists()
        and not any(path.startswith("assets/") for path in lacking)
        and not kit.spoken.exists()
    ):
        start_speakers(kit, speak_s)
    if lacking:
        print(f"not whole yet: {', '.join(lacking)}", flush=True)
        return False
    if kit.libraries.exists():
        check_voices(kit)
    if kit.weights.exists() and not kit.base.exists():
        build_base(kit)
    print(
        f"GPUs {count_gpus(kit)}, {os.cpu_count()} cores; whole after {time.monotonic() - began:.0f} s",
        flush=True,
    )
    return True


def install(kit: Layout) -> None:
    """The carried wheels, beside what the machine has; not what it has already in a version that will do."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index"]
    command += ["--no-deps", "--no-compile", "--no-cache-dir", "--upgrade", "--target", str(kit.site)]
    _run([*command, *map(str, sorted(kit.wheels.glob("*.whl")))], kit, "installing the wheels")


def check_imports(kit: Layout) -> None:
    code = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)"
    _run(
        [sys.executable, "-c", code, *PROGRAMS],
        kit,
        "importing the programs (pack --package NAME carries what lacks)",
    )


def check_voices(kit: Layout) -> None:
    code = "from training.hearing import sentences, synthesis; synthesis.Speakers(list(sentences.SHARES))"
    _run([sys.executable, "-c", code], kit, "opening the voices")


def build_base(kit: Layout) -> None:
    command = [sys.executable, "-m", "model_families.default_model.build", str(kit.base), "--plain"]
    _run([*command, "--weights", str(kit.weights)], kit, "building the checkpoint", threads=8)


def count_gpus(kit: Layout) -> int:
    code = "import torch; print(torch.cuda.device_count())"
    found = subprocess.run(
        [sys.executable, "-c", code], env=kit.environment(), check=True, capture_output=True, text=True
    )
    return int(found.stdout)


def start_speakers(kit: Layout, seconds: float) -> None:
    """They speak on while the next folder travels, in sessions of their own; each stops by itself."""
    kit.spoken.mkdir(parents=True)
    kit.logs.mkdir(exist_ok=True)
    count = max((os.cpu_count() or 1) - SPARE_CORES, 1)
    for share in range(count if seconds else 0):
        with (kit.logs / f"speaker-{share}.log").open("w") as log:
            subprocess.Popen(
                ["nice", "-n", "15", *speaker(kit, share, seconds)],
                env=kit.environment(""),
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )


def _run(command: list[str], kit: Layout, what: str, threads: int = 1) -> None:
    environment = kit.environment() | {"OMP_NUM_THREADS": str(threads)}
    began = time.monotonic()
    done = subprocess.run(
        command, env=environment, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        raise SystemExit(f"{done.stdout[-3000:]}\n{what}: failed")
    print(f"{what}: {time.monotonic() - began:.0f} s", flush=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path)
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument(
        "--speak-seconds", type=float, default=120.0, help="that the speakers speak ahead of training"
    )


def main(given: argparse.Namespace) -> None:
    unpack(given.folder, Layout(given.to.absolute()), speak_s=given.speak_seconds)
