"""Token2wav as a VocoderModel: codes in windows to mel, mel to PCM with the context that BigVGAN sees.

The transformer is run on windows of whole blocks: `chunk` new ones, between those behind and ahead that it
was trained
to see. A window's mel depends on the window alone, so the windows are laid out from the stream's beginning
and never
by how the codes came:

    frames      0        chunk      2 chunk     3 chunk
    window 0    [ new ....|ahead]
    window 1       [behind| new ....|ahead]
    last                       [behind| new .......]     up to chunk + ahead new ones

A stream that ends within its first window is the decode in one piece; `chunk_blocks=None` makes every stream
that. The noise is drawn by the stream's seed, as if for all of its frames at once. BigVGAN then is exact over
the mel: a chunk is decoded between as many frames as it can see, and handed out when these are there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from vocoder.model import VocoderRow
from vocoder.token2wav.bigvgan import BigVgan
from vocoder.token2wav.dit import Dit, Voice
from vocoder.token2wav.flow import FlowConfig, sample_mel
from vocoder.token2wav.noise import Noise

NO_END = 1 << 40  # frames: longer than any stream


@dataclass(frozen=True)
class Windows:
    """All in mel frames, multiples of `repeats`."""

    repeats: int
    chunk: int
    behind: int
    ahead: int

    def first_frame(self, index: int) -> int:
        return max(0, index * self.chunk - self.behind)

    def end_frame(self, index: int) -> int:
        return (index + 1) * self.chunk + self.ahead


@dataclass(frozen=True, eq=False)
class Progress:
    """One stream between two decodes; replaced, never changed."""

    codes_N: Tensor  # from `first_code` on: what the next window may see, and all that came since
    first_code: int
    ended: bool
    window: int  # the next one
    noise: Noise  # what the next window may see
    mel_TM: Tensor  # from `first_mel` on: what BigVGAN may still see
    first_mel: int
    num_spoken: int  # mel frames that became PCM

    @property
    def num_frames(self) -> int:
        """Codes so far."""
        return self.first_code + self.codes_N.shape[0]

    @property
    def num_mel(self) -> int:
        return self.first_mel + self.mel_TM.shape[0]


@dataclass(eq=False)
class Token2WavState:
    voice: Voice
    progress: Progress

    @property
    def num_bytes(self) -> int:
        progress = self.progress
        return progress.codes_N.nbytes + progress.mel_TM.nbytes + progress.noise.num_bytes


@dataclass(frozen=True, eq=False)
class MelJob:
    stream: int
    state: Token2WavState
    codes_N: Tensor
    noise: Noise
    first: int  # mel frame of the window's first
    num_skipped: int  # frames behind
    num_new: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.codes_N.shape[0],)

    def noise_TM(self, repeats: int) -> Tensor:
        return self.noise.rows(self.first, self.first + self.codes_N.shape[0] * repeats)


@dataclass(frozen=True, eq=False)
class PcmJob:
    stream: int
    mel_TM: Tensor
    num_skipped: int
    num_new: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.mel_TM.shape[0],)


class Job(Protocol):
    @property
    def shape(self) -> tuple[int, ...]: ...


J = TypeVar("J", bound=Job)


class Token2Wav:
    """Float32, as the model demands. One thread at a time."""

    def __init__(
        self,
        dit: Dit,
        bigvgan: BigVgan,
        voices: Mapping[str, Voice],
        sample_rate: int,
        *,
        chunk_blocks: int | None = 3,
        flow: FlowConfig | None = None,
    ) -> None:
        config = dit.config
        self._dit, self._bigvgan, self._voices = dit, bigvgan, dict(voices)
        self._flow = flow or FlowConfig()
        self._device = dit.codes.weight.device
        self._windows = Windows(
            repeats=config.repeats,
            chunk=NO_END if chunk_blocks is None else chunk_blocks * config.block_size,
            behind=config.block_size * len(config.look_back_layers),
            ahead=config.block_size * len(config.look_ahead_layers),
        )
        self.sample_rate = sample_rate
        self.samples_per_frame = config.repeats * bigvgan.config.hop
        self.num_code_groups = 1
        self.codebook_size = config.num_codes
        self.voices = tuple(self._voices)

    def open(self, voice: str, seed: int) -> Token2WavState:
        mel_dim = self._dit.config.mel_dim
        nothing_TM = torch.empty(0, mel_dim, device=self._device)
        noise = Noise.seeded(seed, mel_dim)
        empty = Progress(torch.empty(0, dtype=torch.int64), 0, False, 0, noise, nothing_TM, 0, 0)
        return Token2WavState(self._voices[voice], empty)

    def capture_graphs(self) -> int:
        return 0

    @torch.inference_mode()
    def decode(self, rows: Sequence[VocoderRow[Token2WavState]]) -> list[Tensor]:
        progress = [_receive(row) for row in rows]
        while jobs := [
            job for i, row in enumerate(rows) if (job := self._mel_job(i, row.state, progress[i]))
        ]:
            for job, mel_TM in self._batched(jobs, self._make_mel):
                progress[job.stream] = self._advance_mel(progress[job.stream], job, mel_TM)
        results = [torch.empty(0) for _ in rows]
        spoken = [pcm_job for i, p in enumerate(progress) if (pcm_job := self._pcm_job(i, p))]
        for pcm_job, pcm in self._batched(spoken, self._make_pcm):
            results[pcm_job.stream] = pcm
            progress[pcm_job.stream] = self._advance_pcm(progress[pcm_job.stream], pcm_job.num_new)
        for row, new in zip(rows, progress, strict=True):
            row.state.progress = new
        return results

    # --- codes to mel -------------------------------------------------------------------------------------
    def _mel_job(self, stream: int, state: Token2WavState, progress: Progress) -> MelJob | None:
        windows, index = self._windows, progress.window
        come = progress.num_frames * windows.repeats
        end = windows.end_frame(index)
        is_last = progress.ended and come <= end
        if not (come > end or (is_last and come > progress.num_mel)):
            return None
        first = windows.first_frame(index)
        end = min(end, come)
        codes = slice(
            first // windows.repeats - progress.first_code, end // windows.repeats - progress.first_code
        )
        num_skipped = index * windows.chunk - first
        num_new = end - first - num_skipped if is_last else windows.chunk
        noise = progress.noise.drawn_to(end)
        return MelJob(stream, state, progress.codes_N[codes], noise, first, num_skipped, num_new)

    def _make_mel(self, jobs: list[MelJob]) -> list[Tensor]:
        noise = torch.stack([job.noise_TM(self._windows.repeats) for job in jobs]).to(self._device)
        codes = torch.stack([job.codes_N for job in jobs]).to(self._device)
        mel_BTM = sample_mel(self._dit, self._flow, noise, codes, [job.state.voice for job in jobs])
        return [
            mel_TM[job.num_skipped : job.num_skipped + job.num_new]
            for job, mel_TM in zip(jobs, mel_BTM, strict=True)
        ]

    def _advance_mel(self, progress: Progress, job: MelJob, mel_TM: Tensor) -> Progress:
        window, repeats = progress.window + 1, self._windows.repeats
        first_code = min(self._windows.first_frame(window) // repeats, progress.num_frames)
        return replace(
            progress,
            window=window,
            codes_N=progress.codes_N[first_code - progress.first_code :],
            first_code=first_code,
            noise=job.noise.dropped_to(first_code * repeats),
            mel_TM=torch.cat([progress.mel_TM, mel_TM]),
        )

    # --- mel to PCM ---------------------------------------------------------------------------------------
    def _pcm_job(self, stream: int, progress: Progress) -> PcmJob | None:
        complete = progress.ended and progress.num_mel == progress.num_frames * self._windows.repeats
        end = progress.num_mel if complete else progress.num_mel - self._bigvgan.config.reach
        if end <= progress.num_spoken:
            return None
        num_skipped = progress.num_spoken - progress.first_mel
        return PcmJob(stream, progress.mel_TM, num_skipped, end - progress.num_spoken)

    def _make_pcm(self, jobs: list[PcmJob]) -> list[Tensor]:
        hop = self._bigvgan.config.hop
        pcm_BT = self._bigvgan(torch.stack([job.mel_TM for job in jobs]).transpose(1, 2)).float().cpu()
        return [
            pcm_T[job.num_skipped * hop : (job.num_skipped + job.num_new) * hop]
            for job, pcm_T in zip(jobs, pcm_BT, strict=True)
        ]

    def _advance_pcm(self, progress: Progress, num_new: int) -> Progress:
        num_spoken = progress.num_spoken + num_new
        first_mel = max(0, num_spoken - self._bigvgan.config.reach)
        mel_TM = progress.mel_TM[first_mel - progress.first_mel :].clone()
        return replace(progress, num_spoken=num_spoken, first_mel=first_mel, mel_TM=mel_TM)

    def _batched(self, jobs: list[J], run: Callable[[list[J]], list[Tensor]]) -> list[tuple[J, Tensor]]:
        by_shape: dict[tuple[int, ...], list[J]] = defaultdict(list)
        for job in jobs:
            by_shape[job.shape].append(job)
        return [pair for group in by_shape.values() for pair in zip(group, run(group), strict=True)]


def _receive(row: VocoderRow[Token2WavState]) -> Progress:
    progress = row.state.progress
    assert not progress.ended
    return replace(progress, codes_N=torch.cat([progress.codes_N, row.codes_KQ[:, 0]]), ended=row.last)
