"""What a spoken frame costs the host between a talker's device and the front process: engine, shells, edge
and vocoder pool of one worker, on devices that take no time.

python -m benchmarks.components.speech_host --streams 1 16 64 --frames 101 [--rounds 5] [--profile]
python -m benchmarks.components.speech_host --streams 64 --talker-ms 6.8 --vocoder-ms 10 --beside 3 15

CPU time of all threads, a frame of all streams at once; the least of the rounds. A device that takes time
leaves the interpreter to others meanwhile: what is then more than the device's time a frame is the host's.
`--beside`: another stage in the process that has the interpreter for so many ms of so many.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import pstats
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import cast

import numpy as np
import torch
from torch import Tensor

from connectors.inproc import inproc_pair
from contracts.chunks import Chunk
from contracts.media import Prompt
from contracts.messages import Abort, Aborted, Audio, FromStage, Speak, StageFailed, ToStage, Vocode
from contracts.params import SamplingParams
from lm_engine.config import EngineConfig
from lm_engine.model import DecoderConfig, RopeConfig
from lm_engine.talker.engine import TalkerEngine
from lm_engine.talker.model import Speller, TalkerConfig, TalkerModel, TalkerPrompt, as_written
from lm_engine.talker.plan import FramesDrawn, TalkerPlan
from lm_engine.talker.runner import _collect, _Launched
from stages.deployment import EdgeConfig
from stages.local_worker import LocalWorker
from stages.mailbox import Mailbox
from stages.options import SWITCH_INTERVAL_S
from stages.shell import StageShell
from stages.talker_stage import PROMPT_STREAM, TEXT_STREAM, TalkerStage
from stages.vocoder_stage import BuiltPool, VocoderStage
from vocoder.model import VocoderModel, VocoderRow
from vocoder.pool import VocoderPool, VocoderPoolConfig

NUM_GROUPS, NUM_CODES, NUM_ROWS, WIDTH = 16, 2048, 48, 8
SAMPLE_RATE, SAMPLES_PER_FRAME = 24000, 1920
NUM_TEXT_TOKENS = 40
BLOCK_SIZE, CONTEXT = 16, 1024
THINKER, TALKER, VOCODER = "thinker", "talker", "vocoder"


class Talker:
    """What the engine asks of a `TalkerModel`."""

    def __init__(self) -> None:
        decoder = DecoderConfig(
            vocab_size=NUM_CODES + 2,
            hidden_size=WIDTH,
            intermediate_size=WIDTH,
            num_layers=1,
            num_heads=1,
            num_kv_heads=1,
            head_dim=WIDTH,
            rms_norm_eps=1e-6,
            rope=RopeConfig(theta=1e4, inv_freq=(1.0,) * (WIDTH // 2)),
            tie_embeddings=False,
            max_position=CONTEXT,
        )
        self.config = TalkerConfig(
            decoder=decoder,
            num_code_groups=NUM_GROUPS,
            hidden_width=WIDTH,
            text_hidden=False,
            text_vocab_size=1000,
            end_codes=(NUM_CODES,),
            suppressed_codes=(NUM_CODES + 1,),
            residual=SamplingParams(),
        )
        self.device = torch.device("cpu")
        self.text_table_VW = torch.zeros(1000, WIDTH)

    def lay_out(self, prompt: Prompt, voice: str) -> TalkerPrompt:
        return TalkerPrompt(
            token_ids=np.zeros(NUM_ROWS, dtype=np.int64),
            is_media=np.zeros(NUM_ROWS, dtype=np.bool_),
            hidden_positions=np.zeros(0, dtype=np.int64),
            voice=0,
            codes=[NUM_CODES + 1] * NUM_ROWS,
            positions_AP=np.arange(NUM_ROWS)[None],
            position_delta=0,
        )

    def speller(self) -> Speller:
        return as_written

    def prompt_rows(self, *_: object) -> Tensor:
        return torch.zeros(NUM_ROWS, WIDTH)

    def closing_rows(self) -> Tensor:
        return torch.zeros(2, WIDTH)


class Device:
    """A FrameRunner whose frames are there at once, or after `step_s`, on a thread of its own as a
    collector's are."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._thread = ThreadPoolExecutor(1)

    def rows(self, make: Callable[[], Tensor]) -> Future[Tensor]:
        return self._thread.submit(make)

    def submit(self, plan: TalkerPlan) -> Future[FramesDrawn]:
        return self._thread.submit(self._draw, plan)

    def _draw(self, plan: TalkerPlan) -> FramesDrawn:
        if self._step_s:
            time.sleep(self._step_s)
        num_drawn = sum(step.samples for step in plan.sequences)
        drawn_SX = torch.full((num_drawn, NUM_GROUPS + 1), 7)
        return _collect(_Launched(plan.step_id, (drawn_SX,), None))

    def close(self) -> None:
        self._thread.shutdown()


