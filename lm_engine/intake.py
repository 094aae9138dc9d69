"""The door: turns a Generate message into a request the engine can surely finish, or refuses it by name."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from contracts.errors import BadRequest, ContextLengthExceeded, EngineError
from contracts.media import Prompt
from contracts.messages import Generate
from lm_engine.config import EngineConfig
from lm_engine.media_layout import MediaLayout
from lm_engine.sequence import Request, make_sequences

Positions = Callable[[Prompt], tuple[np.ndarray, float]]


class Intake:
    def __init__(
        self, config: EngineConfig, positions: Positions, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._config = config
        self._positions = positions
        self._clock = clock
        self._num_requests = 0

    def make_request(self, message: Generate) -> Request:
        """Raises ContextLengthExceeded, BadRequest or EngineError."""
        prompt, sampling = message.prompt, message.sampling
        max_length = self._max_length(message)
        media = MediaLayout(prompt)
        self._check_items(message, media)
        positions_AL, delta = self._positions(prompt)
        assert positions_AL.shape[1] == len(prompt.token_ids), "positions and prompt differ in length"
        model_stops = () if sampling.ignore_eos else self._config.eos_token_ids
        request = Request(
            message=message,
            positions_AL=positions_AL,
            position_delta=delta,
            media=media,
            arrival=self._num_requests,
            rank=self._rank(message.priority),
            stop_ids=frozenset((*model_stops, *sampling.stop_token_ids)),
        )
        make_sequences(request, max_length)
        if message.forced is not None:
            request.tail = "stop"
        elif message.speech and self._config.spoken_hidden == "all":
            request.tail = "length"
        self._num_requests += 1
        return request

    def _rank(self, priority: int) -> float:
        # Under aging every waiting request improves at the same rate, so the order is known on arrival.
        aged = self._config.policy == "priority"
        return priority * self._config.aging_s + self._clock() if aged else float(priority)

    def _max_length(self, message: Generate) -> int:
        """The length at which a sample is full. A tail (`Request.tail`) is one token more, so that the last
        token of the answer is computed and its hidden state is there."""
        prompt, max_tokens = message.prompt, message.sampling.max_tokens
        assert max_tokens >= 1, "the API checks max_tokens"
        num_prompt, forced = len(prompt.token_ids), message.forced
        if num_prompt == 0:
            raise BadRequest("The prompt is empty.", request_id=message.request_id, param="messages")
        context, capacity = self._config.context_length, self._config.kv_capacity_tokens
        need = num_prompt + (max_tokens if forced is None else len(forced))
        if need > context:
            raise self._too_long(message, f"The model's context holds {context} tokens, want {need}")
        given = num_prompt if forced is None else need
        if given > capacity:
            raise self._too_long(
                message, f"The KV cache holds {capacity} tokens, the prompt alone has {given}"
            )
        # The last token needs no KV of its own. An output that outgrows the cache ends with "length".
        has_tail = forced is not None or (message.speech and self._config.spoken_hidden == "all")
        return min(need + has_tail, capacity + 1)

    def _too_long(self, message: Generate, what: str) -> ContextLengthExceeded:
        prompt = message.prompt
        num_text = len(prompt.token_ids) - prompt.num_media_tokens
        parts = (
            f"{num_text} text, {prompt.num_media_tokens} media, {message.sampling.max_tokens} output tokens"
        )
        return ContextLengthExceeded(
            f"{what} ({parts}). Shorten the prompt, use smaller media or lower max_tokens.",
            request_id=message.request_id,
            param="messages",
        )

    def _check_items(self, message: Generate, media: MediaLayout) -> None:
        if not media.spans:
            return
        if self._config.embedding_width == 0:
            raise EngineError("this model takes no embeddings", request_id=message.request_id)
        longest = max(span.length for span in media.spans)
        if self._config.atomic_spans and longest > self._config.max_atomic_span:
            raise BadRequest(
                f"A media item has {longest} tokens, this deployment computes at most "
                f"{self._config.max_atomic_span} of one item. Use a smaller one.",
                request_id=message.request_id,
                param="messages",
            )
