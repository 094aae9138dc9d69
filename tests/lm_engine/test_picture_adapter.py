"""The picture adapter: low-rank weights that act at and behind a sequence's first picture, and nowhere
else."""

from __future__ import annotations

import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from lm_engine.attention.reference import BatchedAttention
from lm_engine.decoder import Decoder
from lm_engine.layers.selection import select_kernels
from lm_engine.model import AdapterRanks, DecoderConfig, RopeConfig
from lm_engine.parallel import OneRank, ShardedWeights, shard_config
from lm_engine.passes import CapturedPasses, PaddedPasses
from lm_engine.plan import SpanPiece
from tests.lm_engine.stepping import Host

torch.set_num_threads(1)
CPU = torch.device("cpu")
KERNELS = ("reference", "native")
RANKS = AdapterRanks(q=3, k=2, v=4, o=3, gate=2, up=1, down=5)
SOME = AdapterRanks(v=2, up=3, down=1)
SIZES = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_layers": 3}
NAMES = {
    **{f"self_attn.{name}_proj": name for name in "qkvo"},
    **{f"mlp.{name}_proj": name for name in ("gate", "up", "down")},
}
ROWS = 6  # of a picture


def config(ranks: AdapterRanks | None) -> DecoderConfig:
    rope = RopeConfig(theta=1e4, inv_freq=tuple(1e4 ** (-p / 4) for p in range(4)))
    heads = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    return DecoderConfig(
        **SIZES, **heads, rms_norm_eps=1e-5, rope=rope, max_position=256, tie_embeddings=True,
        picture_adapter=ranks,
    )  # fmt: skip


@pytest.fixture(scope="module")
def llama():
    torch.manual_seed(5)
    made = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=97,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            rms_norm_eps=1e-5,
            max_position_embeddings=256,
            tie_word_embeddings=True,
            attn_implementation="eager",
        )
    ).eval()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "norm" not in name:
                parameter.normal_(0, 0.25)
    return made


def low_rank(layer, name, ranks, num_inputs, num_outputs):
    """A and B."""
    rank = getattr(ranks, name)
    generator = torch.Generator().manual_seed(100 * layer + list(NAMES.values()).index(name))
    a_RI = torch.randn(rank, num_inputs, generator=generator) * 0.3
    return a_RI, torch.randn(num_outputs, rank, generator=generator) * 0.3


class LlamaSource:
    """The weights of transformers' model, and an adapter beside them."""

    def __init__(self, llama, ranks) -> None:
        self.device, self.dtype = CPU, torch.float32
        self._weights = dict(llama.model.named_parameters())
        self._ranks = ranks

    def take(self, name, shape):
        if name == "embed.weight":
            return self._found("embed_tokens.weight", shape)
        if name == "norm.weight":
            return self._found("norm.weight", shape)
        _, layer, part, kind = name.split(".")
        if kind.startswith("lora"):
            _, (linear,) = self._theirs(layer, part)
            ab = low_rank(int(layer), part, self._ranks, linear.shape[1], linear.shape[0])
            found = ab[kind == "lora_b"]
            assert found.shape == shape, (name, found.shape, shape)
            return found.clone()
        return self._found(self._theirs(layer, part)[0], shape)

    def _theirs(self, layer, part):
        names = {ours: theirs for theirs, ours in NAMES.items()}
        names |= {"input_norm": "input_layernorm", "post_norm": "post_attention_layernorm"}
        name = f"layers.{layer}.{names[part]}.weight"
        return name, (self._weights[name],)

    def _found(self, name, shape):
        assert self._weights[name].shape == shape
        return self._weights[name].detach().clone()


