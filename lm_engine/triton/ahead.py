"""Compiles what a stage will launch before it has weights or a GPU: its steps run on the device "meta", where
launches are recorded, and Triton compiles them into its cache on the disk.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from lm_engine.gpu_target import GpuTarget
from lm_engine.graphs import CapturedDecodes
from lm_engine.memory import allocate_kv
from lm_engine.model import DecoderConfig, DecoderModel, KVDtype, PagedKV
from lm_engine.passes import PaddedPasses
from lm_engine.request_table import RequestTable
from lm_engine.table_kernels import rehearse_spans
from lm_engine.talker.graphs import MAX_PROMPT_ROWS, CapturedFrames, PromptModel
from lm_engine.talker.model import TalkerModel
from lm_engine.triton.launch import Launch, recording
from lm_engine.triton.sampling import TritonDraws
from lm_engine.triton.table import TritonTable

META = torch.device("meta")
_NUM_BLOCKS = 2  # of a cache that is never read


class _NoDriver:
    """As Triton's driver, of a GPU that need not be there."""

    def __init__(self, target: GpuTarget) -> None:
        major, minor = target.capability
        self._target = GPUTarget("cuda", 10 * major + minor, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_only(target: GpuTarget) -> None:
    """From now on this process compiles for the GPU, and can launch nothing."""
    triton.runtime.driver.set_active(_NoDriver(target))


class LauncherBuilder:
    """What Triton builds beside kernels with a C compiler: the module that speaks to the driver and, in older
    versions, one for each kind of arguments. Nothing where there is no library of CUDA."""

    def __init__(self) -> None:
        from triton.backends.nvidia import driver

        self._driver = driver
        try:
            driver.library_dirs()
        except AssertionError:
            self._has_cuda = False
        else:
            self._has_cuda = True

    def build_utils(self) -> None:
        if self._has_cuda:
            self._driver.CudaUtils()

    def build(self, kernel: Any) -> None:
        """Of Triton's compiled kernel."""
        if self._has_cuda and hasattr(self._driver, "make_launcher"):
            self._driver.CudaLauncher(kernel.src, kernel.metadata)


def decoder_launches(
    model: DecoderModel, *, max_sequences: int, max_length: int, block_size: int, kv_dtype: KVDtype
) -> list[Launch]:
    """One launch of each variant that decode steps, mixed ones and their sampling need. `model`: on META."""
    table, kv = _memory(model.config, model.dtype, max_sequences, max_length, block_size, kv_dtype)
    with recording() as launches, torch.inference_mode():
        decodes = CapturedDecodes(model, model.attention, kv, table)
        for kind in decodes.missing():
            decodes.run_once(kind)
        passes = PaddedPasses(model, model.attention, kv, table)
        for shape in passes.shapes:
            passes.clear(shape)
            passes.forward(shape)
        table.rehearse()
        rehearse_spans(model, table)
        TritonDraws(table).rehearse()
    return list(launches.values())


def talker_launches(
    model: TalkerModel, *, max_sequences: int, max_length: int, block_size: int, kv_dtype: KVDtype
) -> list[Launch]:
    """Of frames and of prompts."""
    config = model.config.decoder
    table, kv = _memory(config, model.dtype, max_sequences, max_length, block_size, kv_dtype)
    model.reserve(max_sequences)
    frame = (max_sequences + 1, model.config.num_code_groups)
    last_frame = torch.zeros(frame, dtype=torch.int64, device=META)
    suppressed_V = torch.zeros(config.vocab_size, device=META)
    with recording() as launches, torch.inference_mode():
        frames = CapturedFrames(model, kv, table, last_frame, suppressed_V)
        for size in frames.missing():
            frames.run_once(size)
        passes = PaddedPasses(PromptModel(model), model.attention, kv, table, MAX_PROMPT_ROWS)
        for shape in passes.shapes:
            passes.clear(shape)
            passes.forward(shape)
        table.rehearse()
    return list(launches.values())


def _memory(
    config: DecoderConfig,
    dtype: torch.dtype,
    max_sequences: int,
    max_length: int,
    block_size: int,
    kv_dtype: KVDtype,
) -> tuple[RequestTable, PagedKV]:
    table = RequestTable(
        vocab_size=config.vocab_size,
        num_axes=config.num_position_axes,
        max_sequences=max_sequences,
        max_length=max_length,
        block_size=block_size,
        device=META,
        gated=config.picture_adapter is not None,
        kernels=TritonTable(),
    )
    return table, allocate_kv(config, _NUM_BLOCKS, block_size, dtype, META, kv_dtype)
