"""What Triton kernels do with the request table against what torch's operations do, on the GPU if there is
one, else in Triton's interpreter. Collected through test_triton_steps.py."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
import torch

import lm_engine.triton.table
from contracts.params import SamplingParams
from lm_engine.decoder import Decoder
from lm_engine.model import AdapterRanks, RopeConfig
from lm_engine.passes import PaddedInputs, PaddedPasses, PassShape
from lm_engine.plan import Admission, SequenceStep
from lm_engine.request_table import RequestTable
from lm_engine.table_kernels import place_rows
from lm_engine.triton.kernels import TritonKernels
from lm_engine.triton.table import TritonTable
from tests.lm_engine.random_decoder import RandomSource, tiny_config
from tests.lm_engine.stepping import Host, greedy

torch.set_num_threads(1)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCABULARY, BLOCK_SIZE, MAX_LENGTH = 50, 4, 700
MROPE = RopeConfig(1e4, tuple(1e4 ** (-p / 8) for p in range(8)), mrope_section=(4, 2, 2))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """So that rows and tables take several."""
    monkeypatch.setattr(lm_engine.triton.table, "_ROW_BLOCK", 128)
    monkeypatch.setattr(lm_engine.triton.table, "_TABLE_BLOCK", 32)


class TorchTable(RequestTable):
    """By torch's operations, on a CPU too."""

    gather_on_host = RequestTable.gather_on_device


def two_tables(num_axes: int, gated: bool) -> tuple[RequestTable, RequestTable]:
    size = {"vocab_size": VOCABULARY, "num_axes": num_axes, "max_sequences": 12, "max_length": MAX_LENGTH}
    more = {"block_size": BLOCK_SIZE, "device": DEVICE, "gated": gated}
    return TorchTable(**size, **more), RequestTable(**size, **more, kernels=TritonTable())


def state_of(table: RequestTable | PaddedInputs) -> dict[str, torch.Tensor]:
    return {name: value for name, value in vars(table).items() if isinstance(value, torch.Tensor)}


def assert_same_state(plain: RequestTable, ours: RequestTable) -> None:
    expected, found = state_of(plain), state_of(ours)
    assert len(expected) >= 8
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    assert ours.rows == plain.rows


def assert_same_inputs(expected: object, found: object) -> None:
    for field in dataclasses.fields(expected):
        wanted, got = getattr(expected, field.name), getattr(found, field.name)
        if dataclasses.is_dataclass(wanted):
            assert_same_inputs(wanted, got)
        elif isinstance(wanted, torch.Tensor):
            assert got.dtype == wanted.dtype, field.name
            assert torch.equal(got, wanted), field.name
            assert got.data_ptr() % 16 == 0, f"{field.name}: kernels would be compiled anew"
        else:
            assert got == wanted, field.name