class Oracle:
    """transformers' model, whose linears add B(A x) where `first` and what follows it stands."""

    def __init__(self, llama, ranks) -> None:
        self.llama, self.ranks = llama, ranks
        self.first: int | None = None

    def logits(self, tokens, first, rows=None):
        """[T, V] of the whole sequence; `rows` [N, H] take the places from `first` on."""
        self.first = first
        with torch.no_grad():
            x_TH = self.llama.model.embed_tokens(torch.tensor(tokens))
            if rows is not None:
                x_TH[first : first + len(rows)] = rows
            hooks = [
                self.llama.get_submodule(f"model.layers.{layer}.{theirs}").register_forward_hook(
                    partial(self._add, layer, ours)
                )
                for layer in range(SIZES["num_layers"])
                for theirs, ours in NAMES.items()
            ]
            try:
                return self.llama(inputs_embeds=x_TH[None]).logits[0]
            finally:
                for hook in hooks:
                    hook.remove()

    def _add(self, layer, name, linear, inputs, output):
        if self.ranks is None or self.first is None or not getattr(self.ranks, name):
            return output
        a_RI, b_OR = low_rank(layer, name, self.ranks, linear.in_features, linear.out_features)
        added_1TO = functional.linear(functional.linear(inputs[0], a_RI), b_OR)
        added_1TO[:, : self.first] = 0
        return output + added_1TO

    def greedy(self, tokens, first, rows, count):
        tokens = list(tokens)
        for _ in range(count):
            tokens.append(int(self.logits(tokens, first, rows)[-1].argmax()))
        return tokens[-count:]


def decoder_of(llama, ranks, kernels="reference"):
    return Decoder(config(ranks), LlamaSource(llama, ranks), select_kernels(kernels, CPU, torch.float32))


def picture(seed=1):
    return torch.randn(ROWS, SIZES["hidden_size"], generator=torch.Generator().manual_seed(seed)) * 0.3


