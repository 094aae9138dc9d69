"""`make bench`: starts a server and runs the short benchmarks against it."""

from __future__ import annotations

import subprocess
import sys

from local_server import local_server

RUNS = (
    ("decode", "--streams", "1,8", "--output-tokens", "64"),
    ("repeat-image",),
    ("chat", "--sessions", "8", "--turns", "3", "--concurrency", "4", "--output-tokens", "32"),
)


def main() -> int:
    failed = 0
    with local_server() as url:
        for name, *options in RUNS:
            print(f"\n== omnistage bench {name} {' '.join(options)}", flush=True)
            command = [sys.executable, "-m", "benchmarks.cli", name, "--url", url, *options]
            failed += subprocess.run(command, check=False).returncode != 0
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
