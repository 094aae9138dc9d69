"""`pack DIR`: everything that training needs on a machine that fetches nothing, in folders small enough to
be carried; prints the calls that use them."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from model_families.default_model.shipped import shipped_name
from training.kit.layout import HEARD_PACKAGES, PACKAGES, Layout
from training.kit.pieces import write_folders

CARRIED_BYTES = 64 << 20  # of a call, the checkout included
MARGIN_BYTES = 1 << 20
PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014", "manylinux1")
ASCII = [*range(0x20, 0x7F)]


def pack(
    out: Path,
    *,
    model: Path,
    downloads: Path,
    python: str,
    more_packages: list[str],
    states: dict[str, Path],
    whisper: Path | None,
    hearing_alone: bool,
    sees: bool = True,
    speaks: bool = True,
) -> list[Path]:
    """`states`: folders of earlier runs to go on from, by "seeing", "speaking" or "hearing". `sees`: with
    what seeing is trained from, most of the bytes; `speaks`: with what starts the speakers."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out) as scratch:
        kit = Layout(Path(scratch))
        heard = [] if whisper is None else HEARD_PACKAGES
        fetch_wheels(kit.wheels, [*PACKAGES, *heard, *more_packages], python)
        kit.assets.mkdir()
        shutil.copy(model / "tokenizer.json", kit.assets)
        for name, folder in states.items():
            carry_state(folder, kit.root / name)
        if whisper is not None:
            _module("training.hearing.bundle", whisper, kit.assets)
            carry_libraries(kit.libraries)
        if not hearing_alone:
            carry_language_model(kit, downloads, speaks=speaks)
            if sees:
                carry_fonts(kit.fonts)
            else:
                kit.weights.unlink()
        paths = [str(path.relative_to(kit.root)) for path in kit.root.rglob("*") if path.is_file()]
        # What starts the speakers comes first, the language model last.
        order = sorted(
            paths, key=lambda path: (path == kit.weights.name, not path.startswith("wheels"), path)
        )
        return write_folders(kit.root, out, order, CARRIED_BYTES - MARGIN_BYTES - tree_bytes())


def _module(name: str, *arguments: Path | str) -> None:
    subprocess.run([sys.executable, "-m", name, *map(str, arguments)], check=True)


def fetch_wheels(folder: Path, packages: list[str], python: str) -> None:
    """For that version of Python. Raises SystemExit naming what there is no wheel of."""
    constraints = Path("constraints.txt")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--implementation", "cp", "--python-version", python]
    for platform in PLATFORMS:
        command += ["--platform", f"{platform}_x86_64"]
    for package in packages:
        known = ["--constraint", str(constraints)] if constraints.exists() else []
        if subprocess.run([*command, *known, "--dest", str(folder), package], check=False).returncode:
            raise SystemExit(f"there is no wheel of {package} for Python {python}")


def carry_fonts(folder: Path) -> None:
    """The glyphs that pictures are made of, out of the fonts: a sixth of their bytes."""
    from training.seeing.sprites import EMOJI_FONT, Sprites, emoji_list

    try:
        from fontTools import subset
    except ImportError:
        raise SystemExit("packing needs fonttools: pip install fonttools") from None
    sprites = Sprites()
    if sprites.missing():
        raise SystemExit(f"fonts are missing (training/README.md names the packages): {sprites.missing()}")
    folder.mkdir(parents=True)
    options = subset.Options(layout_features=["kern"], hinting=True, notdef_outline=True)
    for file in sprites.files():
        font = subset.load_font(str(file), options)
        wanted = [ord(one.character) for one in emoji_list()] if file.name == EMOJI_FONT else ASCII
        chosen = subset.Subsetter(options)
        chosen.populate(unicodes=wanted)
        chosen.subset(font)
        subset.save_font(font, str(folder / file.name), options)


def carry_language_model(kit: Layout, downloads: Path, *, speaks: bool) -> None:
    from model_families.default_model.build import fetch

    fetch(kit.weights, downloads)
    if speaks:
        tokenizer, table = kit.assets / "tokenizer.json", kit.assets / "table.safetensors"
        _module("training.speaking.make_table", kit.weights, table, "--tokenizer", tokenizer)


def carry_libraries(folder: Path) -> None:
    from training.hearing.voices import library_files

    folder.mkdir()
    for name, path in library_files().items():
        shutil.copy(path, folder / name)


def carry_state(source: Path, target: Path) -> None:
    found = [*source.glob("*.safetensors"), *source.glob("state.json")]
    if not found:
        raise SystemExit(f"{source} holds no state of a run")
    target.mkdir()
    for path in found:
        shutil.copy(path, target)


def tree_bytes() -> int:
    """Of what travels by itself: files that are tracked, or not ignored."""
    listed = subprocess.run(
        ["git", "ls-files", "-coz", "--exclude-standard"], check=True, capture_output=True
    ).stdout
    return sum(
        path.lstat().st_size
        for name in listed.split(b"\0")
        if name and (path := Path(name.decode())).exists()
    )


def calls(folders: list[Path], root: str, seconds: int, stages: str = "") -> list[str]:
    """What to run there, a line a call: the machine stays as it is between them. `stages`: else the usual."""
    lines = []
    for folder in folders:
        lines.append(f"carry {folder}: python3 -m training.kit unpack {folder} --to {root}")
    lines[-1] = lines[-1].replace(": ", ": began=$(date +%s); ", 1)
    left = f"$(({seconds}-$(date +%s)+began))"
    lines[-1] += f" && python3 -m training.kit train {root} --seconds {left} --out $OUT"
    lines[-1] += f" --stages {stages}" if stages else ""
    return lines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="ignored by git, in this checkout")
    parser.add_argument(
        "--model", type=Path, default=Path(".models", shipped_name()), help="has the tokenizer"
    )
    parser.add_argument("--downloads", type=Path, default=Path(".downloads"))
    parser.add_argument("--python", default="3.12", help="of the machine that trains")
    parser.add_argument("--package", action="append", default=[], help="that it lacks besides")
    for name in ("seeing", "speaking", "hearing"):
        parser.add_argument(f"--{name}", type=Path, help="a run's folder, to go on from")
    parser.add_argument("--whisper", type=Path, help="to train hearing as well: what `make whisper` made")
    parser.add_argument("--hearing-alone", action="store_true", help="nothing that only the others need")
    parser.add_argument("--seeing-alone", action="store_true", help="nobody speaks")
    parser.add_argument("--blind", action="store_true", help="without what seeing is trained from")
    parser.add_argument("--seconds", type=int, default=585, help="of the last call")


def main(given: argparse.Namespace) -> None:
    if given.hearing_alone and given.whisper is None:
        raise SystemExit("--hearing-alone: name --whisper as well")
    states = {name: getattr(given, name) for name in ("seeing", "speaking", "hearing")}
    folders = pack(
        given.folder,
        model=given.model,
        downloads=given.downloads,
        python=given.python,
        more_packages=given.package,
        states={name: path for name, path in states.items() if path is not None},
        whisper=given.whisper,
        hearing_alone=given.hearing_alone,
        sees=not given.blind,
        speaks=not given.seeing_alone,
    )
    for folder in folders:
        size = sum(path.stat().st_size for path in folder.iterdir())
        print(f"{folder}: {size / 1e6:.1f} MB")
    alone = "hearing" if given.hearing_alone else "seeing" if given.seeing_alone else ""
    stages = alone or ("decoder talker" if given.blind else "")
    lines = calls(folders, "/tmp/kit", given.seconds, stages)
    print("\n".join(["then, one after the other:", *lines]))
