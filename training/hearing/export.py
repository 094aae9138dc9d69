"""`python -m training.hearing.export RUN`: what was trained of the ears becomes what the repository ships."""

from __future__ import annotations

import argparse
from pathlib import Path

from torch import Tensor

from model_families.default_model.shipped import HEARING, write_shipped
from training.hearing.train import NAME
from training.speaking.weights import load_parts

# Our module paths → the checkpoint's, numbers left as they are.
NAMES = (
    ("blocks.", "layers."),
    (".norm1.", ".self_attn_layer_norm."),
    (".norm2.", ".final_layer_norm."),
    (".attention.q.", ".self_attn.q_proj."),
    (".attention.k.", ".self_attn.k_proj."),
    (".attention.v.", ".self_attn.v_proj."),
    (".attention.out.", ".self_attn.out_proj."),
    (".up.", ".fc1."),
    (".down.", ".fc2."),
    ("letters.", "spell."),
)


def ears_tensors(trained: dict[str, Tensor]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name, tensor in trained.items():
        theirs = name if not name.startswith("norm.") else name.replace("norm.", "ln_post.")
        for ours, stored in NAMES:
            theirs = theirs.replace(ours, stored)
        tensors[f"audio_tower.{theirs}"] = tensor
    return tensors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--to", type=Path, default=HEARING)
    given = parser.parse_args()
    trained = load_parts(given.run, NAME)
    if not trained:
        raise SystemExit(f"{given.run} holds no trained ears")
    write_shipped(given.to, ears_tensors(trained))
    print(f"{given.to}: {given.to.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
