"""Every family's decoder against transformers: same logits in float32, whatever the schedule."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from contracts.errors import EngineError
from lm_engine.attention.reference import SequenceAttention
from lm_engine.native import native_kernels
from lm_engine.native.library import Unavailable
from lm_engine.plan import SpanPiece
from tests.lm_engine.stepping import Host
from tests.model_families.text_models import (
    FAMILIES,
    QWEN3_VL,
    VL_FAMILIES,
    config_of,
    edit_config,
    load_tiny,
    make_tiny,
)

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def tiny(request, tmp_path_factory):
    torch.set_num_threads(1)
    return make_tiny(request.param, tmp_path_factory.mktemp(request.param))


def every(families):
    return pytest.mark.parametrize("tiny", families, indirect=True)


def prompt(length, seed=0):
    return np.random.default_rng(seed).integers(0, 131, length).tolist()


def plain_positions(tiny, length):
    axes = 3 if tiny.family in VL_FAMILIES else 1
    return torch.arange(length).expand(axes, length)


def expected_logits(tiny, token_ids):
    return tiny.reference_logits(tiny.embed(token_ids), plain_positions(tiny, len(token_ids)))


def assert_close(ours, theirs):
    assert theirs.abs().max() > 1.0  # the models are no trivial ones
    torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=0)


@every(FAMILIES)
def test_one_prefill(tiny):
    with Host(load_tiny(tiny.family, tiny.folder)) as host:
        host.admit(0, prompt(37))
        (logits,) = host.step_logits((0, 37))
    assert_close(logits, expected_logits(tiny, prompt(37)))


@every(FAMILIES)
@pytest.mark.parametrize("block_size", [1, 4, 7])
def test_chunked_prefill_with_odd_chunks(tiny, block_size):
    with Host(load_tiny(tiny.family, tiny.folder), block_size=block_size) as host:
        host.admit(2, prompt(41))
        chunks = [host.step_logits((2, size))[0] for size in (1, 5, 19, 3, 13)]
    assert_close(torch.cat(chunks), expected_logits(tiny, prompt(41)))


@every(FAMILIES)
@pytest.mark.parametrize("plain_attention", [True, False])
def test_mixed_batches_of_chunks_and_decodes(tiny, plain_attention):
    attention = SequenceAttention() if plain_attention else None
    lengths = {5: 29, 0: 3, 3: 50}
    with Host(load_tiny(tiny.family, tiny.folder), attention) as host:
        for slot, length in lengths.items():
            host.admit(slot, prompt(length, seed=slot))
        seen = {slot: [] for slot in lengths}
        drawn = {slot: [] for slot in lengths}
        steps = [((5, 20), (0, 3)), ((0, 1), (5, 9), (3, 25)), ((3, 18), (0, 1), (5, 1)), ((3, 7), (5, 1))]
        for step in steps:
            result = host.step(*step)
            split = host.model.logits_TV[-1].split([count for _, count in step])
            for (slot, _), logits in zip(step, split, strict=True):
                seen[slot].append(logits)
            for sampled in result.sampled:
                drawn[sampled.slot].append(sampled.token_id)
    for slot, length in lengths.items():
        computed = sum(len(part) for part in seen[slot])
        tokens = (prompt(length, seed=slot) + drawn[slot])[:computed]
        assert_close(torch.cat(seen[slot]), expected_logits(tiny, tokens))


@every(FAMILIES)
def test_greedy_continuation_is_the_references(tiny):
    with Host(load_tiny(tiny.family, tiny.folder)) as host:
        host.admit(1, prompt(11))
        ours = host.generate(1, 24)
    tokens = prompt(11)
    for _ in range(24):
        tokens.append(int(expected_logits(tiny, tokens)[-1].argmax()))
    assert ours == tokens[11:]


WINDOW = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}  # of three layers
WINDOWED_FAMILIES = ("qwen2", "qwen3", "qwen2_vl", "qwen2_5_vl")


@pytest.mark.parametrize("family", WINDOWED_FAMILIES)
@pytest.mark.parametrize("kernels", ["reference", "auto"])
def test_layers_with_a_window(tmp_path, family, kernels):
    """Chunks shorter and longer than it, beside decodes."""
    tiny = make_tiny(family, tmp_path, **WINDOW)
    with Host(load_tiny(family, tmp_path, kernels=kernels)) as host:
        host.admit(1, prompt(41))
        host.admit(4, prompt(7, seed=1))
        chunks = [host.step_logits(*step)[-1] for step in (((1, 5),), ((4, 7), (1, 27)), ((4, 1), (1, 9)))]
        decoded = [host.step_logits((1, 1), (4, 1))[0] for _ in range(3)]
        tokens = host.runner.table.token_ids[1, :44].tolist()
    assert_close(torch.cat(chunks + decoded), expected_logits(tiny, tokens))
    with Host(load_tiny(family, tmp_path, kernels=kernels)) as host:
        host.admit(1, prompt(11))
        ours = host.generate(1, 20)
    tokens = prompt(11)
    for _ in range(20):
        tokens.append(int(expected_logits(tiny, tokens)[-1].argmax()))
    assert ours == tokens[11:]


@pytest.mark.parametrize(
    ("change", "windows"),
    [
        ({}, (None, 8, 8)),
        ({"max_window_layers": 0}, (8, 8, 8)),
        ({"max_window_layers": 3}, ()),
        ({"max_window_layers": None}, ()),  # the family's own number is above
        ({"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}, (8, None, 8)),
        ({"layer_types": ["full_attention"] * 3}, ()),
        ({"use_sliding_window": False}, ()),
        ({"sliding_window": None}, ()),
        ({"sliding_window": 511}, (None, 511, 511)),
        ({"sliding_window": 512}, ()),  # the longest context fits
    ],
)
def test_which_layers_have_a_window(tmp_path, change, windows):
    make_tiny("qwen2", tmp_path, **WINDOW)
    edit_config(tmp_path, lambda config: config.update({"layer_types": None, **change}))
    assert config_of("qwen2", tmp_path).windows == windows


def test_a_window_without_a_length_has_the_family_s(tmp_path):
    make_tiny("qwen2", tmp_path, **WINDOW)

    def edit(config):
        del config["sliding_window"]
        config["max_position_embeddings"] = 5000

    edit_config(tmp_path, edit)
    assert config_of("qwen2", tmp_path).windows == (None, 4096, 4096)


@pytest.mark.parametrize("change", [{"use_sliding_window": False}, {"sliding_window": None}])
def test_windows_of_no_length_are_refused(tmp_path, change):
    make_tiny("qwen2", tmp_path, **WINDOW)
    kinds = ["sliding_attention", "full_attention", "full_attention"]
    edit_config(tmp_path, lambda config: config.update({"layer_types": kinds, **change}))
    with pytest.raises(EngineError, match=r"layer_types names sliding_attention"):
        config_of("qwen2", tmp_path)


@every(FAMILIES)
def test_native_kernels_give_the_same_logits(tiny):
    kernels = native_kernels(torch.device("cpu"), torch.float32)
    if isinstance(kernels, Unavailable):
        pytest.skip(kernels.reason)
    with Host(load_tiny(tiny.family, tiny.folder, kernels="native")) as host:
        assert host.model.attention.name == "native"
        host.admit(1, prompt(30))
        host.admit(4, prompt(7, seed=1))
        chunks = [host.step_logits((1, 21))[0], host.step_logits((4, 7), (1, 9))[1]]
        decoded = [host.step_logits((1, 1), (4, 1))[0] for _ in range(3)]
        tokens = host.runner.table.token_ids[1, :33].tolist()
    assert_close(torch.cat(chunks + decoded), expected_logits(tiny, tokens))


def visual_prompt(levels):
    """37 tokens, of which 5..17 and 22..28 are two items; M-RoPE positions as a 3×4 and a 2×3 grid give."""
    items = {5: (3, 4), 22: (2, 3)}
    positions, next_position, index = [], 0, 0
    while index < 37:
        if index in items:
            rows, columns = items[index]
            grid = np.indices((1, rows, columns)).reshape(3, -1) + next_position
            positions.append(grid)
            index += rows * columns
            next_position += max(rows, columns)
        else:
            positions.append(np.full((3, 1), next_position))
            next_position += 1
            index += 1
    generator = torch.Generator().manual_seed(5)
    embeddings = {
        start: torch.randn(rows * columns, 64 * (1 + levels), generator=generator)
        for start, (rows, columns) in items.items()
    }
    return prompt(37), np.concatenate(positions, axis=1), next_position - 37, embeddings


def reference_visual_logits(tiny, token_ids, positions_AT, embeddings, levels):
    hidden_TH = tiny.embed(token_ids).clone()
    mask_T = torch.zeros(len(token_ids), dtype=torch.bool)
    for start, rows_LW in embeddings.items():
        hidden_TH[start : start + len(rows_LW)] = rows_LW[:, :64]
        mask_T[start : start + len(rows_LW)] = True
    more = {}
    if levels:
        stacked_LW = torch.cat(list(embeddings.values()))
        more["visual_pos_masks"] = mask_T[None]
        more["deepstack_visual_embeds"] = [stacked_LW[:, 64 * (1 + k) : 64 * (2 + k)] for k in range(levels)]
    return tiny.reference_logits(hidden_TH, torch.as_tensor(positions_AT), **more)


def pieces_of(embeddings, slot, start, stop):
    """The parts of the items that lie within [start, stop)."""
    pieces = []
    for offset, rows_LW in embeddings.items():
        first, last = max(offset, start), min(offset + len(rows_LW), stop)
        if first < last:
            pieces.append(SpanPiece(slot, first, last - first, rows_LW, first - offset))
    return tuple(pieces)


@every(VL_FAMILIES)
@pytest.mark.parametrize("chunks", [(37,), (4, 9, 1, 12, 11)])
def test_image_embeddings_and_decode_positions(tiny, chunks):
    """Images take embeddings (and deepstack features) chunk by chunk; generated tokens go on at delta."""
    levels = 2 if tiny.family in QWEN3_VL else 0
    token_ids, positions_AT, delta, embeddings = visual_prompt(levels)
    with Host(load_tiny(tiny.family, tiny.folder)) as host:
        host.admit(0, prompt(9, seed=9))
        host.admit(4, token_ids, positions=positions_AT, delta=delta)
        seen, start = [], 0
        for size in chunks:
            others = ((0, 9),) if start == 0 else ((0, 1),)
            steps = (*others, (4, size))
            seen.append(host.step_logits(*steps, pieces=pieces_of(embeddings, 4, start, start + size))[1])
            start += size
        decoded = [host.step_logits((4, 1))[0] for _ in range(3)]
        tokens_after = host.runner.table.token_ids[4, 37:40].tolist()
    generated = np.broadcast_to(np.arange(37, 40) + delta, (3, 3))
    expected = reference_visual_logits(
        tiny,
        token_ids + tokens_after,
        np.concatenate([positions_AT, generated], axis=1),
        embeddings,
        levels,
    )
    assert_close(torch.cat(seen + decoded), expected)


ROPE_KINDS = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    "yarn_mscale": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "truncate": False,
    },
    "yarn_fixed": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "attention_factor": 1.3,
    },
}


@pytest.mark.parametrize("kind", ROPE_KINDS)
@pytest.mark.parametrize("old_style", [False, True])
def test_rope_scaling(tmp_path, kind, old_style):
    rope = {"rope_theta": 1e4, **ROPE_KINDS[kind]}
    tiny = make_tiny("llama", tmp_path, rope_parameters=dict(rope))

    def to_old_style(config):
        scaling = config.pop("rope_parameters")
        config["rope_theta"] = scaling.pop("rope_theta")
        scaling["type"] = scaling.pop("rope_type")
        config["rope_scaling"] = scaling

    if old_style:
        edit_config(tmp_path, to_old_style)
    with Host(load_tiny("llama", tmp_path), max_length=400) as host:
        host.admit(0, prompt(300))
        (logits,) = host.step_logits((0, 300))
    assert_close(logits, expected_logits(tiny, prompt(300)))


def test_mrope_with_yarn(tmp_path):
    rope = {**ROPE_KINDS["yarn"], "rope_theta": 1e6, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
    tiny = make_tiny("qwen3_vl", tmp_path, rope_parameters=rope)
    token_ids, positions_AT, delta, embeddings = visual_prompt(2)
    with Host(load_tiny("qwen3_vl", tmp_path)) as host:
        host.admit(0, token_ids, positions=positions_AT, delta=delta)
        (logits,) = host.step_logits((0, 37), pieces=pieces_of(embeddings, 0, 0, 37))
    assert_close(logits, reference_visual_logits(tiny, token_ids, positions_AT, embeddings, 2))


@pytest.mark.parametrize("family", ["llama", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"])
def test_tied_embeddings(tmp_path, family):
    tiny = make_tiny(family, tmp_path, tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    with Host(load_tiny(family, tmp_path)) as host:
        host.admit(0, prompt(15))
        (logits,) = host.step_logits((0, 15))
    assert_close(logits, expected_logits(tiny, prompt(15)))


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_attention_bias(tmp_path, family):
    tiny = make_tiny(family, tmp_path, attention_bias=True)
    with Host(load_tiny(family, tmp_path)) as host:
        host.admit(0, prompt(15))
        (logits,) = host.step_logits((0, 15))
    assert_close(logits, expected_logits(tiny, prompt(15)))


def test_head_size_apart_from_hidden_size(tmp_path):
    tiny = make_tiny("qwen3", tmp_path, head_dim=32, num_attention_heads=6, num_key_value_heads=3)
    with Host(load_tiny("qwen3", tmp_path)) as host:
        host.admit(0, prompt(15))
        (logits,) = host.step_logits((0, 15))
    assert_close(logits, expected_logits(tiny, prompt(15)))


def rename_checkpoint(folder, renames):
    tensors = load_file(folder / "model.safetensors")
    renamed = {}
    for name, tensor in tensors.items():
        prefix = next((old for old in renames if name.startswith(old)), None)
        renamed[renames[prefix] + name.removeprefix(prefix) if prefix else name] = tensor.clone()
    assert renamed.keys() != tensors.keys()
    save_file(renamed, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("family", "renames"),
    [
        ("qwen2_vl", {"model.": "model.language_model.", "visual.": "model.visual."}),
        ("qwen2_5_vl", {"model.": "model.language_model.", "visual.": "model.visual."}),
        ("qwen3_vl", {"model.language_model.": "model.", "model.visual.": "visual."}),
    ],
)
def test_old_and_new_tensor_names(tmp_path, family, renames):
    """transformers saves the first two under their published names, the third under its own."""
    tiny = make_tiny(family, tmp_path)
    rename_checkpoint(tmp_path, renames)
    with Host(load_tiny(family, tmp_path)) as host:
        host.admit(0, prompt(15))
        (logits,) = host.step_logits((0, 15))
    assert_close(logits, expected_logits(tiny, prompt(15)))


def test_experts_stacked_inputs_first(tmp_path):
    """As the published Qwen3-VL-MoE checkpoints store them."""
    tiny = make_tiny("qwen3_vl_moe", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    stacks = [name for name in tensors if "experts" in name]
    assert stacks
    turned = {n: t.transpose(1, 2).contiguous() if n in stacks else t for n, t in tensors.items()}
    save_file(turned, tmp_path / "model.safetensors")
    with Host(load_tiny("qwen3_vl_moe", tmp_path)) as host:
        host.admit(0, prompt(15))
        (logits,) = host.step_logits((0, 15))
    assert_close(logits, expected_logits(tiny, prompt(15)))


@pytest.mark.parametrize("change", [{"num_experts": 6}, {"moe_intermediate_size": 41}])
def test_experts_that_do_not_fit_the_config_are_refused(tmp_path, change):
    make_tiny("qwen3_vl_moe", tmp_path)

    def edit(config):
        text = config["text_config"]
        text.pop("num_local_experts", None)
        text.update(change)

    edit_config(tmp_path, edit)
    with pytest.raises(EngineError, match="experts"):
        load_tiny("qwen3_vl_moe", tmp_path)


@pytest.mark.parametrize("family", VL_FAMILIES)
def test_flat_config_with_published_rope_keys(tmp_path, family):
    """The published Qwen-VL configs: text fields at the top, `rope_scaling` of type mrope."""
    make_tiny(family, tmp_path, tie_word_embeddings=True)
    nested = config_of(family, tmp_path)

    def flatten(config):
        text = config.pop("text_config")
        config.pop("tie_word_embeddings", None)
        rope = text.pop("rope_parameters")
        text["rope_theta"] = rope.pop("rope_theta")
        text["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
        text.pop("model_type")
        config.update(text, tie_word_embeddings=True)

    edit_config(tmp_path, flatten)
    assert "text_config" not in json.loads((tmp_path / "config.json").read_text())
    assert config_of(family, tmp_path) == nested


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_config_with_old_rope_keys(tmp_path, family):
    make_tiny(family, tmp_path, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    new_style = config_of(family, tmp_path)

    def age(config):
        config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
        config["rope_scaling"] = None

    edit_config(tmp_path, age)
    assert config_of(family, tmp_path) == new_style
    assert new_style.rope.theta == 5e5


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"use_sliding_window": True}, "this model type has no sliding windows"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "longrope"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "factor"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_hidden_layers": "three"}, "num_hidden_layers"),
    ],
)
def test_unsupported_configs_are_refused_by_name(tmp_path, change, complaint):
    make_tiny("llama", tmp_path)
    edit_config(tmp_path, lambda config: config.update(change))
    with pytest.raises(EngineError, match=complaint):
        config_of("llama", tmp_path)


def test_unused_text_tensors_are_refused(tmp_path):
    """A bias that the config does not know would be silently dropped otherwise."""
    make_tiny("llama", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.self_attn.q_proj.bias"] = torch.zeros(64)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(EngineError, match=r"model\.layers\.1\.self_attn\.q_proj\.bias"):
        load_tiny("llama", tmp_path)


@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight", "lm_head.weight"])
def test_missing_tensors_are_named(tmp_path, name):
    make_tiny("llama", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(EngineError, match=name.removeprefix("model.")):
        load_tiny("llama", tmp_path)


@every(FAMILIES)
def test_bfloat16_stays_near_the_reference(tiny):
    with Host(load_tiny(tiny.family, tiny.folder, torch.bfloat16)) as host:
        host.admit(0, prompt(20))
        (logits,) = host.step_logits((0, 20))
    assert logits.dtype == torch.float32
    expected = expected_logits(tiny, prompt(20))
    assert (logits - expected).abs().mean() < 0.03 * expected.abs().mean()
