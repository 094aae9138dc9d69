"""What a request gives, as token ids that fit the model's context; refused where they cannot."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Iterator
from functools import partial

import msgspec

from contracts.conversation import Conversation, TextPart
from contracts.errors import BadRequest, ContextLengthExceeded
from contracts.media import MediaItem, Prompt
from contracts.params import SamplingParams
from model_families.family import Family
from stages.service import UNLIMITED, GenerationRequest, SpeechOptions

# Longer conversations are tokenised off the event loop.
INLINE_TOKENIZE_CHARS = 20_000


# What is known of its media is found within it, and media that are new are with a worker by then.
EARLY_AFTER_S = 0.002


class EarlyTokens:
    """The token ids of a conversation, made while its media are awaited: media change them only where the
    family lays them out. None when the wait was short, or `encode` refuses: whoever builds the prompt will
    hear it."""

    def __init__(self, encode: Callable[[], list[int]] | None, after_s: float = EARLY_AFTER_S) -> None:
        self.ids: list[int] | None = None
        self._encode = encode
        self._after_s = after_s
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> EarlyTokens:
        if self._encode is not None:
            self._timer = asyncio.get_running_loop().call_later(self._after_s, self._make, self._encode)
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _make(self, encode: Callable[[], list[int]]) -> None:
        with contextlib.suppress(BadRequest):
            self.ids = encode()


class PromptDesk:
    def __init__(self, family: Family, context_length: int) -> None:
        self._family = family
        self._tokenizer = family.tokenizer
        self._context_length = context_length
        token_text = self._tokenizer.token_text
        self._longest_token_chars = max(len(token_text(i)) for i in range(self._tokenizer.vocab_size))

    def early(self, given: Conversation | str | tuple[int, ...]) -> EarlyTokens:
        """To be entered while the media of `given` are awaited."""
        if not isinstance(given, Conversation) or _num_chars(given) > INLINE_TOKENIZE_CHARS:
            return EarlyTokens(None)
        return EarlyTokens(partial(self._tokenizer.encode_conversation, given))

    async def build(
        self,
        given: Conversation | str | tuple[int, ...],
        items: list[MediaItem],
        early_ids: list[int] | None = None,
    ) -> Prompt:
        """`early_ids`: of `EarlyTokens`."""
        if isinstance(given, tuple):
            self._check_token_ids(given)
            return Prompt(list(given))
        tokenizer = self._tokenizer
        self._check_text_length(given)
        if isinstance(given, str):  # a prompt the client has rendered itself: its special tokens are meant
            if len(given) > INLINE_TOKENIZE_CHARS:
                ids = await asyncio.to_thread(
                    tokenizer.encode, given, add_special_tokens=True, parse_special=True
                )
            else:
                ids = tokenizer.encode(given, add_special_tokens=True, parse_special=True)
        elif early_ids is not None:
            ids = early_ids
        elif _num_chars(given) > INLINE_TOKENIZE_CHARS:
            ids = await asyncio.to_thread(tokenizer.encode_conversation, given)
        else:
            ids = tokenizer.encode_conversation(given)
        if not ids:
            raise BadRequest("the prompt is empty", param="prompt")
        return self._family.layout(ids, items)

    def forced(self, speech: SpeechOptions) -> tuple[int, ...] | None:
        """The tokens of a text to be spoken word for word."""
        if speech.verbatim is None:
            return None
        self._check_text_length(speech.verbatim)
        return tuple(self._tokenizer.encode(speech.verbatim, add_special_tokens=False, parse_special=False))

    def complete(
        self, prompt: Prompt, request: GenerationRequest, forced: tuple[int, ...] | None
    ) -> SamplingParams:
        """Clips an unlimited `max_tokens` to the context and draws a seed where none is given. A forced
        answer takes what it takes."""
        sampling, num_prompt = request.sampling, len(prompt.token_ids)
        room = self._context_length - num_prompt
        max_tokens = max(room, 0) if sampling.max_tokens >= UNLIMITED else sampling.max_tokens
        if forced is not None:
            max_tokens = len(forced)
        if max_tokens < 1 or max_tokens > room:
            media = prompt.num_media_tokens
            fits = f"; at most {room} of output fit" if room > 0 and forced is None else ""
            raise ContextLengthExceeded(
                f"this model's context is {self._context_length} tokens; the request needs"
                f" {num_prompt + max(max_tokens, 1)}: {num_prompt - media} of text, {media} of media,"
                f" {max(max_tokens, 1)} of output{fits}",
                param=request.max_tokens_param if fits else prompt_param(request),
            )
        seed = sampling.seed if sampling.seed is not None else secrets.randbits(63)
        min_tokens = min(sampling.min_tokens, max_tokens)
        return msgspec.structs.replace(sampling, max_tokens=max_tokens, seed=seed, min_tokens=min_tokens)

    def _check_text_length(self, given: Conversation | str) -> None:
        """Refuses text that cannot fit however it is cut, before tokenising takes time and memory for it."""
        num_chars = len(given) if isinstance(given, str) else _num_chars(given)
        if num_chars > self._context_length * self._longest_token_chars:
            raise ContextLengthExceeded(
                f"{num_chars} characters of text cannot fit this model's context of"
                f" {self._context_length} tokens",
                param="prompt" if isinstance(given, str) else "messages",
            )

    def _check_token_ids(self, token_ids: tuple[int, ...]) -> None:
        vocab_size = self._family.decoder_config.vocab_size
        if not token_ids:
            raise BadRequest("the prompt is empty", param="prompt")
        for token_id in token_ids:
            if not 0 <= token_id < vocab_size:
                raise BadRequest(
                    f"token id {token_id} is not in the vocabulary of {vocab_size}", param="prompt"
                )


def prompt_param(request: GenerationRequest) -> str:
    """What the client calls its prompt."""
    if request.speech is not None and request.speech.verbatim is not None:
        return "input"
    return "messages" if isinstance(request.input, Conversation) else "prompt"


@contextlib.contextmanager
def naming_the_prompt(request: GenerationRequest) -> Iterator[None]:
    """Below here the prompt is "messages" or "prompt", whatever the client has sent it as."""
    try:
        yield
    except BadRequest as error:
        if error.param in ("messages", "prompt"):
            error.param = prompt_param(request)
        raise


def media_tokens(prompt: Prompt) -> dict[str, int]:
    counts: dict[str, int] = {}
    for span in prompt.spans:
        modality = prompt.items[span.item_index].modality
        counts[modality] = counts.get(modality, 0) + span.length
    return counts


def _num_chars(conversation: Conversation) -> int:
    return sum(len(p.text) for m in conversation.messages for p in m.parts if isinstance(p, TextPart))
