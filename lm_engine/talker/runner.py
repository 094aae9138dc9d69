"""Executes the talker's plans on the device: whole frames, all code groups, inside one step.

Shapes: T tokens of a step, S sequences of it that sample, W width of an input row, Q code groups, V codes.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from contracts.params import SamplingParams
from lm_engine.devices import device_thread
from lm_engine.host_copies import HostCopies
from lm_engine.model import PagedKV
from lm_engine.random import signed_seed
from lm_engine.request_table import RequestTable, SampledRows, StepInputs
from lm_engine.row_sampler import RowSampler, needs_of
from lm_engine.sampler import RowParams, sample
from lm_engine.talker.model import Draw, TalkerModel
from lm_engine.talker.plan import FramesDrawn, TalkerPlan

_GROUP_SEED = 0x2545F4914F6CDD1D  # odd: groups of one frame draw from different streams


@dataclass(frozen=True)
class _Launched:
    step_id: int
    results: tuple[Tensor, ...]  # codes [S, Q], valid [S]; none when nothing samples
    done: torch.cuda.Event | None


class TalkerRunner:
    """Owns the request table and each slot's last frame; borrows model and KV cache.

    As the LM's runner: `submit` never blocks, steps run in order, each on what the one before left on the
    device, and a step that raises fails its own future only.
    """

    def __init__(self, model: TalkerModel, kv: PagedKV, *, max_sequences: int, max_length: int) -> None:
        config = model.config
        self.model, self.kv = model, kv
        self.table = RequestTable(
            vocab_size=config.decoder.vocab_size,
            num_axes=config.decoder.num_position_axes,
            max_sequences=max_sequences,
            max_length=max_length,
            block_size=kv.block_size,
            device=model.device,
        )
        model.reserve(max_sequences)
        frames = (max_sequences, config.num_code_groups)
        self._last_frame = torch.zeros(frames, dtype=torch.int64, device=model.device)
        self._suppressed_V = torch.zeros(config.decoder.vocab_size, device=model.device)
        self._suppressed_V[list(config.suppressed_codes)] = -torch.inf
        self._sample_first = RowSampler(self.table)
        self._copies = HostCopies(model.device)
        self._launcher = device_thread(model.device, "talker-launch")
        self._collector = device_thread(model.device, "talker-collect")

    def rows(self, make: Callable[[], Tensor]) -> Future[Tensor]:
        return self._launcher.submit(_inferring, make)

    def submit(self, plan: TalkerPlan) -> Future[FramesDrawn]:
        launched = self._launcher.submit(self._launch, plan)
        return self._collector.submit(lambda: _collect(launched.result()))

    def close(self) -> None:
        """Finishes what was submitted, then ends both threads."""
        self._launcher.shutdown()
        self._collector.shutdown()

    @torch.inference_mode()
    def _launch(self, plan: TalkerPlan) -> _Launched:
        self.table.turn_over(plan.released_slots, plan.admissions)
        self.table.write_admissions(plan.admissions)
        self.table.append_blocks(plan.admissions, plan.sequences)
        inputs = self.table.step_inputs(plan.sequences)
        hidden_TH = self.model.forward(
            self._input_rows(plan), inputs.positions_AT, self.kv, self.model.attention, inputs.metadata
        )
        if not inputs.host_slots_S:
            return _Launched(plan.step_id, (), None)
        codes_SQ, valid_S = self._draw_frames(inputs, hidden_TH[inputs.last_rows_S])
        self._last_frame[inputs.slots_S] = codes_SQ
        self.table.write_sampled(inputs, codes_SQ[:, 0])
        results, done = self._copies.start(codes_SQ, valid_S)
        return _Launched(plan.step_id, results, done)

    def _input_rows(self, plan: TalkerPlan) -> Tensor:
        """[T, W]: what arrived, plus the last frame where the step feeds it back."""
        pieces = [piece.rows.result()[piece.start : piece.start + piece.length] for piece in plan.pieces]
        rows_TW = torch.cat(pieces)
        if not any(plan.feedback):
            return rows_TW
        counts = np.array([step.num_tokens for step in plan.sequences], dtype=np.int64)
        fed = np.array(plan.feedback)
        at = (counts.cumsum() - counts)[fed]
        slots = np.array([step.slot for step in plan.sequences], dtype=np.int64)[fed]
        at_R, slots_R = self.table.to_device(np.stack([at, slots])).unbind(0)
        return rows_TW.index_add_(0, at_R, self.model.frame_rows(self._last_frame[slots_R]))

    def _draw_frames(self, inputs: StepInputs, hidden_SH: Tensor) -> tuple[Tensor, Tensor]:
        """Codes [S, Q], and whether all their logits were finite [S]."""
        first = self._sample_first(inputs, self.model.logits(hidden_SH) + self._suppressed_V)
        valid = [first.valid_R]
        draw = self._residual_draw(inputs, valid)
        codes_SQ = self.model.complete(hidden_SH, first.token_R, draw)
        return codes_SQ, torch.stack(valid).all(dim=0)

    def _residual_draw(self, inputs: SampledRows, valid: list[Tensor]) -> Draw:
        """Draws of the other groups; appends to `valid`."""
        residual: SamplingParams = self.model.config.residual
        sampling = [self.table.rows[slot].sampling for slot in inputs.host_slots_S]
        needs = needs_of([residual for one in sampling if not one.greedy])
        greedy_S = self.table.floats[inputs.slots_S, 0] == 0
        seed_S, top_k_S = self.table.seed[inputs.slots_S], torch.full_like(inputs.slots_S, residual.top_k)
        ones_S = torch.ones_like(greedy_S, dtype=torch.float32)

        def draw(logits_SV: Tensor, group: int) -> Tensor:
            params = RowParams(
                temperature_R=torch.where(greedy_S, 0.0, ones_S * residual.temperature),
                top_p_R=ones_S * residual.top_p,
                min_p_R=ones_S * residual.min_p,
                top_k_R=top_k_S,
                seed_R=seed_S + signed_seed(group * _GROUP_SEED),
                position_R=inputs.next_index_S,
            )
            sampled = sample(logits_SV, params, needs)
            valid.append(sampled.valid_R)
            return sampled.token_R

        return draw


@torch.inference_mode()
def _inferring(make: Callable[[], Tensor]) -> Tensor:
    return make()


def _collect(launched: _Launched) -> FramesDrawn:
    if not launched.results:
        return FramesDrawn(launched.step_id, (), ())
    if launched.done is not None:
        launched.done.synchronize()
    codes_SQ, valid_S = launched.results
    frames = tuple(tuple(frame) for frame in codes_SQ.tolist())
    return FramesDrawn(launched.step_id, frames, tuple(valid_S.tolist()))
