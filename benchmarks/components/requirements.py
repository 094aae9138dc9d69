"""The packages that a server needs, as pyproject.toml says, and which of them this Python lacks.

    python -m benchmarks.components.requirements                    # one a line, as pip takes them
    python -m benchmarks.components.requirements --check [EXTRA]    # 1 when some are missing, which it names

For a machine without a package index: what such machines bring themselves (torch, transformers, triton) is
left out of the first list, and not imported by the check.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Iterable, Sequence
from importlib import metadata

from benchmarks.components.run_processes import ROOT, python

BROUGHT = frozenset({"torch", "transformers", "triton"})


def required(extras: Sequence[str] = ()) -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines: list[str] = [*project["dependencies"]]
    for extra in extras:
        lines += project["optional-dependencies"][extra]
    return lines


def name_of(requirement: str) -> str:
    match = re.match(r"[\w.-]+", requirement)
    assert match is not None, requirement
    return _normal(match[0])


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def missing(wanted: Iterable[str]) -> list[str]:
    """Those that are not installed, or that cannot be imported, which says what they lack. A package that is
    there in another version is not missing."""
    modules: dict[str, list[str]] = {}
    for module, names in metadata.packages_distributions().items():
        for name in names:
            modules.setdefault(_normal(name), []).append(module)
    absent = []
    for requirement in wanted:
        name = name_of(requirement)
        if name not in modules:
            absent.append(requirement)
        elif name not in BROUGHT and (lack := _lack_of(_main_module(name, modules[name]))):
            absent.append(f"{name} ({lack})")
    return absent


def _main_module(package: str, modules: Sequence[str]) -> str:
    """The one of the package's name, else the first that is public."""
    return min(modules, key=lambda module: (_normal(module) != package, module.startswith("_"), module))


def _lack_of(module: str) -> str:
    """What importing it fails for; nothing when it does not."""
    try:
        with warnings.catch_warnings(action="ignore"):
            importlib.import_module(module)
    except ImportError as error:
        return str(error)
    return ""


def complaint(*, gpu: bool) -> str:
    """What to say before any of them is used; nothing when all are there. Asks another process, so that this
    one has no threads of theirs."""
    command = python("benchmarks.components.requirements", "--check", *(["triton"] if gpu else []))
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else (done.stdout + done.stderr).strip()


def main(argv: Sequence[str]) -> int:
    if not argv:
        print("\n".join(line for line in required() if name_of(line) not in BROUGHT))
        return 0
    if argv[0] != "--check":
        print(__doc__, file=sys.stderr)
        return 2
    lacking = missing(required(argv[1:]))
    print(f"missing: {', '.join(lacking)}; see docs/benchmarks.md" if lacking else "nothing is missing")
    return 1 if lacking else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
