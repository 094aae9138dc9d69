"""Speed of a vision tower on one GPU, alone: pictures as preprocessing hands them over, one forward of all,
launched kernel by kernel and replayed as a CUDA graph.

python -m benchmarks.components.shape_folder qwen2_5_vl_3b /tmp/q3b
python -m benchmarks.components.gpu_encoder /tmp/q3b --images 8 --grid 74x74 [--json FILE]

The pixels are on the host, as in a server. `host ms` is what the thread needs until all is under way:
copies of the pixels, then kernels or a graph. The last line of a way is of one small picture. The floor is
the arithmetic of the blocks' products, and of attention in the layers that see a whole picture, at `--flops`.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

import torch

from encoder_pool.graphs import GraphedTower
from encoder_pool.model import EncoderInput, EncoderModel, GraphBounds
from model_families.dummy_weights import open_checkpoint
from model_families.registry import open_family

WARM_UP_ROUNDS = 3  # of which the second captures
MAX_PATCHES = 65536  # of a batch that is captured, where the memory is enough


@dataclass(frozen=True)
class EncoderFigure:
    images: int
    grid: str  # rows x columns of patches
    graphs: bool
    encode_ms: float  # median of the rounds
    least_ms: float
    host_ms: float  # of it, until `encode` has returned; median
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


def encode_s(model: EncoderModel, items: list[EncoderInput]) -> tuple[float, float]:
    """Until the embeddings are there, and until they are under way."""
    started = time.perf_counter()
    model.encode(items)
    launched = time.perf_counter()
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    return time.perf_counter() - started, launched - started


def measure(
    options: argparse.Namespace, num_images: int, grid: str, model: EncoderModel, *, graphs: bool
) -> EncoderFigure:
    rows, columns = (int(side) for side in grid.split("x"))
    spec = open_family(options.folder).media_specs.image
    assert spec is not None, f"{options.folder} takes no pictures"
    items = pictures(num_images, rows, columns, spec.patch_size, spec.merge_size)
    for _ in range(WARM_UP_ROUNDS):
        encode_s(model, items)
    taken, launched = zip(*(encode_s(model, items) for _ in range(options.rounds)), strict=True)
    floor_s = flops_of(options.folder, num_images, rows * columns) / options.flops
    return EncoderFigure(
        num_images,
        grid,
        graphs,
        encode_ms=median(taken) * 1e3,
        least_ms=min(taken) * 1e3,
        host_ms=median(launched) * 1e3,
        floor_ms=floor_s * 1e3,
    )


def measure_all(options: argparse.Namespace, model: EncoderModel, *, graphs: bool) -> list[EncoderFigure]:
    found = []
    for num_images, grid in [*((n, options.grid) for n in options.images), (1, options.small_grid)]:
        one = measure(options, num_images, grid, model, graphs=graphs)
        found.append(one)
        times = f"{one.encode_ms:12.2f}{one.least_ms:10.2f}{one.host_ms:9.2f}{one.floor_ms:10.2f}"
        print(f"{num_images:6}  {grid:>9}  {'graph' if graphs else 'plain':5}{times}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--images", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--grid", default="74x74", metavar="ROWSxCOLUMNS", help="of patches")
    parser.add_argument("--small-grid", default="16x16", metavar="ROWSxCOLUMNS", help="of a small picture")
    parser.add_argument("--graph-memory", type=int, default=2048, metavar="MIB", help="0: no graphs")
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
    print("images       grid  way     encode ms  least ms  host ms  floor ms")
    found = measure_all(options, model, graphs=False)
    if options.graph_memory and device.type == "cuda":
        model.allow_graphs(GraphBounds(options.graph_memory << 20, MAX_PATCHES, MAX_PATCHES), ahead=True)
        found += measure_all(options, model, graphs=True)
        assert isinstance(model, GraphedTower)
        assert model.graphs is not None
        held = model.graphs.held_bytes / (1 << 20)
        print(f"{len(model.graphs)} graphs of up to {model.graphs.max_rows} patches hold {held:.0f} MiB")
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(one) for one in found]))


if __name__ == "__main__":
    main()
