"""Files in folders of a bounded size: what is too large goes in pieces, and every piece has its checksum.

A carried folder holds `kit.json` and the pieces that it names. Folders arrive one at a time, in any order.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MANIFEST = "kit.json"
WAITING = ".pieces"  # of a kit that is not whole yet
SMALLEST_PIECE = 1 << 20


class Damaged(SystemExit):
    """A piece is not what was packed."""


@dataclass(frozen=True)
class Piece:
    path: str  # of the whole file, in the kit
    index: int
    count: int
    start: int
    size: int

    @property
    def name(self) -> str:
        return f"{self.path.replace('/', '.')}.{self.index}"


def divide(sizes: Mapping[str, int], limit: int) -> list[list[Piece]]:
    """The files of these sizes, in their order, in as few folders as hold them."""
    cuts: dict[str, list[tuple[int, int, int]]] = {}  # folder, start, size
    folder, used = 0, 0
    for path, size in sizes.items():
        cuts[path] = []
        start = 0
        while start < size or not cuts[path]:
            if limit - used < min(SMALLEST_PIECE, size - start):
                folder, used = folder + 1, 0
            taken = min(size - start, limit - used)
            cuts[path].append((folder, start, taken))
            start, used = start + taken, used + taken
    folders: list[list[Piece]] = [[] for _ in range(folder + 1)]
    for path, found in cuts.items():
        for index, (at, start, size) in enumerate(found):
            folders[at].append(Piece(path, index, len(found), start, size))
    return folders


def write_folders(root: Path, out: Path, paths: list[str], limit: int) -> list[Path]:
    """`paths` under `root` → out/1, out/2…: replaced when they are there."""
    folders = divide({path: (root / path).stat().st_size for path in paths}, limit)
    whole = {path: digest_of(root / path) for path in paths}
    made = []
    for number, pieces in enumerate(folders, 1):
        folder = out / str(number)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        listed: list[dict[str, Any]] = []
        for piece in pieces:
            with (root / piece.path).open("rb") as source:
                source.seek(piece.start)
                data = source.read(piece.size)
            (folder / piece.name).write_bytes(data)
            listed.append(
                {"name": piece.name, "path": piece.path, "index": piece.index, "count": piece.count}
            )
            listed[-1] |= {"sha256": hashlib.sha256(data).hexdigest()}
        manifest = {"number": number, "folders": len(folders), "pieces": listed, "whole": whole}
        (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
        made.append(folder)
    return made


def take_folder(folder: Path, root: Path) -> list[str]:
    """Puts what a carried folder has under `root`; files of which every piece is there appear whole. Returns
    those that are still not whole."""
    manifest = json.loads((folder / MANIFEST).read_text())
    waiting = root / WAITING
    waiting.mkdir(parents=True, exist_ok=True)
    for listed in manifest["pieces"]:
        source = folder / listed["name"]
        if not source.is_file() or digest_of(source) != listed["sha256"]:
            raise Damaged(f"{source} is missing or is not what was packed: carry {folder} again")
        counted = waiting / f"{listed['name']}-{listed['count']}"
        shutil.copy(source, counted)
    return [path for path, digest in manifest["whole"].items() if not _is_whole(root, path, digest)]


def _is_whole(root: Path, path: str, digest: str) -> bool:
    target, waiting = root / path, root / WAITING
    if target.exists():
        return True
    first = next(waiting.glob(f"{path.replace('/', '.')}.0-*"), None)
    if first is None:
        return False
    count = int(first.name.rpartition("-")[2])
    pieces = [waiting / f"{path.replace('/', '.')}.{index}-{count}" for index in range(count)]
    if not all(piece.exists() for piece in pieces):
        return False
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.with_name(f".{target.name}.joining")
    with scratch.open("wb") as joined:
        for piece in pieces:
            joined.write(piece.read_bytes())
    if digest_of(scratch) != digest:
        raise Damaged(f"{path} is not what was packed, though each of its pieces is: pack again")
    scratch.rename(target)
    for piece in pieces:
        piece.unlink()
    return True


def digest_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
