"""Executes the talker's plans on the device: whole frames, all code groups, inside one step.

Shapes: T tokens of a step, S sequences of it that sample, W width of an input row, Q code groups, V codes.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from contracts.params import SamplingParams
from lm_engine.backlog import Backlog, capture_later
from lm_engine.devices import device_thread
from lm_engine.host_copies import HostCopies
from lm_engine.model import PagedKV
from lm_engine.passes import MixedPasses
from lm_engine.plan import Admission, SequenceStep
from lm_engine.random import signed_seed
from lm_engine.request_table import RequestTable, SampledRows, StepInputs
from lm_engine.row_sampler import RowSampler
from lm_engine.sampler import RowParams, needs_of, sample
from lm_engine.table_kernels import make_table_kernels
from lm_engine.talker.graphs import (
    GROUP_SEED,
    PROMPT_ROWS,
    FrameGraphs,
    draws_in_graphs,
    make_frame_graphs,
    make_prompt_passes,
)
from lm_engine.talker.model import Draw, TalkerModel
from lm_engine.talker.pieces import rows_of
from lm_engine.talker.plan import FramesDrawn, RowPiece, TalkerPlan
from lm_engine.transfer import stream_entry


@dataclass(frozen=True)
class _Launched:
    step_id: int
    results: tuple[Tensor, ...]  # codes and valid, int64 [S, Q + 1]; none when nothing samples
    done: torch.cuda.Event | None


class TalkerRunner:
    """Owns the request table and each slot's last frame; borrows model and KV cache.

    As the LM's runner: `submit` never blocks, steps run in order, each on what the one before left on the
    device, and a step that raises fails its own future only. On a GPU it has a stream of its own, so that
    frames do not take turns with other stages' work.
    """

    def __init__(
        self,
        model: TalkerModel,
        kv: PagedKV,
        *,
        max_sequences: int,
        max_length: int,
        cuda_graphs: bool = True,
    ) -> None:
        """`cuda_graphs`: frames are captured and replayed, where the device and the kernels allow it."""
        config = model.config
        self.model, self.kv = model, kv
        self.table = RequestTable(
            vocab_size=config.decoder.vocab_size,
            num_axes=config.decoder.num_position_axes,
            max_sequences=max_sequences,
            max_length=max_length,
            block_size=kv.block_size,
            device=model.device,
            kernels=make_table_kernels(model.device, model.attention),
        )
        model.reserve(max_sequences)
        frames = (max_sequences + 1, config.num_code_groups)  # the last is scratch, for padding rows
        self._last_frame = torch.zeros(frames, dtype=torch.int64, device=model.device)
        self._suppressed_V = torch.zeros(config.decoder.vocab_size, device=model.device)
        self._suppressed_V[list(config.suppressed_codes)] = -torch.inf
        self._sample_first = RowSampler(self.table)
        self._copies = HostCopies(model.device)
        self._graphs: FrameGraphs | None = None
        if cuda_graphs:
            self._graphs = make_frame_graphs(model, kv, self.table, self._last_frame, self._suppressed_V)
        self._passes: MixedPasses | None = None
        self._backlog: Backlog | None = None
        if self._graphs is not None:
            self._passes = make_prompt_passes(model, kv, self.table)
        enter = stream_entry(model.device)
        self._launcher = ThreadPoolExecutor(1, thread_name_prefix="talker-launch", initializer=enter)
        self._collector = device_thread(model.device, "talker-collect")

    def rows(self, make: Callable[[], Tensor]) -> Future[Tensor]:
        return self._launcher.submit(_inferring, make)

    def submit(self, plan: TalkerPlan) -> Future[FramesDrawn]:
        launched = self._launcher.submit(self._launch, plan)
        return self._collector.submit(lambda: _collect(launched.result()))

    def capture_graphs(self, *, compiled: bool = False) -> int:
        """Captures all graphs now rather than on first use, and rehearses what goes without them; returns
        their number. Blocks for seconds. `compiled`: as the LM's runner takes it."""
        graphs, passes = self._graphs, self._passes
        if graphs is None or passes is None:
            return 0

        def capture() -> int:
            if not compiled:
                graphs.compile_all()
            return graphs.capture_all() + passes.capture_all()

        num_graphs = self._launcher.submit(capture).result()
        self.rehearse()
        return num_graphs

    def capture_between_steps(self) -> bool:
        """As the LM's runner."""
        assert self._backlog is None
        self._backlog = capture_later(self._launcher, self._graphs, self._passes)
        if self._backlog is not None:
            self.rehearse()
        return self._backlog is not None

    def rehearse(self) -> None:
        """Speaks a frame after a prompt of few rows, then after one too long for graphs, to nobody: what a
        device compiles, loads or sets up on first use is not left to a request, whose step all others would
        wait for. Nothing of it remains but in the scratch block."""
        self._launcher.submit(self.table.rehearse).result()
        for num_rows in (PROMPT_ROWS[0], PROMPT_ROWS[-1] + 1):
            for plan in self._rehearsal(min(num_rows, self.table.max_length - 1)):
                self.submit(plan).result()
            self._launcher.submit(self.table.turn_over, (0,), ()).result()

    def _rehearsal(self, num_rows: int) -> list[TalkerPlan]:
        """All of its blocks are the scratch block."""
        table, piece = self.table, RowPiece(self.rows(lambda: self.model.closing_rows()[:1]), 0, 1)
        admission = Admission(
            slot=0,
            token_ids=[0] * num_rows,
            num_prompt_tokens=num_rows,
            positions_AL=np.broadcast_to(np.arange(num_rows), (table.positions.shape[0], num_rows)),
            position_delta=0,
            sampling=SamplingParams(temperature=1.0, top_k=2, repetition_penalty=1.1),
            seed=0,
            block_ids=(0,) * -(-(num_rows + 1) // table.block_size),
        )
        prompt, frame = SequenceStep(0, 0, num_rows, (), True), SequenceStep(0, num_rows, 1, (), True)
        return [
            TalkerPlan(0, (), (admission,), (prompt,), (piece,) * num_rows, (False,)),
            TalkerPlan(1, (), (), (frame,), (piece,), (True,)),
        ]

    def close(self) -> None:
        """Finishes what was submitted, then ends the threads."""
        if self._backlog is not None:
            self._backlog.close()
        self._launcher.shutdown()
        self._collector.shutdown()

    @torch.inference_mode()
    def _launch(self, plan: TalkerPlan) -> _Launched:
        self.table.turn_over(plan.released_slots, plan.admissions)
        self.table.write(plan.admissions, plan.sequences)
        drawn = self._draw_by_graphs(plan) if self._takes(plan) else self._draw_plainly(plan)
        if drawn is None:
            return _Launched(plan.step_id, (), None)
        results, done = self._copies.start(drawn)
        return _Launched(plan.step_id, results, done)

    def _draw_plainly(self, plan: TalkerPlan) -> Tensor | None:
        """[S, Q + 1], or None when nothing samples."""
        inputs = self.table.step_inputs(plan.sequences)
        hidden_SH = self._forward(plan, inputs)
        if not inputs.host_slots_S:
            return None
        codes_SQ, valid_S = self._draw_frames(inputs, hidden_SH)
        self._last_frame[inputs.slots_S] = codes_SQ
        return torch.cat([codes_SQ, valid_S.long()[:, None]], dim=1)

    def _forward(self, plan: TalkerPlan, inputs: StepInputs) -> Tensor:
        """[S, H], of the sequences that sample."""
        rows_TW = self._input_rows(plan)
        if self._passes is not None and self._passes.takes(rows_TW.shape[0], None):
            hidden_TH = self._passes.run(rows_TW, inputs.positions_AT, inputs.metadata)
        else:
            hidden_TH = self.model.forward(
                rows_TW, inputs.positions_AT, self.kv, self.model.attention, inputs.metadata
            )
        return hidden_TH[inputs.last_rows_S]

    def _takes(self, plan: TalkerPlan) -> bool:
        sampling = (self.table.rows[step.slot].sampling for step in plan.sequences if step.samples)
        return self._graphs is not None and all(map(draws_in_graphs, sampling))

    def _draw_by_graphs(self, plan: TalkerPlan) -> Tensor | None:
        """Frames that feed the last one back go whole; of prompts, only what follows their hidden states."""
        assert self._graphs is not None
        frames, prompts = split_plan(plan)
        drawn = []
        if frames.sequences:
            packed_4R = self.table.pack_decodes(frames.sequences)
            drawn.append(self._graphs.frames(packed_4R, rows_of(frames.pieces, self.model.device)))
        if prompts.sequences:
            inputs = self.table.step_inputs(prompts.sequences)
            hidden_SH = self._forward(prompts, inputs)
            if inputs.host_slots_S:
                packed_4S = np.zeros((4, len(inputs.host_slots_S)), dtype=np.int32)
                packed_4S[0] = inputs.host_slots_S
                packed_4S[1] = np.array(inputs.host_next_index_S) - 1
                drawn.append(self._graphs.draws(packed_4S, hidden_SH))
                self.table.note_sampled(inputs.host_slots_S, inputs.host_next_index_S)
        return torch.cat(drawn) if drawn else None

    def _input_rows(self, plan: TalkerPlan) -> Tensor:
        """[T, W]: what arrived, plus the last frame where the step feeds it back."""
        rows_TW = rows_of(plan.pieces, self.model.device)
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
                seed_R=seed_S + signed_seed(group * GROUP_SEED),
                position_R=inputs.next_index_S,
            )
            sampled = sample(logits_SV, params, needs)
            valid.append(sampled.valid_R)
            return sampled.token_R

        return draw