@dataclass(eq=False)
class State:
    num_bytes: int = 0


class Decoder:
    """A VocoderModel that hums."""

    sample_rate, samples_per_frame = SAMPLE_RATE, SAMPLES_PER_FRAME
    num_code_groups, codebook_size = NUM_GROUPS, NUM_CODES
    voices: tuple[str, ...] = ()

    def __init__(self, decode_s: float) -> None:
        self._decode_s = decode_s
        self._hum = torch.full((16 * SAMPLES_PER_FRAME,), 0.1)

    def open(self, voice: str, seed: int) -> State:
        return State()

    def capture_graphs(self) -> int:
        return 0

    def decode(self, rows: Sequence[VocoderRow[State]]) -> list[Tensor]:
        if self._decode_s:
            time.sleep(self._decode_s)
        return [self._hum[: len(row.codes_KQ) * SAMPLES_PER_FRAME] for row in rows]


def make_engine(num_streams: int, step_s: float) -> TalkerEngine:
    config = EngineConfig(
        num_blocks=1 + num_streams * CONTEXT // BLOCK_SIZE,
        context_length=CONTEXT,
        eos_token_ids=(),
        block_size=BLOCK_SIZE,
        max_step_tokens=8192,
        max_sequences=num_streams,
        overlap=True,
        stage=TALKER,
    )
    return TalkerEngine(config, cast(TalkerModel, Talker()), Device(step_s))


@dataclass
class Round:
    cpu_s: float
    wall_s: float
    num_packets: int


