"""Text in and out of a checkpoint: its tokenizer and chat template, with user text that cannot forge
special tokens."""

from __future__ import annotations

from typing import Protocol

from contracts.conversation import Conversation


class ChatTokenizer(Protocol):
    """Thread-safe for reading. Token ids are the checkpoint's own."""

    vocab_size: int

    def encode(
        self, text: str, *, add_special_tokens: bool = False, parse_special: bool = False
    ) -> list[int]:
        """`parse_special` False: text that spells a special token is encoded as ordinary characters."""
        ...

    def encode_conversation(self, conversation: Conversation) -> list[int]:
        """Renders the chat template; media parts leave one placeholder token each, in order. User text
        never becomes
        a special token. Raises BadRequest when the template refuses the conversation."""
        ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str: ...

    def token_text(self, token_id: int) -> str:
        """The token alone as text (may hold U+FFFD for a partial character); for logprobs."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The token's exact bytes; for logprobs' `bytes` and for incremental decoding."""
        ...

    def is_special(self, token_id: int) -> bool: ...