def tokens_of(seed, count):
    return torch.randint(1, 97, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def pieces_in(slot, rows, first, start, end):
    """The part of a picture's rows, which begin at `first`, that lies in [start, end)."""
    low, high = max(first, start), min(first + len(rows), end)
    return (SpanPiece(slot, low, high - low, rows, low - first),) if low < high else ()


TEXT, SEEN = tokens_of(1, 20), tokens_of(2, 24)
FIRST = 7  # row of SEEN's picture


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("ranks", [RANKS, SOME])
@pytest.mark.parametrize(
    "chunks", [(24,), (7, 17), (4, 6, 14), (8, 1, 1, 14), (3,) * 8], ids=lambda c: "-".join(map(str, c))
)
def test_a_prompt_in_chunks_has_the_oracles_logits(llama, kernels, ranks, chunks):
    rows, start = picture(), 0
    want = Oracle(llama, ranks).logits(SEEN, FIRST, rows)
    assert (want - Oracle(llama, None).logits(SEEN, FIRST, rows))[FIRST:].abs().amax(1).min() > 0.1
    with Host(decoder_of(llama, ranks, kernels)) as host:
        host.admit(0, SEEN, gated_from=FIRST)
        for count in chunks:
            pieces = pieces_in(0, rows, FIRST, start, start + count)
            (found,) = host.step_logits((0, count), pieces=pieces)
            torch.testing.assert_close(found, want[start : start + count], atol=2e-4, rtol=2e-4)
            start += count


@pytest.mark.parametrize("kernels", KERNELS)
def test_decodes_go_on_behind_the_picture_beside_others(llama, kernels):
    """Two that see, at other places, and one that does not, in the same steps: each draws its own tokens."""
    rows, other = picture(), picture(9)
    oracle = Oracle(llama, RANKS)
    shorter = SEEN[:15]
    want = [
        oracle.greedy(SEEN, FIRST, rows, 8),
        oracle.greedy(TEXT, None, None, 8),
        oracle.greedy(shorter, 0, other, 8),
    ]
    assert want[0] != Oracle(llama, None).greedy(SEEN, FIRST, rows, 8)
    with Host(decoder_of(llama, RANKS, kernels)) as host:
        host.admit(0, SEEN, gated_from=FIRST)
        host.admit(1, TEXT)
        host.admit(2, shorter, gated_from=0)
        host.step(
            (0, 10), (1, 20), (2, 9), pieces=(*pieces_in(0, rows, 7, 0, 10), *pieces_in(2, other, 0, 0, 9))
        )
        futures = [host.submit((0, 14), (1, 1), (2, 6), pieces=pieces_in(0, rows, 7, 10, 24))]
        futures += [host.submit((0, 1), (1, 1), (2, 1)) for _ in range(7)]  # none waits for the one before
        drawn = [[s.token_id for s in future.result(180).sampled] for future in futures]
    found = [list(tokens) for tokens in zip(*drawn, strict=True)]
    assert found[0] == want[0]
    assert found[2] == want[2]
    assert found[1][:7] == want[1][1:]


@pytest.mark.parametrize("kernels", KERNELS)
def test_text_beside_a_picture_is_computed_as_without_an_adapter(llama, kernels):
    """To the bit."""
    found = []
    for ranks in (None, RANKS):
        with Host(decoder_of(llama, ranks, kernels)) as host:
            host.admit(0, TEXT)
            host.admit(1, SEEN, gated_from=FIRST)
            logits = [host.step_logits((0, 20), (1, 24), pieces=pieces_in(1, picture(), FIRST, 0, 24))]
            logits += [host.step_logits((0, 1), (1, 1)) for _ in range(4)]
            found.append(logits)
    for plain, adapted in zip(*found, strict=True):
        assert torch.equal(plain[0], adapted[0])
    assert torch.equal(found[0][0][1][:FIRST], found[1][0][1][:FIRST])  # what comes before a picture as well
    assert not torch.allclose(found[0][0][1][FIRST:], found[1][0][1][FIRST:], atol=0.1)


def test_steps_of_text_alone_know_nothing_of_an_adapter(llama):
    """No gate at all: they take every path that they take without one."""
    with Host(decoder_of(llama, RANKS)) as host:
        seen = []
        inner = host.model.inner.forward
        host.model.inner.forward = lambda *args: (seen.append(args[4].gate_T1), inner(*args))[1]
        host.admit(0, TEXT)
        host.admit(1, SEEN, gated_from=FIRST)
        host.step((0, 20), (1, FIRST))
        host.step((0, 1))
        host.step((0, 1), (1, 1), pieces=pieces_in(1, picture(), FIRST, 7, 8))
    assert seen[0] is None
    assert seen[1] is None
    assert seen[2].tolist() == [[0.0], [1.0]]


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_cached_picture_is_still_one_that_was_seen(llama, kernels):
    """Blocks of another sequence hold the picture, and a recomputed one starts with tokens it had drawn."""
    rows, oracle = picture(), Oracle(llama, RANKS)
    want = oracle.greedy(SEEN, FIRST, rows, 6)
    with Host(decoder_of(llama, RANKS, kernels)) as host:
        blocks = [host.free.pop() for _ in range(6)]
        host.admit(0, SEEN, block_ids=blocks, gated_from=FIRST)
        host.step((0, 24), pieces=pieces_in(0, rows, FIRST, 0, 24))
        host.admit(1, SEEN, block_ids=blocks[:5], num_computed=20, gated_from=FIRST)
        assert host.generate(1, 6) == want
        host.release(1)
        resumed = [*SEEN, *want[:3]]
        host.admit(1, resumed, num_prompt=24, gated_from=FIRST)
        assert host.step((1, 27), pieces=pieces_in(1, rows, FIRST, 0, 27)).sampled[0].token_id == want[3]
        host.admit(2, TEXT)  # of a slot that no other text had, then of one that a picture had
        host.release(1)
        host.step((2, 20))
        host.admit(1, TEXT)
        text = oracle.logits(TEXT, None)
        torch.testing.assert_close(host.step_logits((1, 20))[0], text, atol=2e-4, rtol=2e-4)


def _recorded(run):
    """As a graph: computes again into the same memory, whatever the inputs hold by then."""
    result = run()
    return lambda: result.copy_(run()), result


@pytest.mark.parametrize("make", [PaddedPasses, partial(CapturedPasses, record=_recorded)])
def test_padded_passes_carry_the_gate(llama, make):
    rows, oracle = picture(), Oracle(llama, RANKS)
    want, text = oracle.logits(SEEN, FIRST, rows), oracle.logits(TEXT, None)
    decoder = decoder_of(llama, RANKS)
    with Host(decoder, GraphAttention()) as host:
        runner = host.runner
        passes = make(decoder, GraphAttention(), host.kv, runner.table, max_tokens=64)
        found = []
        run = passes.run
        passes.run = lambda *args: (found.append(run(*args).clone()), found[-1])[1]
        runner._passes = passes
        host.admit(0, SEEN, gated_from=FIRST)
        host.admit(1, TEXT)
        host.step((0, 12), (1, 11), pieces=pieces_in(0, rows, FIRST, 0, 12))
        host.step((0, 12), pieces=pieces_in(0, rows, FIRST, 12, 24))
        host.step((1, 9))
    logits = [decoder.logits(hidden) for hidden in found]
    close = partial(torch.testing.assert_close, atol=2e-4, rtol=2e-4)
    close(logits[0][:12], want[:12])
    close(logits[0][12:], text[:11])
    close(logits[1], want[12:])
    close(logits[2], text[11:])


class GraphAttention(BatchedAttention):
    """Takes lengths from the device's tensors, as steps in graphs have them."""

    def attend(self, q_TND, k_TGD, v_TGD, kv, layer, metadata):
        starts, lengths = metadata.query_starts.tolist(), metadata.sequence_lengths.tolist()
        count, out_TND = sum(map(bool, lengths)), torch.zeros_like(q_TND)
        end = starts[count]
        if not count:
            return out_TND
        used = dataclasses.replace(
            metadata,
            host_query_starts=tuple(starts[: count + 1]),
            host_sequence_lengths=tuple(lengths[:count]),
            block_tables=metadata.block_tables[:count],
            slot_mapping=metadata.slot_mapping[:end],
            padded=False,
        )
        out_TND[:end] = super().attend(q_TND[:end], k_TGD[:end], v_TGD[:end], kv, layer, used)
        return out_TND


def test_the_gate_of_decode_graphs_comes_from_the_table(llama):
    with Host(decoder_of(llama, RANKS)) as host:
        host.admit(3, SEEN, gated_from=FIRST)
        host.admit(5, TEXT)
        host.step((3, 24), (5, 20), pieces=pieces_in(3, picture(), FIRST, 0, 24))
        table = host.runner.table
        slots, indices = torch.tensor([3, 5, 3, 3]), torch.tensor([24, 20, 6, 7])
        assert table.gate(slots, indices).flatten().tolist() == [1, 0, 0, 1]


@pytest.mark.parametrize("kernels", KERNELS)
def test_ranks_add_up_to_the_whole(llama, kernels):
    """Two ranks, the KV heads one each: what is cut by inputs and what by outputs, of A and of B."""
    rows, meeting = picture(), Meeting(2)
    want = Oracle(llama, RANKS).logits(SEEN, FIRST, rows)

    def rank_logits(rank):
        torch.set_num_threads(1)
        weights = ShardedWeights(LlamaSource(llama, RANKS), config(RANKS), rank, 2)
        share = shard_config(config(RANKS), 2)
        chosen = select_kernels(kernels, CPU, torch.float32)
        with Host(Decoder(share, weights, chosen, meeting.of(rank))) as host:
            host.admit(0, SEEN, gated_from=FIRST)
            first = host.step_logits((0, 10), pieces=pieces_in(0, rows, FIRST, 0, 10))
            return torch.cat([*first, *host.step_logits((0, 14), pieces=pieces_in(0, rows, FIRST, 10, 24))])

    with ThreadPoolExecutor(2) as threads:
        for found in threads.map(rank_logits, range(2)):
            torch.testing.assert_close(found, want, atol=2e-4, rtol=2e-4)


class Meeting:
    """Ranks that are threads of one process."""

    def __init__(self, size):
        self.size, self.barrier, self.parts = size, threading.Barrier(size, timeout=60), [None] * size

    def of(self, rank):
        return MeetingRank(self, rank)


class MeetingRank(OneRank):
    def __init__(self, meeting, rank):
        super().__init__(meeting.size)
        self.meeting, self.rank = meeting, rank

    def add_up(self, part):
        meeting = self.meeting
        meeting.parts[self.rank] = part
        meeting.barrier.wait()
        total = sum(meeting.parts)
        meeting.barrier.wait()
        return total
