"""What comes back from the machine that trains: few files, in the order of their worth, and back into the
folders that a later run goes on from."""

from __future__ import annotations

import argparse
import io
import tarfile
from pathlib import Path

from training.kit.layout import Layout

MAX_FILES, MAX_FILE_BYTES, MAX_BYTES = 8, 16 << 20, 64 << 20
REST = "rest.tar.gz"
RUNS = ("seeing", "speaking", "hearing")


def save_outcome(kit: Layout, out: Path) -> list[str]:
    """Replaces `out`'s files one by one, so that whenever it is looked at all states are whole. Returns what
    had no room, largest worth first."""
    out.mkdir(parents=True, exist_ok=True)
    rest = _rest(kit)
    left, used = [], len(rest)
    names = {REST}
    for path in _states(kit):
        name = f"{path.parent.name}.{path.name}"
        size = path.stat().st_size
        if len(names) == MAX_FILES or size > MAX_FILE_BYTES or used + size > MAX_BYTES:
            left.append(f"{name} ({size / 1e6:.1f} MB)")
            continue
        _replace(out / name, path.read_bytes())
        names.add(name)
        used += size
    _replace(out / REST, rest)
    return left


def _states(kit: Layout) -> list[Path]:
    found = [path for run in RUNS for path in sorted((kit.root / run).glob("*-*.safetensors"))]
    return [*found, *kit.speaking.glob("spoken.npz")]


def _rest(kit: Layout) -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as archive:
        for run in (*RUNS, "logs"):
            for path in sorted((kit.root / run).glob("*")):
                if path.suffix in (".json", ".jsonl", ".log"):
                    archive.add(path, f"{run}/{path.name}")
    return data.getvalue()


def _replace(target: Path, data: bytes) -> None:
    scratch = target.parent.parent / f".{target.name}.part"  # a command that is stopped leaves it behind
    scratch.write_bytes(data)
    scratch.rename(target)


def take_outcome(files: Path, root: Path) -> None:
    """What came back → `root`/seeing, speaking, hearing, logs: as they were there."""
    rest = files / REST
    if not rest.exists():
        raise SystemExit(f"{files} is not what a training brought back: it has no {REST}")
    with tarfile.open(rest) as archive:
        archive.extractall(root, filter="data")
    for path in files.iterdir():
        run, _, name = path.name.partition(".")
        if run in RUNS:
            (root / run).mkdir(parents=True, exist_ok=True)
            (root / run / name).write_bytes(path.read_bytes())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", type=Path, help="what came back")
    parser.add_argument("root", type=Path)


def main(given: argparse.Namespace) -> None:
    take_outcome(given.files, given.root)
    for path in sorted(given.root.rglob("*")):
        if path.is_file():
            print(f"{path} {path.stat().st_size / 1e6:.1f} MB")
