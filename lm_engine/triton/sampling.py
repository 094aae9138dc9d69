"""Draws rows that ask for more than a plain temperature in a few launches, as `sampler.sample` does in many.

Shapes: S rows of a step, V vocabulary, C chunks of it, P rows with penalties, Q with log-probabilities.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
import torch
import triton
from torch import Tensor

from contracts.params import SamplingParams
from lm_engine.request_table import RequestTable
from lm_engine.sampler import (
    MIN_LOGPROB,
    MIN_TEMPERATURE,
    AskedRows,
    LogitChange,
    Logprobs,
    Needs,
    Sampled,
    log_probabilities,
    needs_of,
)
from lm_engine.triton.jit.sampling import (
    bracket_nuclei,
    change_logits,
    count_tokens,
    find_floors,
    prepare_rows,
)
from lm_engine.triton.jit.scores import score_tokens
from lm_engine.triton.launch import interpreted, launch, launch_options, next_power
from lm_engine.triton.step import VOCABULARY_BLOCK, draw_above

_CHANGES_BLOCK = 128
_GROUPS = 32  # of a chunk: a top-k of up to that many times the chunks is bounded by their maxima
_EDGES, _BRACKETS = 32, 2  # of what is 15 wide, a bracket of a bracket holds hundreds of values
_LISTED = 4096  # values among which a program finds a floor
_FEW = 128
_ROW_BLOCK = 8192
_MAX_TOP = 20
_HISTORY_BLOCK = 1024
_MASS_BITS = 62  # of the sum of all masses


@dataclass(frozen=True)
class _Workspace:
    """Of up to `num_rows` rows, for one step after the other. What is counted in is zero between them; states
    and masses lie as densely as the step has rows."""

    num_rows: int
    groups: Tensor
    arrivals: Tensor
    num_values: Tensor
    states: Tensor
    values: Tensor
    parts: Tensor
    masses: Tensor

    @classmethod
    def allocate(cls, num_rows: int, num_chunks: int, device: torch.device) -> _Workspace:
        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        return cls(
            num_rows=num_rows,
            groups=empty(num_rows, num_chunks, _GROUPS),
            arrivals=torch.zeros(num_rows, dtype=torch.int32, device=device),
            num_values=torch.zeros(num_rows, dtype=torch.int32, device=device),
            states=empty(5 * num_rows),
            values=empty(num_rows, _LISTED),
            parts=empty(num_rows, num_chunks, _EDGES + 1, dtype=torch.int64),
            masses=empty(2 * num_rows, dtype=torch.int64),
        )


class TritonDraws:
    """Borrows the table, and writes to it what it draws. Called from one thread, on one stream; nothing waits
    for the device."""

    def __init__(self, table: RequestTable) -> None:
        self._table = table
        self._vocabulary = table.vocab_size
        self._num_chunks = triton.cdiv(self._vocabulary, VOCABULARY_BLOCK)
        self._chunked = {
            "V": self._vocabulary,
            "BLOCK_V": min(VOCABULARY_BLOCK, next_power(self._vocabulary)),
            "NUM_CHUNKS": self._num_chunks,
        }
        self._options = launch_options(table.device)
        self._unit = 2.0 ** (_MASS_BITS - (self._vocabulary - 1).bit_length())
        self._workspace: _Workspace | None = None
        self._counts_PV: Tensor | None = None

    def __call__(self, asked: AskedRows, logits_SV: Tensor) -> Sampled:
        """Spends `logits_SV` (float32)."""
        num_rows, vocabulary = logits_SV.shape
        assert logits_SV.dtype == torch.float32
        assert logits_SV.is_contiguous()
        assert num_rows == len(asked.slots)
        assert vocabulary == self._vocabulary
        try:
            return self.step(asked, logits_SV).sample()
        except BaseException:
            self._workspace = self._counts_PV = None  # half a step has counted in them
            raise

    def step(self, asked: AskedRows, logits_SV: Tensor) -> RowsStep:
        return RowsStep(self, asked, logits_SV)

    def rehearse(self) -> None:
        """Launches every kernel for a row that is padding: what is compiled on first use is not left to a
        request."""
        ends = SamplingParams(top_k=2, top_p=0.5, min_p=0.1, logprobs=1, presence_penalty=1.0)
        for params, changes in ((ends, [LogitChange(0, 0, 0.0)]), (SamplingParams(top_p=0.5), [])):
            logits_1V = torch.zeros(1, self._vocabulary, device=self._table.device)
            self(AskedRows((-1,), (1,), (params,), changes), logits_1V)

    def workspace(self, num_rows: int) -> _Workspace:
        if self._workspace is None or self._workspace.num_rows < num_rows:
            self._workspace = _Workspace.allocate(next_power(num_rows), self._num_chunks, self._table.device)
        return self._workspace

    def counts(self, num_rows: int) -> Tensor:
        """int32 [P, V], zeros between steps."""
        if self._counts_PV is None or self._counts_PV.shape[0] < num_rows:
            shape = (next_power(num_rows), self._vocabulary)
            self._counts_PV = torch.zeros(shape, dtype=torch.int32, device=self._table.device)
        return self._counts_PV


class RowsStep:
    """The launches of one step."""

    def __init__(self, draws: TritonDraws, asked: AskedRows, logits_SV: Tensor) -> None:
        self._draws, self._asked, self._logits_SV = draws, asked, logits_SV
        self._table = draws._table
        self._num_rows = len(asked.slots)
        self._work = draws.workspace(self._num_rows)
        self._needs: Needs = needs_of(asked.params)
        self._penalised = [i for i, params in enumerate(asked.params) if params.has_penalties]
        self._wanted = [i for i, params in enumerate(asked.params) if params.logprobs is not None]
        self._packed = self._table.to_device(self._pack())

    @property
    def _filters(self) -> bool:
        return self._needs.max_top_k > 0 or self._needs.top_p or self._needs.min_p

    def _pack(self) -> np.ndarray:
        """One array, one copy: see jit/sampling.py."""
        asked, penalised = self._asked, itertools.count()
        rows_4S = np.empty((4, self._num_rows), dtype=np.int32)
        rows_4S[0] = asked.slots
        rows_4S[1] = np.array(asked.next_index) - 1
        rows_4S[2] = [next(penalised) if params.has_penalties else -1 for params in asked.params]
        logs = [
            math.log(params.min_p) if params.min_p > 0 and not params.greedy else -math.inf
            for params in asked.params
        ]
        rows_4S[3] = np.array(logs, dtype=np.float32).view(np.int32)
        rows, tokens, values = zip(*asked.changes, strict=True) if asked.changes else ((), (), ())
        changed = (rows, tokens, np.array(values, dtype=np.float32).view(np.int32))
        parts = (rows_4S.ravel(), *(np.array(one, dtype=np.int32) for one in (*changed, self._wanted)))
        return np.concatenate(parts)

    def sample(self) -> Sampled:
        """As `sampler.sample`."""
        changes_logits = bool(self._penalised or self._asked.changes)
        raw_SV = self._logits_SV.clone() if self._wanted and changes_logits else self._logits_SV
        results_2S = self.draw_filtered()
        token_S, valid_S = results_2S.unbind(0)
        logprobs = self._score(raw_SV, results_2S) if self._wanted else None
        return Sampled(token_S, valid_S, logprobs)

    def draw_filtered(self) -> Tensor:
        """[2, S] int32: tokens, which are in the table then, and whether their rows are valid."""
        self.change()
        return self._draw(self.find_floors())

    def change(self) -> None:
        """Biases and forbidden tokens; counts what penalties are for."""
        draws, table, num_changes = self._draws, self._table, len(self._asked.changes)
        if num_changes:
            launch(
                change_logits,
                (triton.cdiv(num_changes, _CHANGES_BLOCK),),
                self._logits_SV,
                self._packed,
                self._num_rows,
                num_changes,
                V=draws._vocabulary,
                BLOCK_E=_CHANGES_BLOCK,
                **draws._options,
            )
        if self._penalised:
            longest = max(self._asked.next_index[i] for i in self._penalised)
            block = 16 if interpreted() else _HISTORY_BLOCK
            launch(
                count_tokens,
                (self._num_rows, triton.cdiv(longest, block)),
                self._packed,
                table.token_ids,
                table.num_prompt,
                draws.counts(len(self._penalised)),
                self._num_rows,
                table.token_ids.stride(0),
                V=draws._vocabulary,
                BLOCK_L=block,
                **draws._options,
            )

    def find_floors(self) -> Tensor | None:
        """[S]; None: there are none. Applies the penalties."""
        if not self._filters and not self._penalised:
            return None
        draws, table, work = self._draws, self._table, self._work
        row_args = (self._logits_SV, self._packed, table.floats, table.top_k)
        number_args = (self._num_rows, table.floats.stride(0), MIN_TEMPERATURE)
        grid = (self._num_rows, draws._num_chunks)
        groups = min(_GROUPS, int(draws._chunked["BLOCK_V"]))
        launch(
            prepare_rows,
            grid,
            *row_args,
            draws.counts(len(self._penalised)) if self._penalised else work.num_values,
            work.groups,
            work.arrivals,
            work.states,
            *number_args,
            GROUPS=groups,
            BLOCK_G=next_power(draws._num_chunks * groups),
            enable_fp_fusion=False,  # penalties are rounded as torch rounds them
            **draws._chunked,
            **draws._options,
        )
        for _ in range(_BRACKETS if self._needs.nucleus_of_all else 0):
            launch(
                bracket_nuclei,
                grid,
                *row_args,
                work.parts,
                work.arrivals,
                work.states,
                work.masses,
                *number_args,
                draws._unit,
                BLOCK_C=next_power(draws._num_chunks),
                EDGES=_EDGES,
                enable_fp_fusion=False,  # an edge is the same wherever it is worked out
                **draws._chunked,
                **draws._options,
            )
        if self._needs.max_top_k or self._needs.top_p:
            launch(
                find_floors,
                grid,
                *row_args,
                work.values,
                work.num_values,
                work.arrivals,
                work.states,
                work.masses,
                *number_args,
                draws._unit,
                BLOCK_K=_LISTED,
                BLOCK_F=min(_FEW, _LISTED),
                BLOCK_R=_ROW_BLOCK,
                num_warps=8,
                **draws._chunked,
                **draws._options,
            )
        return work.states[: self._num_rows]

    def _draw(self, floors_S: Tensor | None) -> Tensor:
        results_2S = torch.empty(2, self._num_rows, dtype=torch.int32, device=self._table.device)
        packed, arrivals = self._packed, self._work.arrivals
        draw_above(floors_S, self._logits_SV, packed, results_2S, self._table, arrivals)
        return results_2S

    def _score(self, raw_SV: Tensor, results_2S: Tensor) -> Logprobs:
        """Of the rows that want log-probabilities, on the model's own logits."""
        draws, device, num_wanted = self._draws, self._table.device, len(self._wanted)
        most = max(self._asked.params[i].logprobs or 0 for i in self._wanted)
        if most > _MAX_TOP:
            rows_Q = self._packed[-num_wanted:].long()
            return log_probabilities(raw_SV[rows_Q], results_2S[0, rows_Q].long(), most)
        num_top, shape = min(most, draws._vocabulary), (num_wanted, draws._num_chunks)
        scores_QN = torch.empty(num_wanted, 1 + num_top, device=device)
        ids_QN = torch.empty(num_wanted, 1 + num_top, dtype=torch.int64, device=device)
        launch(
            score_tokens,
            shape,
            raw_SV,
            self._packed,
            results_2S,
            torch.empty(*shape, 2, device=device),
            torch.empty(shape, dtype=torch.int32, device=device),
            torch.empty(*shape, max(num_top, 1), dtype=torch.int64, device=device),
            self._work.arrivals,
            scores_QN,
            ids_QN,
            self._num_rows,
            len(self._asked.changes),
            num_top,
            MIN_LOGPROB,
            BLOCK_C=next_power(draws._num_chunks),
            BLOCK_T=next_power(draws._num_chunks * _MAX_TOP),
            **draws._chunked,
            **draws._options,
        )
        return Logprobs(scores_QN[:, 0], ids_QN[:, 0], scores_QN[:, 1:], ids_QN[:, 1:])
