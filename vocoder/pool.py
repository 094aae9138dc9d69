"""The vocoder's scheduler: streams enter, advance in batches of equal chunks, and leave on their own."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic

import msgspec
import numpy as np
import torch
from torch import Tensor

from contracts.errors import BadRequest, EngineError, OmnistageError, TooManyRequests
from contracts.messages import Failed
from vocoder.model import S, VocoderModel, VocoderRow
from vocoder.ramp import RampConfig, chunk_frames
from vocoder.stream import Stream


@dataclass(frozen=True)
class VocoderPoolConfig:
    max_streams: int = 256
    max_batch_rows: int = 32
    max_batch_frames: int = 256  # bounds a forward's activations
    max_pending_frames: int = 4096  # of one stream; the talker's grants keep it far below
    ramp: RampConfig = field(default_factory=RampConfig)

    def __post_init__(self) -> None:
        assert min(self.max_streams, self.max_batch_rows, self.max_pending_frames) >= 1
        assert self.max_batch_frames >= self.ramp.max_chunk_frames


@dataclass(frozen=True, eq=False)
class Pcm:
    """The next samples of a stream, float32 mono on the host. Nothing of the stream remains after `last`."""

    request_id: str
    samples: Tensor
    last: bool

    def to_bytes(self) -> bytes:
        """float32 little-endian."""
        return self.samples.contiguous().numpy().astype("<f4", copy=False).tobytes()


VocoderOutcome = Pcm | Failed


class VocoderPool(Generic[S]):
    """Driven by a stage shell in one thread: `add`, `frames`, `abort` as messages come, `step` while
    `has_work`.

    A stream with a lead holds frames back to decode them together; `due_in_s` says when to ask `has_work`
    again if
    no message comes before. `now_s` is a monotonic clock.
    """

    def __init__(
        self,
        model: VocoderModel[S],
        config: VocoderPoolConfig,
        stage: str,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model = model
        self._config = config
        self._stage = stage
        self._now_s = now_s
        self._streams: dict[str, Stream[S]] = {}
        self._refused: list[Failed] = []
        self._no_frames = torch.empty(0, model.num_code_groups, dtype=torch.int64)
        self._decode_s = 0.0  # a slowly forgetting maximum of a forward's time
        self._frames_in = self._frames_out = self._frames_dropped = 0
        self._steps = self._rows = self._packets = self._samples = self._failures = self._underruns = 0
        self._busy_s = self._underrun_s = 0.0

    # --- what the shell calls -----------------------------------------------------------------------------
    def add(self, request_id: str, voice: str, *, seed: int = 0, skip_samples: int = 0) -> None:
        """Opens a stream. Its first `skip_samples` are made but not handed out (a replayed answer). A
        refusal comes
        from `step`."""
        assert request_id not in self._streams, f"{request_id} speaks already"
        assert skip_samples >= 0
        if len(self._streams) >= self._config.max_streams:
            message = f"{len(self._streams)} answers are being spoken already; try again later"
            self._refuse(request_id, TooManyRequests(message, retry_after_s=1.0))
        elif self._model.voices and voice not in self._model.voices:
            known = ", ".join(self._model.voices)
            self._refuse(request_id, BadRequest(f"unknown voice; choose one of: {known}", param="voice"))
        else:
            self._streams[request_id] = Stream(request_id, self._model.open(voice, seed), skip_samples)

    def frames(self, request_id: str, codes_KQ: Tensor, last: bool) -> bool:
        """Takes the next frames (int64, on the host, kept). False when no such stream is open: they are
        dropped."""
        stream = self._streams.get(request_id)
        if stream is None:
            return False
        assert not stream.ended, f"frames of {request_id} after its last"
        if problem := self._problem(stream, codes_KQ):
            self._drop(stream)
            self._refuse(request_id, EngineError(problem))
            return True
        self._frames_in += codes_KQ.shape[0]
        stream.receive(codes_KQ, last, self._now_s(), self._config.ramp.smoothing)
        return True

    def abort(self, request_id: str) -> None:
        """Forgets the stream, and what it was refused."""
        self._refused = [failed for failed in self._refused if failed.request_id != request_id]
        if (stream := self._streams.get(request_id)) is not None:
            self._drop(stream)

    def has_work(self) -> bool:
        """Whether `step` would do anything now."""
        now_s = self._now_s()
        return bool(self._refused) or any(self._due_at_s(s) <= now_s for s in self._streams.values())

    def due_in_s(self) -> float | None:
        """How long until held-back frames must be decoded, if nothing comes before; None: nothing is held
        back."""
        due_s = [self._due_at_s(s) for s in self._streams.values() if s.waits]
        return max(0.0, min(due_s) - self._now_s()) if due_s else None

    def step(self) -> list[VocoderOutcome]:
        """Hands out refusals and runs one batch of equal chunks, the most urgent stream's and its likes."""
        outcomes: list[VocoderOutcome] = list(self._refused)
        self._refused.clear()
        if batch := self._form_batch():
            outcomes += self._decode(batch)
        return outcomes

    def check_integrity(self) -> str | None:
        """The first broken conservation law, or None."""
        pending = sum(s.num_pending for s in self._streams.values())
        if self._frames_in != self._frames_out + self._frames_dropped + pending:
            return f"{self._frames_in} frames came, {self._frames_out} were decoded, {pending} wait"
        for stream in self._streams.values():
            if problem := stream.check_integrity():
                return problem
        return None

    @property
    def is_idle(self) -> bool:
        return not self._streams and not self._refused

    def stats(self) -> dict[str, float]:
        return {
            "vocoder_streams": len(self._streams),
            "vocoder_pending_frames": sum(s.num_pending for s in self._streams.values()),
            "vocoder_state_bytes": sum(s.state.num_bytes for s in self._streams.values()),
            "vocoder_steps_total": self._steps,
            "vocoder_rows_total": self._rows,
            "vocoder_frames_total": self._frames_out,
            "vocoder_packets_total": self._packets,
            "vocoder_samples_total": self._samples,
            "vocoder_busy_seconds_total": self._busy_s,
            "vocoder_failures_total": self._failures,
            "vocoder_underruns_total": self._underruns,
            "vocoder_underrun_seconds_total": self._underrun_s,
        }

    # --- inside -------------------------------------------------------------------------------------------
    def _problem(self, stream: Stream[S], codes_KQ: Tensor) -> str | None:
        model = self._model
        if codes_KQ.dim() != 2 or codes_KQ.shape[1] != model.num_code_groups or codes_KQ.dtype != torch.int64:
            wanted = f"int64 [frames, {model.num_code_groups}]"
            return f"codec frames are {codes_KQ.dtype} {list(codes_KQ.shape)}, the vocoder takes {wanted}"
        # Every stream's every frame comes by here: one look, at which what is negative is too large as well.
        if codes_KQ.numel() and codes_KQ.numpy().view(np.uint64).max() >= model.codebook_size:
            return f"a codec frame holds a code outside of [0, {model.codebook_size})"
        if stream.num_pending + codes_KQ.shape[0] > self._config.max_pending_frames:
            return f"more than {self._config.max_pending_frames} codec frames wait for the vocoder"
        return None

    def _due_at_s(self, stream: Stream[S]) -> float:
        return stream.due_at_s(self._config.ramp, self._decode_s)

    def _form_batch(self) -> list[tuple[Stream[S], int]]:
        now_s, ramp = self._now_s(), self._config.ramp
        due = [s for s in self._streams.values() if self._due_at_s(s) <= now_s]
        due.sort(key=lambda stream: stream.deadline_s(ramp))
        sized = [(s, chunk_frames(ramp, s.num_pending, first=s.is_first)) for s in due]
        if not sized:
            return []
        size = sized[0][1]
        limit = min(self._config.max_batch_rows, self._config.max_batch_frames // max(1, size))
        return [(stream, frames) for stream, frames in sized if frames == size][:limit]

    def _decode(self, batch: list[tuple[Stream[S], int]]) -> list[VocoderOutcome]:
        """Runs the batch; halves it as long as it fails, so that only a bad stream is lost."""
        outcomes: list[VocoderOutcome] = []
        pending = [batch]
        while pending:
            part = pending.pop()
            result = self._try(part)
            if isinstance(result, list):
                for (stream, size), samples in zip(part, result, strict=True):
                    outcomes += self._advance(stream, size, samples)
            elif len(part) == 1:
                self._drop(part[0][0])
                outcomes.append(self._failed(part[0][0].request_id, result))
            else:
                half = len(part) // 2
                pending += [part[half:], part[:half]]
        return outcomes

    def _try(self, batch: list[tuple[Stream[S], int]]) -> list[Tensor] | OmnistageError:
        # The error is returned without its traceback, whose frames would keep the failed forward's memory.
        try:
            return self._forward(batch)
        except torch.AcceleratorError:
            raise  # the device context is gone: the stage must restart
        except (RuntimeError, ValueError) as error:
            return EngineError(f"codec frames could not be decoded: {error}")

    def _forward(self, batch: list[tuple[Stream[S], int]]) -> list[Tensor]:
        rows = [
            VocoderRow(s.state, s.peek(size) if size else self._no_frames, s.ended and size == s.num_pending)
            for s, size in batch
        ]
        begun_s = self._now_s()
        results = self._model.decode(rows)
        took_s = self._now_s() - begun_s
        assert len(results) == len(rows)
        self._decode_s = max(took_s, 0.9 * self._decode_s)
        self._busy_s += took_s
        self._steps += 1
        self._rows += len(rows)
        return results

    def _advance(self, stream: Stream[S], size: int, samples: Tensor) -> list[VocoderOutcome]:
        assert samples.dim() == 1
        assert samples.dtype == torch.float32
        self._frames_out += size
        handed = stream.advance(size, samples)
        if handed.numel():
            silence_s = stream.player.receive(handed.numel() / self._model.sample_rate, self._now_s())
            self._underrun_s += silence_s
            self._underruns += silence_s > 0
            self._packets += 1
            self._samples += handed.numel()
        last = stream.is_done
        if last:
            del self._streams[stream.request_id]
        return [Pcm(stream.request_id, handed, last)] if last or handed.numel() else []

    def _drop(self, stream: Stream[S]) -> None:
        self._frames_dropped += stream.num_pending
        del self._streams[stream.request_id]

    def _refuse(self, request_id: str, error: OmnistageError) -> None:
        self._refused.append(self._failed(request_id, error))

    def _failed(self, request_id: str, error: OmnistageError) -> Failed:
        self._failures += 1
        return Failed(
            request_id, msgspec.structs.replace(error.info(), request_id=request_id, stage=self._stage)
        )
