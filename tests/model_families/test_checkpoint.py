"""Reading checkpoints: one file and shards give the same tensors; every defect is named."""

from __future__ import annotations

import json

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from contracts.errors import EngineError
from model_families.checkpoint import Checkpoint, read_config

TENSORS = {
    "a.weight": torch.arange(12, dtype=torch.float32).view(3, 4) / 7,
    "b.weight": torch.arange(6, dtype=torch.bfloat16).view(2, 3),
    "c.bias": torch.tensor([1.5, -2.0], dtype=torch.float16),
}


class Config(msgspec.Struct):
    width: int


def save_single(folder):
    save_file(TENSORS, folder / "model.safetensors")


def save_sharded(folder, weight_map=None):
    save_file({"a.weight": TENSORS["a.weight"]}, folder / "model-00001-of-00002.safetensors")
    rest = {name: TENSORS[name] for name in ("b.weight", "c.bias")}
    save_file(rest, folder / "model-00002-of-00002.safetensors")
    weight_map = weight_map or {
        "a.weight": "model-00001-of-00002.safetensors",
        "b.weight": "model-00002-of-00002.safetensors",
        "c.bias": "model-00002-of-00002.safetensors",
    }
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("save", [save_single, save_sharded])
def test_tensors_by_name(tmp_path, save):
    save(tmp_path)
    with Checkpoint(tmp_path) as checkpoint:
        assert sorted(checkpoint.names) == sorted(TENSORS)
        assert "b.weight" in checkpoint
        assert "d" not in checkpoint
        for name, expected in TENSORS.items():
            assert checkpoint.shape(name) == tuple(expected.shape)
            found = checkpoint.tensor(name, tuple(expected.shape))
            assert found.dtype == expected.dtype
            assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_casts_and_outlives_the_checkpoint(tmp_path, dtype):
    save_single(tmp_path)
    with Checkpoint(tmp_path) as checkpoint:
        found = checkpoint.tensor("a.weight", (3, 4), dtype=dtype, device=torch.device("cpu"))
        same = checkpoint.tensor("a.weight", (3, 4))
    assert torch.equal(found, TENSORS["a.weight"].to(dtype))
    assert torch.equal(same, TENSORS["a.weight"])


def test_missing_and_misshaped_tensors_are_named(tmp_path):
    save_single(tmp_path)
    with Checkpoint(tmp_path) as checkpoint:
        with pytest.raises(EngineError, match=r"lacks the tensor d\.weight"):
            checkpoint.tensor("d.weight", (1,))
        with pytest.raises(EngineError, match=r"a\.weight has shape \[3, 4\], config\.json needs \[4, 3\]"):
            checkpoint.tensor("a.weight", (4, 3))


def test_a_missing_shard_is_named(tmp_path):
    save_sharded(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(EngineError, match=r"model-00002-of-00002\.safetensors"):
        Checkpoint(tmp_path)


def test_an_index_that_lies_is_refused(tmp_path):
    save_sharded(tmp_path, {"a.weight": "model-00002-of-00002.safetensors"})
    with pytest.raises(EngineError, match=r"a\.weight in model-00002-of-00002\.safetensors"):
        Checkpoint(tmp_path)


def test_an_index_does_not_leave_the_folder(tmp_path):
    inside = tmp_path / "inside"
    inside.mkdir()
    save_single(tmp_path)
    save_sharded(inside, {"a.weight": "../model.safetensors"})
    with pytest.raises(EngineError, match="lacks the weight file"):
        Checkpoint(inside)


def test_unreadable_files_are_named(tmp_path):
    with pytest.raises(EngineError, match=r"neither model\.safetensors nor"):
        Checkpoint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x80\x02pickled things")
    with pytest.raises(EngineError, match="no readable safetensors"):
        Checkpoint(tmp_path)


def test_a_truncated_file_is_refused(tmp_path):
    save_single(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(EngineError, match="no readable safetensors"):
        Checkpoint(tmp_path)


def test_config_is_typed_data(tmp_path):
    with pytest.raises(EngineError, match=r"has no config\.json"):
        read_config(tmp_path, Config)
    path = tmp_path / "config.json"
    path.write_text('{"width": 3, "more": {"x": 1}}')
    assert read_config(tmp_path, Config).width == 3
    path.write_text('{"width": "3"}')
    with pytest.raises(EngineError, match="width"):
        read_config(tmp_path, Config)
    path.write_text('{"width": ')
    with pytest.raises(EngineError, match=r"config\.json"):
        read_config(tmp_path, Config)
