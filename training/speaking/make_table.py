"""Takes the text embeddings that training needs out of the language model's published file.

`python -m training.speaking.make_table GGUF OUT --tokenizer tokenizer.json`: a row is 576 integers and one
scale for
every 32 of them, which is what the published file holds: nothing is lost.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from gguf import GGUFReader
from safetensors.torch import save_file

from training.speaking.prompts import COPIED, open_prompts
from training.speaking.table import GROUP


def write_table(gguf: Path, tokenizer: Path, out: Path) -> None:
    published = next(one for one in GGUFReader(gguf).tensors if one.name == "token_embd.weight")
    blocks = np.asarray(published.data).reshape(
        len(published.data), -1, 2 + GROUP
    )  # Q8_0: a float16, 32 bytes
    ids = sorted({*open_prompts(tokenizer).layout.tokens, *COPIED.values()} - COPIED.keys())
    kept = np.ascontiguousarray(blocks[ids])
    scales = np.ascontiguousarray(kept[..., :2]).view(np.float16)[..., 0]
    rows = np.ascontiguousarray(kept[..., 2:]).view(np.int8).reshape(len(ids), -1)
    tensors = {
        "ids": torch.tensor(ids),
        "rows": torch.from_numpy(rows),
        "scales": torch.from_numpy(scales.copy()),
    }
    save_file(tensors, out)
    print(f"{len(ids)} rows in {out}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokenizer", type=Path, required=True)
    arguments = parser.parse_args()
    write_table(arguments.gguf, arguments.tokenizer, arguments.out)


if __name__ == "__main__":
    main()
