"""The one door between `api` and the graph: submit a request, read its events, stop or abort it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Protocol

import msgspec

from contracts.conversation import Conversation
from contracts.media import MediaSource
from contracts.messages import FinishReason, IntegrityReport, SampleDelta
from contracts.params import SamplingDefaults, SamplingParams
from contracts.timings import Timing
from contracts.transcription import TranscriptEvent, TranscriptionOptions

if TYPE_CHECKING:
    from model_families.text import ChatTokenizer


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """What /v1/models tells of the served model."""

    names: tuple[str, ...]  # the first is the canonical one
    family: str
    context_length: int
    input_modalities: tuple[str, ...]
    output_modalities: tuple[str, ...]
    created: int  # Unix seconds
    description: str = ""
    voices: tuple[str, ...] = ()  # the first is the default; empty: the model does not speak
    sample_rate: int | None = None  # of the speech, Hz
    samples_per_frame: int | None = None  # of the speech: what one audio token of usage stands for
    transcribes: bool = False  # for /v1/audio/transcriptions
    sampling: SamplingDefaults = SamplingDefaults()


class SpeechOptions(msgspec.Struct, frozen=True, kw_only=True):
    """A spoken answer is wanted. None: the model's own voice and way of sampling.

    `verbatim`: this very text is spoken as the answer to `input`; no text is generated, so no Tokens come but
    one without tokens that ends the sample.
    """

    voice: str | None = None
    sampling: SamplingParams | None = None  # of the talker
    verbatim: str | None = None


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`input`: a conversation (chat), or plain text or token ids (completions).

    `sampling.max_tokens` None-like: the API passes `UNLIMITED` and the service clips it to what the context
    leaves. `max_tokens_param`: what the client called it.
    """

    input: Conversation | str | tuple[int, ...]
    sampling: SamplingParams
    priority: int = 0
    tenant: str = ""
    cache_salt: str | None = None
    timeout_s: float | None = None
    speech: SpeechOptions | None = None
    max_tokens_param: str = "max_tokens"


UNLIMITED = 1 << 30


class PromptReady(msgspec.Struct, frozen=True, kw_only=True):
    """First event: the prompt is built and accepted by the entry stage."""

    request_id: str
    prompt_token_ids: list[int]
    media_tokens: dict[str, int]  # modality → tokens
    max_tokens: int  # after clipping


class Tokens(msgspec.Struct, frozen=True, kw_only=True):
    deltas: tuple[SampleDelta, ...]
    num_cached_tokens: int | None = None  # on the first one


class AudioChunk(msgspec.Struct, frozen=True, kw_only=True):
    """PCM in order: float32 little-endian, mono, `ModelCard.sample_rate`. The next one is made only as the
    events are taken (a bounded window ahead). `finish_reason` is on the last one, which may be empty:
    "length" when the speech was cut at its bound."""

    samples: bytes
    finish_reason: FinishReason | None = None


Event = PromptReady | Tokens | AudioChunk


class TranscriptionRequest(msgspec.Struct, frozen=True, kw_only=True):
    source: MediaSource
    options: TranscriptionOptions
    timeout_s: float | None = None


class RecordingReady(msgspec.Struct, frozen=True, kw_only=True):
    """First event of a transcription: the recording is decoded and the options are accepted."""

    request_id: str
    duration_s: float


TranscriptionEvent = RecordingReady | TranscriptEvent


class StageHealth(msgspec.Struct, frozen=True):
    stage: str
    state: str  # "starting" | "ready" | "failed" | "stopped"
    detail: str = ""


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A row of /stages."""

    name: str
    stages: tuple[str, ...]
    pid: int
    devices: tuple[str, ...]
    state: str  # "starting" | "ready" | "restarting" | "failed" | "stopped"
    restarts: int


class Service(Protocol):
    """All methods are called on the front process's event loop."""

    card: ModelCard
    tokenizer: ChatTokenizer

    def generate(self, request: GenerationRequest) -> AsyncGenerator[Event, None]:
        """Yields PromptReady, then Tokens until every sample has a finish_reason and, with `speech`,
        AudioChunks
        among them and after them until one has a finish_reason.

        Raises OmnistageError: before PromptReady for bad input or a full queue, later for a failed stage.
        Closing the iterator early (or cancelling its task) aborts the request in every stage.
        """
        ...

    def transcribe(self, request: TranscriptionRequest) -> AsyncGenerator[TranscriptionEvent, None]:
        """Yields RecordingReady, then the transcript's events to the recording's end. Errors and closing as
        for
        `generate`; BadRequest where the model does not transcribe."""
        ...

    def spoken_of(self, text: str) -> str:
        """What of a text a model with a voice speaks; "" where nothing of it can be."""
        ...

    def stop_sample(self, request_id: str, sample: int) -> None:
        """A stop string matched: the sample ends with no further token. The iterator goes on for the
        others."""
        ...

    def departure(self) -> asyncio.Event:
        """Set when the next accepted request has left, so that a full server may have a place. To be taken
        before the try that may be refused."""
        ...

    def health(self) -> tuple[StageHealth, ...]: ...

    def ready(self) -> bool: ...

    def workers(self) -> tuple[WorkerInfo, ...]: ...

    def stats(self) -> dict[str, dict[str, float]]:
        """Latest counters and gauges by stage (see contracts.messages.StageStats)."""
        ...

    def timings(self) -> tuple[Timing, ...]:
        """How long things took and waited in stages and on edges, likewise."""
        ...

    async def drained(self) -> None:
        """Returns when no stage holds anything of any request."""
        ...

    async def reset_cache(self) -> None: ...

    async def check_integrity(self) -> tuple[IntegrityReport, ...]: ...
