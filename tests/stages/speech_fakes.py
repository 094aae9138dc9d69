"""A thinker and a talker whose text and frames can be foretold, and a graph of them with real shells, edges
and
coordinator."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from connectors.inproc import inproc_pair
from connectors.shm import ShmEdge, ShmReceiver, ShmSender
from contracts.chunks import Chunk
from contracts.errors import EngineError
from contracts.media import Prompt
from contracts.messages import (
    Audio,
    FromStage,
    Generate,
    Generated,
    SampleDelta,
    Speak,
    StopSample,
    ToStage,
)
from contracts.params import SamplingParams
from contracts.pipeline import Edge, Pipeline, StageSpec
from lm_engine.engine import StepEvents
from stages.coordinator import Coordinator
from stages.local_worker import LocalWorker
from stages.mailbox import Mailbox
from stages.shell import StageShell, StepResultBatch
from stages.speech_flow import SpeechOrder
from stages.talker_stage import TalkerStage
from stages.vocoder_stage import BuiltPool, VocoderStage
from tests.vocoder.fakes import CODES, SAMPLE_RATE, SAMPLES_PER_FRAME, FakeVocoder
from vocoder.pool import VocoderPool, VocoderPoolConfig

PIPELINE = Pipeline(
    name="omni",
    stages=(StageSpec("thinker", "lm"), StageSpec("talker", "lm"), StageSpec("vocoder", "vocoder")),
    edges=(Edge("thinker", "talker", "hidden_states"), Edge("talker", "vocoder", "codec_frames")),
    entry="thinker",
    terminals=("thinker", "vocoder"),
)
END = 0  # the thinker's end token
FRAMES_PER_TOKEN = 3
TAIL_FRAMES = 2
TIMEOUT_S = 180


def text_of(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """What the thinker answers, its end token last."""
    return [1 + (sum(prompt) * 31 + 7 * i) % 50 for i in range(num_tokens)] + [END]


def frame_of(voice: str, token: int, index: int) -> int:
    return 0 if voice == "quiet" else 1 + (token * 13 + index * 5 + len(voice)) % (CODES - 1)


def frames_of(voice: str, text: Sequence[int]) -> list[int]:
    codes = [frame_of(voice, token, i) for token in text for i in range(FRAMES_PER_TOKEN)]
    return codes + [frame_of(voice, 99, i) for i in range(TAIL_FRAMES)]


def pcm_of(codes: Sequence[int]) -> Tensor:
    """As the fake vocoder makes it, whose last sample is withheld and dropped."""
    return (torch.tensor(codes).float() / CODES).repeat_interleave(SAMPLES_PER_FRAME)[:-1]


@dataclass(eq=False)
class _Thought:
    tokens: list[int]  # the whole answer with its end token
    num_known: int  # were sampled, or forced, before
    speech: bool
    forced: bool = False
    num_sent: int = 0
    seq: int = 0


class FakeThinker:
    """One token a step and request; the prompt's length is the answer's. A cleared `go` keeps it from going
    on; a request that has `most_unstopped` tokens waits until it is stopped."""

    def __init__(self) -> None:
        self.most_unstopped: int | None = None
        self.thoughts: dict[str, _Thought] = {}
        self.seen: list[ToStage] = []
        self.go = threading.Event()
        self.go.set()

    def start(self) -> str:
        return "fake"

    def handle(self, message: ToStage) -> list[FromStage]:
        self.seen.append(message)
        match message:
            case Generate():
                prompt = message.prompt.token_ids
                tokens = text_of(prompt, len(prompt))[: message.sampling.max_tokens]
                known = len(message.resume[0]) if message.resume else 0
                if message.forced is not None:
                    tokens, known = [*message.forced, END], len(message.forced)
                forced = message.forced is not None
                self.thoughts[message.request_id] = _Thought(tokens, known, message.speech, forced)
            case StopSample(request_id, _):
                if request_id in self.thoughts:
                    thought = self.thoughts[request_id]
                    thought.tokens = [*thought.tokens[: thought.num_sent], END]
                    thought.forced = True
        return []

    def accept(self, chunk: Chunk) -> list[FromStage]:
        raise AssertionError(chunk)

    def _can_go_on(self, thought: _Thought) -> bool:
        return thought.forced or self.most_unstopped is None or thought.num_sent < self.most_unstopped

    def has_work(self) -> bool:
        return any(self._can_go_on(t) for t in self.thoughts.values())

    def due_in_s(self) -> float | None:
        return None

    async def step(self) -> StepResultBatch:
        await asyncio.to_thread(self.go.wait, TIMEOUT_S)
        batch = StepResultBatch()
        for request_id, thought in list(self.thoughts.items()):
            if self._can_go_on(thought):
                self._think(request_id, thought, batch)
        return batch

    def _think(self, request_id: str, thought: _Thought, batch: StepResultBatch) -> None:
        take = max(1, thought.num_known - thought.num_sent)
        tokens = thought.tokens[thought.num_sent : thought.num_sent + take]
        thought.num_sent += len(tokens)
        last = thought.num_sent == len(thought.tokens)
        ended = last and tokens[-1] == END
        if thought.speech:
            if thought.seq == 0:
                batch.chunks.append(
                    ("talker", Chunk(request_id, "prompt", 0, True, {"hidden": torch.ones(2)}))
                )
            spoken = torch.tensor([t for t in tokens if t != END], dtype=torch.int64)
            chunk = Chunk(request_id, "text", thought.seq, last, {"token_ids": spoken})
            batch.chunks.append(("talker", chunk))
            thought.seq += 1
        new = (
            ()
            if thought.forced
            else tuple(tokens[max(0, thought.num_known - thought.num_sent + len(tokens)) :])
        )
        if new or last:
            reason = ("stop" if ended else "length") if last else None
            stop = END if ended and new else None
            delta = SampleDelta(sample=0, token_ids=new, finish_reason=reason, stop_token_id=stop)
            batch.messages.append(Generated(request_id=request_id, deltas=(delta,)))
        if last:
            del self.thoughts[request_id]

    def sent(self, chunk: Chunk) -> None:
        pass

    def abort(self, request_id: str) -> None:
        self.thoughts.pop(request_id, None)

    def reset_cache(self) -> None:
        pass

    def check_integrity(self) -> str | None:
        return None

    def is_idle(self) -> bool:
        return not self.thoughts

    def stats(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        pass


@dataclass(eq=False)
class _Utterance:
    voice: str
    max_frames: int
    granted: int
    final: bool = False
    prompt: bool = False
    text: list[int] = field(default_factory=list)
    text_ended: bool = False
    num_frames: int = 0
    seq: int = 0


class FakeTalker:
    """One frame a step and request. Voices: "endless" never ends, "mute" ends at once, "quiet" is silent and
    never ends, "broken" fails at its third frame."""

    def __init__(self) -> None:
        self.utterances: dict[str, _Utterance] = {}
        self.seen: list[str] = []
        self.out_of_grant = threading.Event()
        self.num_frames_total = 0

    def add(self, message: Speak) -> None:
        if message.voice == "refused":
            raise EngineError("no room to speak")
        self.seen.append(message.request_id)
        self.utterances[message.request_id] = _Utterance(
            message.voice, message.max_frames, message.granted_frames
        )

    def prompt_ready(self, request_id: str, tensors: dict[str, Tensor], last: bool) -> None:
        if request_id in self.utterances:
            assert tensors["hidden"].sum() == 2
            self.utterances[request_id].prompt = True

    def text_ready(self, request_id: str, tensors: dict[str, Tensor], last: bool) -> None:
        if request_id in self.utterances:
            utterance = self.utterances[request_id]
            assert utterance.prompt
            utterance.text += tensors["token_ids"].tolist()
            utterance.text_ended = last

    def grant(self, request_id: str, num_frames: int, final: bool, most_frames: int | None) -> None:
        assert most_frames is not None or not final
        if request_id in self.utterances:
            utterance = self.utterances[request_id]
            utterance.granted, utterance.final = num_frames, final
            if most_frames is not None:
                assert num_frames <= most_frames <= utterance.max_frames
                utterance.max_frames = most_frames

    def abort(self, request_id: str) -> None:
        self.utterances.pop(request_id, None)

    def _code(self, utterance: _Utterance) -> int | None:
        """The next one; None at the end. Raises LookupError while its text is not there."""
        index, sub = divmod(utterance.num_frames, FRAMES_PER_TOKEN)
        if utterance.voice == "mute":
            return None
        if index < len(utterance.text):
            return frame_of(utterance.voice, utterance.text[index], sub)
        if not utterance.text_ended:
            raise LookupError
        tail = utterance.num_frames - FRAMES_PER_TOKEN * len(utterance.text)
        if tail >= TAIL_FRAMES and utterance.voice not in ("endless", "quiet"):
            return None
        return frame_of(utterance.voice, 99, tail)

    def _can_go_on(self, utterance: _Utterance) -> bool:
        if not utterance.prompt:
            return False
        at_bound = utterance.num_frames >= utterance.max_frames
        if utterance.num_frames >= utterance.granted and not utterance.final and not at_bound:
            self.out_of_grant.set()
            return False
        try:
            self._code(utterance)
        except LookupError:
            return False
        return True

    def has_work(self) -> bool:
        return any(self._can_go_on(u) for u in self.utterances.values())

    async def step(self) -> StepEvents:
        chunks, messages = [], []
        for request_id, utterance in list(self.utterances.items()):
            if not self._can_go_on(utterance):
                continue
            if utterance.voice == "broken" and utterance.num_frames == 3:
                from contracts.messages import Failed

                messages.append(Failed(request_id, EngineError("the talker broke").info()))
                del self.utterances[request_id]
                continue
            chunks.append(self._frame(request_id, utterance))
        return StepEvents(tuple(messages), tuple(chunks))

    def _frame(self, request_id: str, utterance: _Utterance) -> Chunk:
        cut = utterance.num_frames >= min(utterance.max_frames, utterance.granted)
        code = None if cut else self._code(utterance)
        rows = [] if code is None else [[code, 0]]
        codes = torch.tensor(rows, dtype=torch.int64).reshape(-1, 2)
        meta: dict[str, int | float | str] = {}
        if code is None:
            meta["finish"] = "length" if cut else "stop"
            del self.utterances[request_id]
        else:
            self.num_frames_total += 1
        chunk = Chunk(request_id, "codes", utterance.seq, code is None, {"codes": codes}, meta)
        utterance.num_frames += 1
        utterance.seq += 1
        return chunk

    def reset_cache(self) -> None:
        pass

    def check_integrity(self) -> str | None:
        return None

    def is_idle(self) -> bool:
        return not self.utterances

    def stats(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        pass


class AnyVoice(FakeVocoder):
    voices = ()


@dataclass
class Spoken:
    """What a client got."""

    tokens: list[int] = field(default_factory=list)
    text_finish: str | None = None
    pcm: bytes = b""
    audio_finish: str | None = None
    order: list[str] = field(default_factory=list)  # "text" | "audio"

    def take(self, part: Generated | Audio) -> None:
        if isinstance(part, Audio):
            self.order.append("audio")
            self.pcm += part.pcm
            self.audio_finish = part.finish_reason
            return
        for delta in part.deltas:
            self.order.append("text")
            self.tokens += delta.token_ids
            self.text_finish = delta.finish_reason

    @property
    def samples(self) -> Tensor:
        return torch.frombuffer(bytearray(self.pcm), dtype=torch.float32) if self.pcm else torch.empty(0)


@dataclass
class SpeechGraph:
    coordinator: Coordinator
    thinker: FakeThinker
    talker: FakeTalker
    pool: VocoderPool
    sent: list[tuple[str, ToStage]]

    def start(self, message: Generate, order: SpeechOrder | None):
        return self.coordinator.run(message, (), order)

    async def speak(self, message: Generate, order: SpeechOrder | None) -> Spoken:
        spoken = Spoken()
        async for part in self.start(message, order):
            spoken.take(part)
        return spoken

    async def assert_clean(self) -> None:
        await self.coordinator.drained()
        reports = await self.coordinator.board.check_integrity()
        assert [(r.stage, r.problem, r.busy) for r in reports if r.problem or r.busy] == []


def order(voice: str = "ada", *, window: int = 1000, bound: int = 40, max_frames: int = 5000) -> SpeechOrder:
    """`bound`: frames that any text may take beyond three a token."""
    return SpeechOrder(
        voice=voice,
        sampling=SamplingParams(seed=5),
        max_frames=max_frames,
        window_frames=window,
        samples_per_frame=SAMPLES_PER_FRAME,
        frames_of_text=lambda num_tokens: FRAMES_PER_TOKEN * num_tokens + bound,
    )


def question(request_id: str, *prompt: int, speech: bool = True, **options) -> Generate:
    sampling = SamplingParams(max_tokens=1000)
    return Generate(
        request_id=request_id, prompt=Prompt(list(prompt)), sampling=sampling, speech=speech, **options
    )


@contextlib.asynccontextmanager
async def speech_graph(edges: str = "inproc", capacity: int = 4) -> AsyncIterator[SpeechGraph]:
    thinker, talker = FakeThinker(), FakeTalker()
    pool = VocoderPool(AnyVoice(), VocoderPoolConfig(), "vocoder")
    inbox: Mailbox[FromStage] = Mailbox()
    inbox.bind()
    with contextlib.ExitStack() as stack:
        ends = {}
        for edge in (("thinker", "talker"), ("talker", "vocoder")):
            if edges == "inproc":
                ends[edge] = inproc_pair("->".join(edge), capacity)
            else:
                ring = ShmEdge.create("->".join(edge), 1 << 20, capacity)
                stack.callback(ring.close)
                ends[edge] = ring
        worker = LocalWorker(_shells(thinker, talker, pool, ends, inbox))
        sent: list[tuple[str, ToStage]] = []

        def send(stage: str, message: ToStage) -> None:
            sent.append((stage, message))
            worker.send(stage, message)

        coordinator = Coordinator(PIPELINE, send)
        dispatching = asyncio.create_task(_dispatch(inbox, coordinator))
        worker.start()
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await coordinator.board.wait_started()
                yield SpeechGraph(coordinator, thinker, talker, pool, sent)
        finally:
            thinker.go.set()
            await worker.stop()
            dispatching.cancel()


def _shells(thinker, talker, pool, ends, inbox) -> list[StageShell]:
    def sender(edge):
        return ends[edge][0] if isinstance(ends[edge], tuple) else ShmSender(ends[edge].description())

    def receiver(edge):
        return ends[edge][1] if isinstance(ends[edge], tuple) else ShmReceiver(ends[edge].description())

    to_talker, to_vocoder = ("thinker", "talker"), ("talker", "vocoder")
    built = BuiltPool(pool, SAMPLE_RATE, "fake")
    return [
        StageShell("thinker", thinker, inbox.put_all, {"talker": sender(to_talker)}),
        StageShell(
            "talker",
            TalkerStage("talker", "vocoder", lambda: (talker, "fake")),
            inbox.put_all,
            {"vocoder": sender(to_vocoder)},
            {"thinker": receiver(to_talker)},
        ),
        StageShell(
            "vocoder",
            VocoderStage("vocoder", lambda: built),
            inbox.put_all,
            {},
            {"talker": receiver(to_vocoder)},
        ),
    ]


async def _dispatch(inbox: Mailbox[FromStage], coordinator: Coordinator) -> None:
    while True:
        coordinator.dispatch(await inbox.drain())
