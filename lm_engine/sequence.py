"""State of a request and of each of its samples (sequences) inside the engine."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from contracts.messages import FinishReason, Generate
from lm_engine.media_layout import MediaLayout
from lm_engine.prefix_cache import BlockContent, Extras

if TYPE_CHECKING:
    from torch import Tensor

NO_SLOT = -1
_MASK_64 = (1 << 64) - 1
_GOLDEN_64 = 0x9E3779B97F4A7C15


class State(Enum):
    """
    HELD ──▶ WAITING ◀──▶ RUNNING      HELD: sample i > 0 before the first finished prefill of its request
      └─────────┴────────────┴──▶ FINISHED
    """

    HELD = "held"
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False, slots=True)
class Sequence:
    """One sample. Of `token_ids` (prompt, then output) the first `num_computed` have their KV planned or
    written; `num_in_flight` more tokens are drawn by steps whose results are not known yet."""

    request: Request
    sample: int
    seed: int
    token_ids: list[int]
    max_length: int  # finishes with "length" when it has so many tokens
    state: State = State.WAITING
    slot: int = NO_SLOT
    num_computed: int = 0
    num_landed: int = 0  # of a running prefill with media: KV written by finished steps
    num_in_flight: int = 0
    block_ids: list[int] = field(default_factory=list)
    identities: list[int] = field(default_factory=list)  # prefix-cache identity of each full block so far
    next_full: int = 0  # length at which the next block is full and gets its identity
    need_from: int | None = None  # of a waiting one: embeddings from here on were asked for it
    parked: bool = False  # waiting outside the queue, for embeddings or behind a prefill

    @property
    def total(self) -> int:
        return len(self.token_ids) + self.num_in_flight

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.request.num_prompt

    @property
    def order(self) -> tuple[float, int, int]:
        """Who keeps memory: smaller first. Total, so two sequences never preempt each other in turns."""
        return (self.request.rank, self.request.arrival, self.sample)

    def contents(self, first: int, last: int, block_size: int) -> Iterator[BlockContent]:
        """Contents of the blocks [first, last), all full."""
        of_prompt = self.request.prompt_contents(block_size)
        yield from of_prompt[first:last]
        for index in range(max(first, len(of_prompt)), last):
            start = index * block_size
            tokens = array("I", self.token_ids[start : start + block_size]).tobytes()
            yield tokens, self.request.extras(index, block_size)

    def needs_embeddings_before(self, end: int) -> bool:
        """Whether it still has to compute, as far as is known now, a position before `end`."""
        match self.state:
            case State.RUNNING:
                return self.num_landed < end
            case State.HELD:
                return self.request.num_prompt - 1 < end
            case State.WAITING:
                return self.need_from is not None and self.need_from < end
            case State.FINISHED:
                return False


@dataclass(eq=False, slots=True)
class Request:
    message: Generate
    positions_AL: np.ndarray  # [A, num_prompt]
    position_delta: float
    media: MediaLayout
    arrival: int  # counts requests
    rank: float  # smaller is more important
    stop_ids: frozenset[int]
    lora_id: int = 0
    sequences: list[Sequence] = field(default_factory=list)
    claims: dict[int, Tensor | None] = field(default_factory=dict)  # item → embeddings, None = asked for
    num_running: int = 0
    num_unfinished: int = 0
    queued_since_s: float | None = field(default_factory=time.monotonic)  # None: it was admitted once
    num_cached_tokens: int | None = None  # prompt tokens served from the prefix cache, once known
    reported: bool = False  # its first Generated, with the cached share, is out
    # With speech: the last token that is drawn is none of the answer's, which then ends with this reason.
    tail: FinishReason | None = None
    tail_token: int | None = None  # the end token that a replayed answer had; it is not computed again
    id: str = ""
    num_prompt: int = 0
    min_tokens: int = 0
    cache_salt: str | None = None
    tenant: str = ""

    _prompt_contents: list[BlockContent] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.id = self.message.request_id
        self.num_prompt = len(self.message.prompt.token_ids)
        self.min_tokens = self.message.sampling.min_tokens
        self.cache_salt = self.message.cache_salt
        self.tenant = self.message.tenant

    def extras(self, index: int, block_size: int) -> Extras:
        start = index * block_size
        extras = self.media.extras(start, start + block_size)
        return extras if index else (self.cache_salt, self.lora_id, *extras)

    def prompt_contents(self, block_size: int) -> list[BlockContent]:
        """Of the blocks that the prompt fills: made once, since it is looked up more than once. Not to be
        written to; every call has the same block size."""
        num_blocks = self.num_prompt // block_size
        if len(self._prompt_contents) < num_blocks:
            ids = array("I", self.message.prompt.token_ids)
            tokens = np.frombuffer(ids, np.dtype((np.void, block_size * ids.itemsize)), num_blocks)
            extras = self.media.block_extras(num_blocks, block_size)
            extras[0] = self.extras(0, block_size)
            self._prompt_contents = list(zip(tokens.tolist(), extras, strict=True))
        return self._prompt_contents

    @property
    def held(self) -> list[Sequence]:
        return [seq for seq in self.sequences if seq.state is State.HELD]


def make_sequences(request: Request, max_length: int) -> None:
    """Gives the request its samples: the first waits, the others are held until its prompt is computed."""
    message = request.message
    seed = message.sampling.seed
    assert seed is not None or message.sampling.greedy, "the coordinator fills in the seed"
    for sample in range(message.sampling.n):
        sent = message.resume[sample] if sample < len(message.resume) else message.forced or ()
        request.sequences.append(
            Sequence(
                request=request,
                sample=sample,
                seed=sample_seed(seed or 0, sample),
                token_ids=[*message.prompt.token_ids, *sent],
                max_length=max_length,
                state=State.WAITING if sample == 0 else State.HELD,
            )
        )
    request.num_unfinished = len(request.sequences)


def sample_seed(seed: int, sample: int) -> int:
    """Seed of sample i: mix(mix(seed) + i · 0x9E3779B97F4A7C15) modulo 2⁶⁴, shifted right by one to fit a
    signed word. mix is splitmix64's finaliser. Does not depend on n."""
    return _mix_64(_mix_64(seed & _MASK_64) + sample * _GOLDEN_64 & _MASK_64) >> 1


def _mix_64(x: int) -> int:
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _MASK_64
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _MASK_64
    return x ^ x >> 31
