"""`python -m training.seeing.bundle DIR`: what training needs on a machine that fetches nothing, in small
parts.

DIR/fonts, and the language model's file in DIR/weights/part-N; there: `cat weights/part-* > FILE` and
`python -m model_families.default_model.build CHECKPOINT --weights FILE`, which checks it.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path

from model_families.default_model.build import GGUF, fetch
from training.seeing.sprites import SYSTEM_FONTS, Sprites


def bundle(folder: Path, downloads: Path, fonts: Path, part_bytes: int) -> None:
    sprites = Sprites(fonts)
    if sprites.missing():
        raise SystemExit(f"fonts are missing (training/README.md names the packages): {sprites.missing()}")
    (folder / "fonts").mkdir(parents=True)
    for file in sprites.files():
        shutil.copy(file, folder / "fonts")
    (folder / "weights").mkdir()
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        whole = Path(scratch, GGUF)
        fetch(whole, downloads)
        with whole.open("rb") as source:
            for index in range(-(-whole.stat().st_size // part_bytes)):
                (folder / "weights" / f"part-{index}").write_bytes(source.read(part_bytes))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--downloads", type=Path, default=Path(".downloads"))
    parser.add_argument("--fonts", type=Path, default=SYSTEM_FONTS)
    parser.add_argument("--part-mb", type=int, default=55)
    arguments = parser.parse_args()
    bundle(arguments.folder, arguments.downloads, arguments.fonts, arguments.part_mb * 10**6)


if __name__ == "__main__":
    main()
