"""The decoder's own seams: what it takes from a source, how it fuses, what it does with deepstack rows."""

from __future__ import annotations

import pytest
import torch

from lm_engine.decoder import Decoder
from lm_engine.layers.reference import ReferenceKernels
from lm_engine.memory import allocate_kv
from lm_engine.request_table import RequestTable
from tests.lm_engine.random_decoder import RandomSource, tiny_config, tiny_decoder
from tests.lm_engine.stepping import Host

torch.set_num_threads(1)


def taken(**changes):
    source = RandomSource()
    Decoder(tiny_config(**changes), source, ReferenceKernels())
    assert len(source.taken) == len(set(source.taken))
    return set(source.taken)


def test_takes_each_tensor_once_and_none_without_need():
    plain = taken()
    assert {"embed.weight", "norm.weight", "lm_head.weight", "layers.1.down.weight"} <= plain
    assert not any(name.endswith("bias") or "q_norm" in name for name in plain)
    assert taken(tie_embeddings=True) == plain - {"lm_head.weight"}
    biased = {f"layers.{i}.{part}.bias" for i in (0, 1) for part in "qkv"}
    assert taken(qkv_bias=True) == plain | biased
    assert taken(output_bias=True) == plain | {"layers.0.o.bias", "layers.1.o.bias"}
    norms = {f"layers.{i}.{part}.weight" for i in (0, 1) for part in ("q_norm", "k_norm")}
    assert taken(qk_norm=True) == plain | norms


def test_fused_projections_are_the_parts_stacked():
    decoder, source = tiny_decoder(), RandomSource()
    layer = decoder.layers[1]
    x = torch.randn(3, 24)
    q, k, v = layer.qkv(x).split([32, 16, 16], dim=-1)
    for name, found, size in (("q", q, 32), ("k", k, 16), ("v", v, 16)):
        torch.testing.assert_close(found, x @ source.take(f"layers.1.{name}.weight", (size, 24)).T)
    gate, up = layer.mlp.gate_up(x).chunk(2, dim=-1)
    for name, found in (("gate", gate), ("up", up)):
        torch.testing.assert_close(found, x @ source.take(f"layers.1.{name}.weight", (32, 24)).T)


def run(decoder, tokens, deepstack=None, kv=None):
    table = RequestTable(
        vocab_size=97, num_axes=1, max_sequences=1, max_length=64, block_size=4, device=torch.device("cpu")
    )
    kv = kv or allocate_kv(decoder.config, 20, 4, torch.float32, torch.device("cpu"))
    with Host(decoder) as host:
        host.admit(0, tokens)
        plan_step = host._sequence_step(0, len(tokens))
        table.turn_over((), host.admissions)
        table.write_admissions(host.admissions)
    table.block_tables[0, :16] = torch.arange(1, 17)
    table.rows[0].num_blocks = 16
    inputs = table.step_inputs([plan_step])
    with torch.inference_mode():
        return decoder.forward(
            decoder.embed(inputs.token_ids_T),
            inputs.positions_AT,
            kv,
            decoder.attention,
            inputs.metadata,
            deepstack,
        )


def test_zero_deepstack_rows_change_nothing_and_others_do():
    decoder, tokens = tiny_decoder(), list(range(10))
    plain = run(decoder, tokens)
    rows_KTH = torch.zeros(2, 10, 24)
    torch.testing.assert_close(run(decoder, tokens, rows_KTH.clone()), plain)
    rows_KTH[1, 4] = 1.0
    changed = run(decoder, tokens, rows_KTH)
    assert not torch.allclose(changed[4], plain[4], atol=1e-2)
    # Added after the last layer, so nothing attends to it any more.
    torch.testing.assert_close(changed[[0, 3, 5, 9]], plain[[0, 3, 5, 9]])


def test_more_deepstack_levels_than_layers_are_refused():
    with pytest.raises(AssertionError):
        run(tiny_decoder(), [1, 2, 3], torch.zeros(3, 3, 24))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_near_float32(dtype):
    with Host(tiny_decoder()) as exact, Host(tiny_decoder(dtype)) as rounded:
        logits = []
        for host in (exact, rounded):
            host.admit(0, list(range(30)))
            logits.append(host.step_logits((0, 30))[0])
    assert logits[1].dtype == torch.float32
    assert (logits[0] - logits[1]).abs().max() < 0.15


def kept(decoder, tokens, deepstack=None):
    kv = allocate_kv(decoder.config, 20, 4, torch.float32, torch.device("cpu"))
    output = run(decoder, tokens, deepstack, kv)
    return kv.hidden.flatten(0, 1)[4 : 4 + len(tokens)], output


def test_keeps_the_hidden_states_that_a_talker_reads():
    """After the last layer the normed ones; before that the residual stream, without deepstack features."""
    tokens = list(range(10))
    rows, output = kept(tiny_decoder(kept_hidden_layer=2), tokens)
    torch.testing.assert_close(rows, output)
    shallow = tiny_decoder(num_layers=1)
    features = torch.full((1, 10, 24), 3.0)
    for deepstack in (None, features):
        rows, output = kept(tiny_decoder(kept_hidden_layer=1), tokens, deepstack)
        normed = shallow.kernels.rms_norm(rows, shallow.norm_H, 1e-6)
        torch.testing.assert_close(normed, run(shallow, tokens))
        assert not torch.allclose(output, run(shallow, tokens))
    config = tiny_config()
    assert tiny_config(kept_hidden_layer=1).kv_bytes_per_token(torch.float32) == 4 * 24 + (
        config.kv_bytes_per_token(torch.float32)
    )


def test_kept_hidden_states_move_with_copied_blocks():
    with Host(tiny_decoder(kept_hidden_layer=1)) as host:
        host.admit(0, list(range(8)), block_ids=(2, 3))
        host.step((0, 8))
        host.copies = [(2, 50)]
        host.step((0, 1))
        assert host.kv.hidden[2].abs().min() > 0
        torch.testing.assert_close(host.kv.hidden[50], host.kv.hidden[2])
