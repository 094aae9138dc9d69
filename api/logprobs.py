"""Log-probabilities in OpenAI's two formats."""

from __future__ import annotations

import math
from collections.abc import Iterable

from api.responses import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob
from api.sample_text import ScoredToken
from contracts.errors import EngineError
from stages.service import Service

FLOOR = -9999.0  # stands for "impossible": JSON has no -inf


def finite(logprob: float) -> float:
    if math.isnan(logprob):
        raise EngineError("the model produced an invalid probability (NaN)")
    return max(FLOOR, logprob)


class LogprobWriter:
    """`num_top`: alternatives per token that the client asked for."""

    def __init__(self, service: Service, num_top: int) -> None:
        self._tokenizer = service.tokenizer
        self._num_top = num_top

    def chat(self, tokens: Iterable[ScoredToken]) -> ChatLogprobs:
        return ChatLogprobs([self._chat_token(token) for token in tokens])

    def _chat_token(self, token: ScoredToken) -> TokenLogprob:
        chosen = self._top(token.token_id, token.logprobs.chosen)
        top = [self._top(i, p) for i, p in token.logprobs.top[: self._num_top]]
        return TokenLogprob(chosen.token, chosen.logprob, chosen.bytes, top)

    def _top(self, token_id: int, logprob: float) -> TopLogprob:
        data = self._tokenizer.token_bytes(token_id)
        return TopLogprob(self._tokenizer.token_text(token_id), finite(logprob), list(data))

    def completion(self, tokens: Iterable[ScoredToken]) -> CompletionLogprobs:
        tokens = tuple(tokens)
        return CompletionLogprobs(
            tokens=[self._key(t.token_id) for t in tokens],
            token_logprobs=[finite(t.logprobs.chosen) for t in tokens],
            top_logprobs=[self._alternatives(t) for t in tokens],
            text_offset=[t.offset for t in tokens],
        )

    def _alternatives(self, token: ScoredToken) -> dict[str, float]:
        """The chosen token is always among them, so there may be one more than asked for."""
        top = {self._key(i): finite(p) for i, p in token.logprobs.top[: self._num_top]}
        top.setdefault(self._key(token.token_id), finite(token.logprobs.chosen))
        return top

    def _key(self, token_id: int) -> str:
        """The token's text; for a piece of a character its bytes, so that two pieces never share a key."""
        data = self._tokenizer.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
