"""A folder without weights loads like one with them, every time the same."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lm_engine.layers.selection import select_kernels
from model_families.census import take_census
from model_families.dummy_weights import MARK_FILE, open_checkpoint, write_table
from model_families.registry import open_family

CPU = torch.device("cpu")


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"])
def test_a_folder_without_weights_loads_alike_twice(
    tiny: Callable[[str], Path], tmp_path: Path, family: str
) -> None:
    folder = tmp_path / family
    shutil.copytree(tiny(family), folder, ignore=shutil.ignore_patterns("*.safetensors"))
    (folder / MARK_FILE).touch()

    census, true_census = take_census(folder), take_census(tiny(family))
    assert census.elements == true_census.elements
    opened = open_family(folder)
    kernels = select_kernels("reference", CPU, torch.float32)
    first, second = (opened.load_decoder(CPU, torch.float32, kernels) for _ in range(2))
    tokens_T = torch.arange(7)
    assert torch.equal(first.embed(tokens_T), second.embed(tokens_T))
    assert first.embed(tokens_T).std() > 0.01
    if opened.media_specs.image is not None:
        assert opened.load_encoder("vision", CPU, torch.float32).embedding_width > 0


def test_a_table_tells_what_the_model_class_would(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """Names, shapes and dtypes; and nothing of transformers is asked for them."""
    folders = [tmp_path / name for name in ("built", "told")]
    for folder in folders:
        shutil.copytree(tiny("qwen2_5_vl"), folder, ignore=shutil.ignore_patterns("*.safetensors"))
    (folders[0] / MARK_FILE).touch()
    write_table(folders[1])
    config = folders[1] / "config.json"
    config.write_text(config.read_text().replace("ForConditionalGeneration", "OfAnotherKind"))

    built, told = map(open_checkpoint, folders)
    assert set(told.names) == set(built.names)
    for name in built.names:
        assert (told.shape(name), told.dtype(name)) == (built.shape(name), built.dtype(name))
