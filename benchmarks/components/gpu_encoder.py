"""Speed of a vision tower on one GPU, alone: pictures as preprocessing hands them over, one forward of all.

python -m benchmarks.components.shape_folder qwen2_5_vl_3b /tmp/q3b
python -m benchmarks.components.gpu_encoder /tmp/q3b --images 8 --grid 74x74 [--json FILE]

The pixels are on the host, as in a server. The floor is the arithmetic of the blocks' products, and of
attention in the layers that see a whole picture, at `--flops`.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from encoder_pool.model import EncoderInput, EncoderModel
from model_families.dummy_weights import open_checkpoint
from model_families.registry import open_family

WARM_UP_ROUNDS = 3


@dataclass(frozen=True)
class EncoderFigure:
    images: int
    encode_ms: float  # median of the rounds
    least_ms: float
    floor_ms: float


def pictures(count: int, rows: int, columns: int, patch_size: int, merge_size: int) -> list[EncoderInput]:
    """Of noise; `rows` and `columns` in patches."""
    generator = torch.Generator().manual_seed(0)
    shape = (rows * patch_size, columns * patch_size, 3)
    num_tokens = rows * columns // merge_size**2
    return [
        EncoderInput(
            "image",
            torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator),
            (1, rows, columns),
            num_tokens,
        )
        for _ in range(count)
    ]


def flops_of(folder: Path, num_images: int, num_patches: int) -> float:
    """`num_patches` of each picture."""
    with open_checkpoint(folder) as checkpoint:
        shapes = [checkpoint.shape(name) for name in checkpoint.names if "visual.blocks." in name]
    products = 2 * sum(prod(shape) for shape in shapes if len(shape) == 2) * num_images * num_patches
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    vision = config.get("thinker_config", config)["vision_config"]
    whole: int = len(vision.get("fullatt_block_indexes", range(vision["depth"])))
    width: int = vision["hidden_size"]
    return products + 4.0 * whole * num_images * num_patches**2 * width


def encode_s(model: EncoderModel, items: list[EncoderInput]) -> float:
    started = time.perf_counter()
    model.encode(items)
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    return time.perf_counter() - started


def measure(options: argparse.Namespace, num_images: int, model: EncoderModel) -> EncoderFigure:
    rows, columns = (int(side) for side in options.grid.split("x"))
    spec = open_family(options.folder).media_specs.image
    assert spec is not None, f"{options.folder} takes no pictures"
    items = pictures(num_images, rows, columns, spec.patch_size, spec.merge_size)
    for _ in range(WARM_UP_ROUNDS):
        encode_s(model, items)
    taken = sorted(encode_s(model, items) for _ in range(options.rounds))
    floor_s = flops_of(options.folder, num_images, rows * columns) / options.flops
    return EncoderFigure(num_images, taken[len(taken) // 2] * 1e3, taken[0] * 1e3, floor_s * 1e3)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--images", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--grid", default="74x74", metavar="ROWSxCOLUMNS", help="of patches")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--flops", type=float, default=780e12, help="a second, of bfloat16 (H200: 780e12)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    device = torch.device(options.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = open_family(options.folder).load_encoder("vision", device, dtype)
    place = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"{place}, torch {torch.__version__}, pictures of {options.grid} patches")
    print("images   encode ms  least ms  floor ms")
    found = []
    for num_images in options.images:
        one = measure(options, num_images, model)
        found.append(asdict(one))
        print(f"{num_images:6}{one.encode_ms:12.1f}{one.least_ms:10.1f}{one.floor_ms:10.1f}", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