class Plans:
    """Random plans: sequences come, bring some of their blocks, compute their prompts in chunks, draw, go."""

    def __init__(self, seed: int, num_axes: int, gated: bool) -> None:
        self.random, self.rng = random.Random(seed), np.random.default_rng(seed)
        self.num_axes, self.gated = num_axes, gated
        self.known: dict[int, list[int]] = {}  # slot → tokens known, computed, blocks

    def admit(self) -> list[Admission]:
        free = [slot for slot in range(12) if slot not in self.known]
        return [self._admission(slot) for slot in free[: self.random.randrange(4)]]

    def _admission(self, slot: int) -> Admission:
        length = self.random.choice((1, 3, 40, 129, 300, 600))
        num_prompt = self.random.randint(max(1, length - 5), length)
        kind = self.random.choice((np.int64, np.int32, np.float32, np.float64))
        positions = self.rng.random((self.num_axes, num_prompt)) * 500
        cached = self.random.randrange(length) // BLOCK_SIZE  # blocks of a prefix that is there
        num_blocks = cached + self.random.randrange(3)
        self.known[slot] = [length, cached * BLOCK_SIZE, num_blocks]
        positions = positions.astype(kind)
        if self.random.random() < 0.3:  # as those of text
            positions = np.broadcast_to(np.arange(num_prompt), (self.num_axes, num_prompt))
        return Admission(
            slot,
            self.rng.integers(0, VOCABULARY, length).tolist(),
            num_prompt,
            positions,
            self.random.choice((0, 2, -1.5)),
            SamplingParams(
                temperature=self.random.random(),
                top_p=0.9,
                min_p=0.05,
                top_k=self.random.choice((0, 2**40)),
                presence_penalty=0.2,
                frequency_penalty=-0.3,
                repetition_penalty=1.1,
            ),
            self.random.choice((7, 2**63 + 5, -1, 2**31)),
            tuple(self.random.sample(range(1, 10**6), num_blocks)),
            (),
            self.random.choice((None, 0, length // 2)) if self.gated else None,
        )

    def steps(self) -> list[SequenceStep]:
        chosen = self.random.sample(sorted(self.known), self.random.randint(1, len(self.known)))
        return [self._step(slot) for slot in chosen]

    def _step(self, slot: int) -> SequenceStep:
        known, computed, num_blocks = self.known[slot]
        count = known - computed
        if self.random.random() < 0.4:
            count = self.random.randint(1, count)
        end = computed + count
        needed = max(0, -(-end // BLOCK_SIZE) - num_blocks)
        samples = end == known
        self.known[slot] = [known + samples, end, num_blocks + needed]
        return SequenceStep(
            slot, computed, count, tuple(self.random.sample(range(1, 10**6), needed)), samples
        )

    def release(self) -> list[int]:
        return [
            slot for slot, (known, *_) in self.known.items() if known > 650 or self.random.random() < 0.15
        ]


@pytest.mark.parametrize("num_axes", [1, 3])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_a_table_of_kernels_is_one_of_torch(num_axes, gated, seed):
    """Prompts in chunks, decodes, prefixes that are there, new blocks: state and inputs after every plan."""
    plain, ours = two_tables(num_axes, gated)
    plans, rows_seen = Plans(seed, num_axes, gated), 0
    for turn in range(8):
        released = plans.release()
        for slot in released:
            del plans.known[slot]
        admissions = plans.admit()
        steps = plans.steps() if plans.known else []
        found = []
        for table in (plain, ours):
            table.turn_over(released, admissions)
            table.write(admissions, steps)
            found.append(table.step_inputs(steps) if steps else None)
        assert_same_state(plain, ours)
        if not steps:
            continue
        assert_same_inputs(*found)
        rows_seen += len(steps)
        tokens_S2 = torch.arange(2 * len(found[0].host_slots_S), device=DEVICE).view(-1, 2) % VOCABULARY
        for table, inputs in zip((plain, ours), found, strict=True):
            table.write_sampled(inputs, tokens_S2[:, turn % 2])
        assert_same_state(plain, ours)
    assert rows_seen > 10


def test_rehearsing_changes_nothing():
    plain, ours = two_tables(3, True)
    plans = Plans(0, 3, True)
    admissions = [plans._admission(slot) for slot in range(12)]
    for table in (plain, ours):
        table.turn_over((), admissions)
        table.write(admissions, ())
        table.rehearse()
    assert_same_state(plain, ours)


def test_a_plan_that_is_wrong_writes_nothing():
    _, ours = two_tables(1, False)
    plans = Plans(1, 1, False)
    good, bad = plans._admission(0), dataclasses.replace(plans._admission(1), token_ids=[VOCABULARY])
    before = {name: value.clone() for name, value in state_of(ours).items()}
    with pytest.raises(AssertionError):
        ours.write([good, bad], ())
    assert all(torch.equal(value, before[name]) for name, value in state_of(ours).items())


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("num_tokens", "counts"), [(16, (5, 9)), (640, (300, 130))])
def test_padding_is_that_of_torch(gated, num_tokens, counts):
    """After a longer step in the same buffers; more tokens than rows of the table and about as many."""
    adapter = AdapterRanks(q=2) if gated else None
    config = tiny_config(head_dim=16, rope=MROPE, picture_adapter=adapter)
    model = Decoder(config, RandomSource(device=DEVICE), TritonKernels(DEVICE))
    tables = two_tables(3, gated)
    buffers = [PaddedInputs(model, table, 640, config.hidden_size, torch.float32) for table in tables]
    slots, rng = (4, 1), np.random.default_rng(0)
    admissions = [
        Admission(
            slot,
            rng.integers(0, VOCABULARY, count + 1).tolist(),
            count,
            rng.random((3, count)),
            2,
            SamplingParams(),
            0,
            tuple(range(slot, slot + 2 + count // BLOCK_SIZE)),
            gated_from=2 if gated else None,
        )
        for slot, count in zip(slots, counts, strict=True)
    ]
    for table in tables:
        table.turn_over((), admissions)
        table.write(admissions, ())
    prompts = [SequenceStep(s, 0, n, (), False) for s, n in zip(slots, counts, strict=True)]
    for steps in (prompts, [SequenceStep(1, counts[1], 1, (), True)]):
        for table, padded in zip(tables, buffers, strict=True):
            inputs = table.step_inputs(steps)
            places = torch.arange(1, 1 + len(inputs.token_ids_T), device=DEVICE)
            hidden_TH = places[:, None].expand(-1, config.hidden_size).float()
            padded.write(hidden_TH, inputs.positions_AT, inputs.metadata, num_tokens)
        expected, found = map(state_of, buffers)
        assert expected.keys() == found.keys()
        assert len(expected) == 6 + gated
        for name, value in expected.items():
            assert torch.equal(found[name], value), name
    for padded in buffers:
        padded.clear(PassShape(num_tokens, MAX_LENGTH, gated))
        assert not padded.hidden_TH[:num_tokens].any()
        assert not padded.slots_T[:num_tokens].any()
        assert not padded.starts_R.any()
        assert not padded.lengths_R.any()


@pytest.mark.parametrize(("gated", "passes"), [(True, None), (False, PaddedPasses)])
def test_a_runner_draws_the_same_with_a_table_of_kernels(gated, passes):
    config = tiny_config(
        head_dim=16, rope=MROPE, picture_adapter=AdapterRanks(q=2, down=3) if gated else None
    )
    decoder = Decoder(config, RandomSource(device=DEVICE), TritonKernels(DEVICE))
    drawn = []
    for kernels in (None, TritonTable()):
        with Host(decoder, block_size=16, max_length=128, max_sequences=4, cuda_graphs=False) as host:
            runner = host.runner
            runner.table.kernels = kernels
            if passes is not None:
                runner._passes = passes(decoder, decoder.attention, host.kv, runner.table)
            results = []
            for slot, length in enumerate((6, 3, 20)):
                gate = 2 if gated and slot != 1 else None
                host.admit(
                    slot, list(range(1, length + 1)), delta=slot, gated_from=gate, sampling=greedy(logprobs=1)
                )
            results.append(host.step((0, 6), (1, 3), (2, 7)))
            results.append(host.step((1, 1), (2, 13), (0, 1)))
            host.release(1)
            host.admit(3, [5, 6, 7], sampling=SamplingParams(temperature=0.8, top_k=5), seed=2**63 + 9)
            results.append(host.step((3, 3), (2, 1), (0, 1)))
            results.append(host.step((3, 1), (2, 1)))
            drawn.append([(s.slot, s.token_id) for r in results for s in r.sampled])
    assert drawn[0] == drawn[1]
    assert len(drawn[0]) == 10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("levels", [0, 2])
def test_embeddings_are_put_into_their_spans(dtype, levels):
    """Of several pictures, one without deepstack features and one from its middle on; one so that a row does
    not begin at 16 bytes, which is left to torch."""
    _, table = two_tables(1, gated=False)
    width, generator = 24, torch.Generator().manual_seed(3)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE, dtype)

    whole = (1 + levels) * width
    pieces = [(1, normal(5, whole)), (8, normal(9, whole)[4:7]), (12, normal(2, width))]
    for more in ([], [(15, normal(1 + whole)[1:].view(1, whole))]):
        found = []
        for place in (place_rows, lambda *step: table.kernels.place(table, *step)):
            hidden_TH = torch.arange(16 * width, device=DEVICE).view(16, width).to(dtype)
            deepstack_KTH = hidden_TH.new_zeros(levels, 16, width) if levels else None
            place([*pieces, *more], hidden_TH, deepstack_KTH)
            found.append((hidden_TH, deepstack_KTH))
        (hidden_TH, deepstack_KTH), (ours_TH, our_deepstack_KTH) = found
        assert torch.equal(ours_TH, hidden_TH)
        assert torch.equal(ours_TH[1:6], pieces[0][1][:, :width])
        if levels:
            assert torch.equal(our_deepstack_KTH, deepstack_KTH)
            assert not our_deepstack_KTH[:, 12:14].any()
