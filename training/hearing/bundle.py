"""`python -m training.hearing.bundle WHISPER ASSETS`: Whisper's encoder alone, for a machine that fetches
nothing."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("whisper", type=Path, help="the folder that `make whisper` makes")
    parser.add_argument("assets", type=Path)
    given = parser.parse_args()
    stored = load_file(given.whisper / "model.safetensors")
    given.assets.mkdir(parents=True, exist_ok=True)
    encoder = {
        name: value.to(torch.float16) for name, value in stored.items() if name.startswith("model.encoder.")
    }
    save_file(encoder, given.assets / "encoder.safetensors")


if __name__ == "__main__":
    main()
