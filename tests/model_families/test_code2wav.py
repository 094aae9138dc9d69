"""Qwen3-Omni's code2wav against transformers, from one checkpoint."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from contracts.errors import EngineError
from model_families.qwen3_omni_moe.vocoder import load_vocoder, read_code2wav_config
from tests.model_families.code2wav_models import build_code2wav
from vocoder.code2wav import Code2Wav
from vocoder.model import VocoderRow

CPU = torch.device("cpu")


def load(folder) -> Code2Wav:
    torch.set_num_threads(1)
    return load_vocoder(folder, CPU, torch.float32)


def reference_pcm(reference, codes_KQ: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return reference(codes_KQ.T[None])[0, 0]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"attention_bias": True, "num_key_value_heads": 1},
        {"upsample_rates": [2, 3, 2], "decoder_dim": 24},
    ],
    ids=["plain", "grouped heads and biases", "three blocks"],
)
def test_one_piece_equals_transformers(tmp_path, changes):
    reference, ours = build_code2wav(tmp_path, **changes), load(tmp_path)
    for length in (1, 2, 4, 31):
        codes_KQ = torch.randint(0, 32, (length, 4), generator=torch.Generator().manual_seed(length))
        theirs = reference_pcm(reference, codes_KQ)
        assert 0.001 < theirs.abs().max() < 0.99
        torch.testing.assert_close(ours.decode_whole(codes_KQ), theirs, rtol=0, atol=1e-5)


def test_frames_one_by_one_equal_transformers_which_sees_them_at_once(tmp_path):
    reference, ours = build_code2wav(tmp_path), load(tmp_path)
    codes_KQ = torch.randint(0, 32, (23, 4), generator=torch.Generator().manual_seed(3))
    state = ours.open()
    pcm = [ours.decode([VocoderRow(state, codes_KQ[i : i + 1], i == 22)])[0] for i in range(23)]
    torch.testing.assert_close(torch.cat(pcm), reference_pcm(reference, codes_KQ), rtol=0, atol=1e-5)


def test_older_configs_keep_their_rope_theta(tmp_path):
    build_code2wav(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    fields["code2wav_config"]["rope_theta"] = 500.0
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert read_code2wav_config(tmp_path).transformer.rope_theta == 500.0


@pytest.mark.parametrize("fault", ["missing", "unknown", "misshaped"])
def test_a_checkpoint_that_does_not_fit_is_named(tmp_path, fault):
    build_code2wav(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "code2wav.decoder.0.conv.weight"
    stored = tensors.pop(name)
    if fault == "misshaped":
        tensors[name] = stored[..., :-1].contiguous()
    elif fault == "unknown":
        tensors |= {name: stored, "code2wav.decoder.9.mystery": stored.clone()}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(EngineError, match=r"entry|decoder"):
        load(tmp_path)
