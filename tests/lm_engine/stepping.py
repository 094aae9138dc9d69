"""A scheduler of few lines that drives a real Runner, and a decoder wrapper that records all logits."""

from __future__ import annotations

import random
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from contracts.params import SamplingParams
from lm_engine.decoder import Decoder
from lm_engine.memory import allocate_kv
from lm_engine.plan import Admission, SequenceStep, SpanPiece, StepPlan, StepResult
from lm_engine.runner import Runner

TIMEOUT_S = 180


class Recorder:
    """A DecoderModel that keeps the logits of every token of every step."""

    def __init__(self, decoder: Decoder) -> None:
        self.inner = decoder
        self.config, self.dtype, self.device = decoder.config, decoder.dtype, decoder.device
        self.attention = decoder.attention
        self.logits_TV: list[Tensor] = []
        self.fail_next = False
        self.poison_rows: list[int] = []  # sampling rows whose logits become NaN

    def embed(self, token_ids_T):
        return self.inner.embed(token_ids_T)

    def forward(self, *args):
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("the device is on fire")
        hidden_TH = self.inner.forward(*args)
        self.logits_TV.append(self.inner.logits(hidden_TH))
        return hidden_TH

    def logits(self, hidden_RH):
        logits_RV = self.inner.logits(hidden_RH)
        if self.poison_rows:
            logits_RV[self.poison_rows] = torch.nan
        return logits_RV


@dataclass
class Sequence:
    num_known: int
    num_computed: int = 0
    num_blocks: int = 0


def greedy(**more) -> SamplingParams:
    return SamplingParams(temperature=0.0, **more)


class Host:
    """Blocks are handed out in a shuffled order, so that nothing works by their being adjacent."""

    def __init__(
        self,
        decoder,
        attention=None,
        *,
        block_size=4,
        num_blocks=160,
        max_sequences=8,
        max_length=128,
        cuda_graphs=True,
        kv_dtype="auto",
        own_stream=False,
    ) -> None:
        config = decoder.config
        self.model = Recorder(decoder)
        self.kv = allocate_kv(config, num_blocks, block_size, decoder.dtype, decoder.device, kv_dtype)
        self.runner = Runner(
            self.model,
            attention or decoder.attention,
            self.kv,
            max_sequences=max_sequences,
            max_length=max_length,
            cuda_graphs=cuda_graphs,
            own_stream=own_stream,
        )
        self.free = list(range(1, num_blocks))
        random.Random(3).shuffle(self.free)
        self.sequences: dict[int, Sequence] = {}
        self.admissions: list[Admission] = []
        self.released: list[int] = []
        self.copies: list[tuple[int, int]] = []
        self.step_id = 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.runner.close()

    def admit(
        self,
        slot,
        token_ids,
        *,
        sampling=None,
        positions=None,
        delta=0,
        seed=0,
        num_prompt=None,
        block_ids=(),
        num_computed=0,
        stop_token_ids=(),
        gated_from=None,
    ) -> None:
        num_prompt = len(token_ids) if num_prompt is None else num_prompt
        if positions is None:
            axes = self.model.config.num_position_axes
            positions = np.broadcast_to(np.arange(num_prompt), (axes, num_prompt))
        self.admissions.append(
            Admission(
                slot,
                list(token_ids),
                num_prompt,
                np.asarray(positions),
                delta,
                sampling or greedy(),
                seed,
                tuple(block_ids),
                stop_token_ids,
                gated_from,
            )
        )
        self.sequences[slot] = Sequence(len(token_ids), num_computed, len(block_ids))

    def release(self, slot) -> None:
        self.released.append(slot)
        del self.sequences[slot]

    def submit(self, *steps: tuple[int, int], pieces: tuple[SpanPiece, ...] = ()) -> Future[StepResult]:
        """Each step: (slot, number of tokens)."""
        plan = StepPlan(
            self.step_id,
            tuple(self.released),
            tuple(self.admissions),
            tuple(self.copies),
            tuple(self._sequence_step(slot, count) for slot, count in steps),
            tuple(pieces),
        )
        self.step_id += 1
        self.released, self.admissions, self.copies = [], [], []
        return self.runner.submit(plan)

    def step(self, *steps, pieces=()) -> StepResult:
        return self.submit(*steps, pieces=pieces).result(TIMEOUT_S)

    def step_logits(self, *steps, pieces=()) -> list[Tensor]:
        """Every token's logits, per sequence."""
        self.step(*steps, pieces=pieces)
        return list(self.model.logits_TV[-1].split([count for _, count in steps]))

    def generate(self, slot, num_tokens) -> list[int]:
        """Prefills what is left and decodes, alone."""
        sequence, drawn = self.sequences[slot], []
        while len(drawn) < num_tokens:
            result = self.step((slot, sequence.num_known - sequence.num_computed))
            drawn.append(result.sampled[0].token_id)
        return drawn

    def _sequence_step(self, slot, count) -> SequenceStep:
        sequence = self.sequences[slot]
        start = sequence.num_computed
        sequence.num_computed += count
        needed = -(-sequence.num_computed // self.kv.block_size) - sequence.num_blocks
        sequence.num_blocks += max(needed, 0)
        samples = sequence.num_computed == sequence.num_known
        sequence.num_known += samples
        return SequenceStep(slot, start, count, tuple(self.free.pop() for _ in range(needed)), samples)