class Listeners:
    """Has the shells speak `num_streams` answers, and counts what they say."""

    def __init__(self, num_streams: int, num_frames: int, step_s: float, decode_s: float) -> None:
        self._names = [f"stream {index}" for index in range(num_streams)]
        self._num_frames = num_frames
        self._inbox: Mailbox[FromStage] = Mailbox()
        text, texts = inproc_pair(f"{THINKER}->{TALKER}", 64)
        frames, framed = inproc_pair(f"{TALKER}->{VOCODER}", EdgeConfig(source="", target="").capacity)
        self._text = text
        talker = TalkerStage(TALKER, VOCODER, lambda: (make_engine(num_streams, step_s), ""))
        model = cast(VocoderModel[State], Decoder(decode_s))
        pool = VocoderPool(model, VocoderPoolConfig(), VOCODER)
        vocoder = VocoderStage(VOCODER, lambda: BuiltPool(pool, SAMPLE_RATE, ""))
        put = self._inbox.put_all
        self._worker = LocalWorker(
            [
                StageShell(TALKER, talker, put, {VOCODER: frames}, {THINKER: texts}),
                StageShell(VOCODER, vocoder, put, {}, {TALKER: framed}),
            ]
        )

    async def run(self, num_rounds: int) -> list[Round]:
        self._inbox.bind()
        self._worker.start()
        try:
            return [await self._round() for _ in range(num_rounds)]
        finally:
            await self._worker.stop()

    async def _round(self) -> Round:
        cpu_s, wall_s = time.process_time(), time.perf_counter()
        for name in self._names:
            await self._ask(name)
        num_packets, left = 0, len(self._names)
        while left:
            for message in await self._inbox.drain():
                assert not isinstance(message, StageFailed), message.error.message
                if isinstance(message, Audio):
                    num_packets += 1
                    left -= message.finish_reason is not None
        found = Round(time.process_time() - cpu_s, time.perf_counter() - wall_s, num_packets)
        await self._forget()
        return found

    async def _ask(self, name: str) -> None:
        speak = Speak(
            request_id=name,
            prompt=Prompt([0] * NUM_ROWS),
            voice="",
            sampling=SamplingParams(seed=0),
            max_frames=self._num_frames,
            granted_frames=self._num_frames,
        )
        vocode: ToStage = Vocode(request_id=name, voice="")
        self._worker.send(VOCODER, vocode)
        self._worker.send(TALKER, speak)
        none = {"positions": torch.zeros(0, dtype=torch.int64), "hidden": torch.zeros(0, WIDTH)}
        await self._text.send(Chunk(name, PROMPT_STREAM, 0, True, none))
        words = {"token_ids": torch.zeros(NUM_TEXT_TOKENS, dtype=torch.int64)}
        await self._text.send(Chunk(name, TEXT_STREAM, 0, True, words))

    async def _forget(self) -> None:
        for name in self._names:
            self._worker.send(TALKER, Abort(name))
            self._worker.send(VOCODER, Abort(name))
        left = 2 * len(self._names)
        while left:
            left -= sum(isinstance(message, Aborted) for message in await self._inbox.drain())


def profiled(run: Callable[[], None]) -> None:
    """Of all threads that it starts, by their own time."""
    profiles: list[cProfile.Profile] = []

    def begin(*_: object) -> None:
        profiles.append(cProfile.Profile(time.thread_time))
        profiles[-1].enable()

    threading.setprofile(begin)
    try:
        run()
    finally:
        threading.setprofile(None)
    stats = pstats.Stats(profiles[0])
    for profile in profiles[1:]:
        stats.add(profile)
    stats.sort_stats("tottime").print_stats(40)


@contextmanager
def beside(busy_s: float, every_s: float) -> Iterator[None]:
    """A thread that has the interpreter for so long."""
    ended = threading.Event()

    def work() -> None:
        while not ended.wait(every_s - busy_s):
            end_s = time.thread_time() + busy_s
            while time.thread_time() < end_s:
                pass

    thread = threading.Thread(target=work)
    if busy_s:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        if busy_s:
            thread.join()


def measure(num_streams: int, options: argparse.Namespace) -> None:
    num_frames = options.frames
    listeners = Listeners(num_streams, num_frames, 1e-3 * options.talker_ms, 1e-3 * options.vocoder_ms)
    with beside(*(1e-3 * part for part in options.beside)):
        rounds = asyncio.run(listeners.run(options.rounds))
    cpu_ms, wall_ms = (
        1e3 * min(getattr(one, key) for one in rounds) / num_frames for key in ("cpu_s", "wall_s")
    )
    packets = sum(one.num_packets for one in rounds) / len(rounds) / num_streams
    print(
        f"{num_streams:7}{cpu_ms:18.3f}{wall_ms:14.3f}{1e3 * cpu_ms / num_streams:24.1f}{packets:16.1f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--frames", type=int, default=101)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--talker-ms", type=float, default=0.0, help="of its device, a step")
    parser.add_argument("--vocoder-ms", type=float, default=0.0, help="of its device, a decode")
    parser.add_argument("--beside", type=float, nargs=2, default=(0.0, 0.0), metavar=("MS", "EVERY_MS"))
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    torch.set_num_threads(1)
    print("streams   CPU ms a frame   wall ms    CPU us a stream's frame   packets a stream")
    for num_streams in options.streams:
        if options.profile:
            profiled(partial(measure, num_streams, options))
        else:
            measure(num_streams, options)


if __name__ == "__main__":
    main()
