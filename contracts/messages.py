"""Control-plane messages: msgspec structs, tagged, one union per direction. Tensors never travel here."""

from __future__ import annotations

from typing import Literal

import msgspec

from contracts.errors import ErrorInfo
from contracts.media import MediaItem, Prompt
from contracts.params import SamplingParams
from contracts.timings import Timing

FinishReason = Literal["stop", "length", "abort", "error"]


# --- coordinator → stage ------------------------------------------------------------------------------------
class Align(msgspec.Struct, frozen=True, kw_only=True):
    """To an encoder-decoder: lay the prompt's last `num_tokens` tokens along the first `num_positions`
    positions
    of the encoder's output, by cross-attention."""

    num_tokens: int
    num_positions: int


class Generate(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Start a request in an LM stage. `resume` holds, per sample, tokens already sent to the client
    (replay).

    `speech`: send the streams "prompt" and "text" over the edge to the talker; a replay sends both from the
    start. `forced` (only with `speech`): the answer is given, without its end token; it is computed in one
    prefill, nothing is sampled, and one Generated without tokens ends the sample ("stop").

    `align` (only with `max_tokens` 1): the one delta also says where the prompt's tokens begin.
    """

    request_id: str
    prompt: Prompt
    sampling: SamplingParams
    priority: int = 0  # lower runs first
    tenant: str = ""
    cache_salt: str | None = None
    resume: tuple[tuple[int, ...], ...] = ()
    speech: bool = False
    forced: tuple[int, ...] | None = None
    align: Align | None = None


class Speak(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Start a spoken answer in the talker. Its text arrives over the edge, maybe before this message.

    `max_frames`: what it may ever produce, its KV is reserved for them. `granted_frames`: the first Grant.
    """

    request_id: str
    prompt: Prompt
    voice: str
    sampling: SamplingParams
    max_frames: int
    granted_frames: int


class Grant(msgspec.Struct, frozen=True, tag=True):
    """The talker may have produced `num_frames` frames in all; out of grant it waits. `final`: there will be
    no further grant; a stream that has come to it without an end of its own ends with "length".
    `most_frames`: no grant will go beyond it, known once the text has ended; what was reserved for more is
    given back."""

    request_id: str
    num_frames: int
    final: bool = False
    most_frames: int | None = None


class Vocode(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Start a stream of PCM in the vocoder. Its frames arrive over the edge, maybe before this message.
    `skip_samples`: the client has them already (replay). `seed` fixes the noise that some models draw."""

    request_id: str
    voice: str
    seed: int = 0
    skip_samples: int = 0


class Encode(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Encode one item and send its embeddings over the edge to `target` as stream `str(item_index)`.
    `features`: the
    bytes at the item's place in the arena, for a worker that cannot map it."""

    request_id: str
    item_index: int
    item: MediaItem
    target: str
    cache_salt: str | None = None
    features: bytes = b""


class Listen(msgspec.Struct, frozen=True, tag=True):
    """Write down what a sound says, by an encoder that can. Always answered with Heard, until when `item`'s
    features must stay. `features`: as in Encode."""

    token: int
    item: MediaItem
    features: bytes = b""


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Forget the request entirely. Always answered with Aborted, also for an unknown id."""

    request_id: str


class StopSample(msgspec.Struct, frozen=True, tag=True):
    """End one of the n samples early (a stop string matched in the front process)."""

    request_id: str
    sample: int


class ResetCache(msgspec.Struct, frozen=True, tag=True):
    """Drop every cached block or embedding that nothing uses. Answered with CacheWasReset."""

    token: int


class CheckIntegrity(msgspec.Struct, frozen=True, tag=True):
    """Run the conservation checks. Answered with IntegrityReport."""

    token: int


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    pass


ToStage = (
    Generate
    | Speak
    | Grant
    | Vocode
    | Encode
    | Listen
    | Abort
    | StopSample
    | ResetCache
    | CheckIntegrity
    | Shutdown
)


# --- stage → coordinator ------------------------------------------------------------------------------------
class EmbeddingsNeeded(msgspec.Struct, frozen=True, tag=True):
    """The LM's prefix lookup left these items uncovered: get them encoded (again)."""

    request_id: str
    item_indices: tuple[int, ...]


class FeaturesNeeded(msgspec.Struct, frozen=True, tag=True):
    """The encoder has neither embeddings nor features of this item: preprocess it again and resend Encode."""

    request_id: str
    item_index: int


class FeaturesConsumed(msgspec.Struct, frozen=True, tag=True):
    """The encoder no longer reads the item's shared features: their lease may end."""

    request_id: str
    item_index: int


class Heard(msgspec.Struct, frozen=True, tag=True):
    """`text`: "" where no word was said. `error`: instead of it."""

    token: int
    stage: str
    text: str = ""
    error: ErrorInfo | None = None


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Natural-log probabilities of one position, finite (clamped at -9999)."""

    chosen: float
    rank: int  # of the chosen token, 1 = most likely
    top: tuple[tuple[int, float], ...]


class SampleDelta(msgspec.Struct, frozen=True, kw_only=True):
    sample: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the end token that finished it; it is also the last of token_ids
    alignment: tuple[int, ...] = ()  # first position of each token that was to be aligned


class Generated(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """New tokens of a request. The first one carries the prefix-cache share of its prompt."""

    request_id: str
    deltas: tuple[SampleDelta, ...]
    num_cached_tokens: int | None = None


class Audio(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """PCM of a request, in order: float32 little-endian, mono. `finish_reason` is set on the last one, which
    may be empty."""

    request_id: str
    pcm: bytes
    finish_reason: FinishReason | None = None


class Failed(msgspec.Struct, frozen=True, tag=True):
    request_id: str
    error: ErrorInfo


class Aborted(msgspec.Struct, frozen=True, tag=True):
    request_id: str
    stage: str


class CacheWasReset(msgspec.Struct, frozen=True, tag=True):
    token: int
    stage: str


class IntegrityReport(msgspec.Struct, frozen=True, tag=True):
    """`problem` is None when every conservation law holds; `busy` tells that requests were in flight."""

    token: int
    stage: str
    problem: str | None
    busy: bool


class StageStep(msgspec.Struct, frozen=True, tag=True):
    """The stage starts, and this is what it does now ("loading weights (257 MiB)")."""

    stage: str
    doing: str


class StageReady(msgspec.Struct, frozen=True, tag=True):
    stage: str
    detail: str  # the capacity line shown at start-up


class StageStats(msgspec.Struct, frozen=True, tag=True):
    """Counters (monotonic, end in _total) and gauges of a stage, by their metric name without prefix; the
    counters of the edges that leave it, by target; its times and those of its ends of edges."""

    stage: str
    values: dict[str, float]
    edges: dict[str, dict[str, float]] = {}
    timings: tuple[Timing, ...] = ()


class StageFailed(msgspec.Struct, frozen=True, tag=True):
    """The stage itself cannot go on (not one request's fault)."""

    stage: str
    error: ErrorInfo


FromStage = (
    EmbeddingsNeeded
    | FeaturesNeeded
    | FeaturesConsumed
    | Heard
    | Generated
    | Audio
    | Failed
    | Aborted
    | CacheWasReset
    | IntegrityReport
    | StageStep
    | StageReady
    | StageStats
    | StageFailed
)
