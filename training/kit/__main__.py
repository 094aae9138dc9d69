"""`python -m training.kit pack | unpack | train | collect`: what a machine that fetches nothing needs, what
it does there, and what comes back. Each names its own arguments with `--help`."""

from __future__ import annotations

import argparse

from training.kit import outcome, pack, train, unpack

COMMANDS = {"pack": pack, "unpack": unpack, "train": train, "collect": outcome}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m training.kit", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, module in COMMANDS.items():
        module.add_arguments(
            commands.add_parser(
                name, description=module.__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
            )
        )
    given = parser.parse_args()
    COMMANDS[given.command].main(given)


if __name__ == "__main__":
    main()