def split_plan(plan: TalkerPlan) -> tuple[TalkerPlan, TalkerPlan]:
    """The sequences that feed a frame back, which come first, and the others. Admissions stay with
    neither."""
    num_frames = sum(plan.feedback)
    assert all(plan.feedback[:num_frames]), "a prompt before a frame"
    assert all(step.num_tokens == 1 and step.samples for step in plan.sequences[:num_frames])
    parts = []
    for part in (slice(num_frames), slice(num_frames, None)):
        parts.append(
            replace(
                plan,
                admissions=(),
                released_slots=(),
                sequences=plan.sequences[part],
                pieces=plan.pieces[part],
                feedback=plan.feedback[part],
            )
        )
    return parts[0], parts[1]


@torch.inference_mode()
def _inferring(make: Callable[[], Tensor]) -> Tensor:
    return make()


def _collect(launched: _Launched) -> FramesDrawn:
    if not launched.results:
        return FramesDrawn(launched.step_id, (), (), ())
    if launched.done is not None:
        launched.done.synchronize()
    (drawn_SX,) = launched.results
    codes_SQ = drawn_SX[:, :-1].clone(memory_format=torch.contiguous_format)  # nobody keeps pinned memory
    first_S, valid_S = drawn_SX[:, 0].tolist(), drawn_SX[:, -1].tolist()
    return FramesDrawn(launched.step_id, torch.split(codes_SQ, 1), tuple(first_S), tuple(map(bool, valid_S)))
