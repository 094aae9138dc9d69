"""A step's inputs are the same made by NumPy in the host's memory as by torch's operations, which devices
use; and from when on a row's draws need nothing of their own."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from contracts.params import SamplingParams
from lm_engine.plan import Admission, SequenceStep
from lm_engine.request_table import HostStep, RequestTable

LENGTHS = (5, 9, 3)


@pytest.fixture(params=[1, 3], ids=["one axis", "three axes"])
def table(request) -> RequestTable:
    made = RequestTable(
        vocab_size=50,
        num_axes=request.param,
        max_sequences=4,
        max_length=16,
        block_size=4,
        device=torch.device("cpu"),
    )
    rng = np.random.default_rng(0)
    admissions = [
        Admission(
            slot=3 - i,
            token_ids=rng.integers(0, 50, length).tolist(),
            num_prompt_tokens=length - 1,  # the last token was generated before
            positions_AL=rng.random((request.param, length - 1)) * 9,
            position_delta=2.5 * i,
            sampling=SamplingParams(),
            seed=i,
            block_ids=tuple(range(1 + 4 * i, 4 + 4 * i)),
        )
        for i, length in enumerate(LENGTHS)
    ]
    made.turn_over((), admissions)
    made.write_admissions(admissions)
    made.append_blocks(admissions, ())
    return made


def tensors_of(inputs) -> dict[str, object]:
    fields = {field.name: getattr(inputs, field.name) for field in dataclasses.fields(inputs)}
    metadata = fields.pop("metadata")
    return fields | {field.name: getattr(metadata, field.name) for field in dataclasses.fields(metadata)}


@pytest.mark.parametrize(
    "triples",
    [
        [(3, 0, 5, True), (2, 0, 9, True), (1, 0, 3, True)],
        [(1, 2, 1, True), (3, 4, 1, True)],
        [(2, 3, 4, False), (3, 1, 4, True), (1, 0, 1, False)],
        [(2, 0, 8, False)],
    ],
    ids=["prompts", "decodes", "mixed", "nothing sampled"],
)
def test_both_ways_give_the_same_inputs(table, triples, monkeypatch):
    sequences = [SequenceStep(slot, start, count, (), samples) for slot, start, count, samples in triples]
    ways = {}
    for way in ("gather_on_host", "gather_on_device"):
        monkeypatch.setattr(RequestTable, "gather_on_host", getattr(RequestTable, way))
        ways[way] = tensors_of(table.step_inputs(sequences))
        monkeypatch.undo()
    host, device = ways.values()
    assert host.keys() == device.keys()
    for name, value in device.items():
        if isinstance(value, torch.Tensor):
            assert host[name].dtype == value.dtype, name
            assert torch.equal(host[name], value), name
        else:
            assert host[name] == value, name


def test_the_host_way_is_taken_on_a_cpu(table, monkeypatch):
    taken: list[HostStep] = []
    monkeypatch.setattr(RequestTable, "gather_on_host", lambda self, step: taken.append(step))
    table.step_inputs([SequenceStep(3, 4, 1, (), True)])
    assert [step.starts_R.tolist() for step in taken] == [[4]]


@pytest.mark.parametrize(
    ("sampling", "stops", "plain_from"),
    [
        ({}, (7,), 4),
        ({"temperature": 0.0}, (), 4),
        ({"min_tokens": 5}, (7,), 9),
        ({"min_tokens": 5, "stop_token_ids": (3,)}, (), 9),
        ({"min_tokens": 5, "ignore_eos": True}, (), 4),  # there is no end to be forbidden
        ({"min_tokens": 5, "top_k": 3}, (), None),
        ({"logit_bias": ((1, 2.0),)}, (), None),
    ],
)
def test_draws_are_plain_once_no_end_is_forbidden(table, sampling, stops, plain_from):
    admission = Admission(
        slot=0,
        token_ids=[1, 2, 3, 4],
        num_prompt_tokens=4,
        positions_AL=np.zeros((table.positions.shape[0], 4)),
        position_delta=0,
        sampling=SamplingParams(**sampling),
        seed=0,
        block_ids=(),
        stop_token_ids=stops,
    )
    table.turn_over((), [admission])
    plain = [table.draws_plainly(0, index) for index in range(4, 12)]
    assert plain == [plain_from is not None and index >= plain_from for index in range(4, 12)]
