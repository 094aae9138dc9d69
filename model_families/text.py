"""Text in and out of a checkpoint: its tokenizer and chat template, with user text that cannot forge
special tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, get_args

import jinja2
import msgspec
from huggingface_hub.errors import StrictDataclassError
from tokenizers import Tokenizer

from contracts.conversation import Conversation, MediaPart, Message, Role, TextPart, ToolCall
from contracts.errors import BadRequest
from contracts.media import Modality
from model_families.checkpoint import CONFIG_FILE, checkpoint_error, read_config
from model_families.token_bytes import TokenBytes
from model_families.user_text import Json, UserText


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


# What a template may raise on input it does not expect, beside its own raise_exception.
_TEMPLATE_ERRORS = (jinja2.TemplateError, TypeError, ValueError, KeyError)
# What transformers may raise on a folder whose JSON says what it does not expect: it checks every field, also
# those that nothing here reads.
_FOLDER_ERRORS = (
    StrictDataclassError,
    ArithmeticError,
    AttributeError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)


class _ModelType(msgspec.Struct, frozen=True):
    model_type: str = ""


_PROBE = "omnistageprobe"
_NO_MEDIA: Mapping[Modality, str] = {}


class HFChatTokenizer:
    """The tokenizer and chat template of a Hugging Face folder.

    `placeholders`: the text that stands for an item where the template takes message content as a string
    only. `vocab_size` counts the ids that have a token; the model may have more rows.
    """

    def __init__(self, folder: Path, placeholders: Mapping[Modality, str] = _NO_MEDIA) -> None:
        # Seconds, which a worker of the same family must not pay: it sees no text.
        from transformers import CONFIG_MAPPING, AutoTokenizer, PreTrainedConfig

        # It would warn of a model type that it does not know.
        named = read_config(folder, _ModelType).model_type if (folder / CONFIG_FILE).exists() else ""
        config = PreTrainedConfig() if named and named not in CONFIG_MAPPING else None
        try:
            self._hf = AutoTokenizer.from_pretrained(folder, config=config)
        except _FOLDER_ERRORS as error:
            reason = " ".join(str(error).split())
            raise checkpoint_error(
                f"transformers does not take {folder}, config.json or tokenizer: {reason}"
            ) from error
        if not self._hf.is_fast:
            raise ValueError(f"{folder} has no tokenizer that the tokenizers library can load")
        backend: Tokenizer = self._hf.backend_tokenizer
        self._placeholders = placeholders
        self._bytes = TokenBytes(backend)
        added = backend.get_added_tokens_decoder()
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        control_ids = self._special_ids | (_named_token_ids(folder) & added.keys())
        self._user_text = UserText(backend, {added[i].content: i for i in control_ids})
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values()) + 1
        template = _legacy_template(folder)
        if template is not None:
            self._hf.chat_template = template
        source = json.dumps(self._hf.chat_template)
        self._knows_developer = "developer" in source
        self._takes_list = {role: self._renders_alike(role) for role in get_args(Role)}
        self._takes_string = {role: self._renders_string(role) for role in get_args(Role)}

    # --- text → ids -----------------------------------------------------------------------------------------
    def encode(
        self, text: str, *, add_special_tokens: bool = False, parse_special: bool = False
    ) -> list[int]:
        text = text if parse_special else self._user_text.mark(text)
        return self._user_text.encode(text, add_special_tokens=add_special_tokens)

    def encode_conversation(self, conversation: Conversation) -> list[int]:
        if self._hf.chat_template is None:
            raise BadRequest("this model has no chat template; use /v1/completions", param="messages")
        if not conversation.messages:
            raise BadRequest("messages must hold at least one message", param="messages")
        try:
            return self._user_text.encode(self._render(conversation))
        except RecursionError as error:
            raise BadRequest("tools or tool calls are nested too deeply", param="messages") from error

    def _render(self, conversation: Conversation) -> str:
        messages = [self._template_message(i, m) for i, m in enumerate(conversation.messages)]
        tools = self._template_tools(conversation)
        continues = conversation.continue_final_message
        try:
            rendered = self._hf.apply_chat_template(
                messages,
                tools=tools,
                add_generation_prompt=conversation.add_generation_prompt and not continues,
                continue_final_message=continues,
                tokenize=False,
            )
        except _TEMPLATE_ERRORS as error:
            raise BadRequest(self._refusal(error), param="messages") from error
        assert isinstance(rendered, str)
        return rendered

    def _refusal(self, error: Exception) -> str:
        # transformers appends the whole conversation to some of its messages
        reason = self._user_text.unmark(str(error)).partition("Final message to continue:")[0]
        return f"the model's chat template refuses this conversation: {reason}"

    def _template_tools(self, conversation: Conversation) -> Json:
        if conversation.tools_json is None:
            return None
        return self._user_text.mark_json(json.loads(conversation.tools_json))

    def _template_message(self, index: int, message: Message) -> dict[str, Json]:
        if not message.parts and message.role != "assistant":
            raise BadRequest(
                f"the content of a {message.role} message must not be empty",
                param=f"messages[{index}].content",
            )
        role = "system" if message.role == "developer" and not self._knows_developer else message.role
        rendered: dict[str, Json] = {"role": role, "content": self._content(index, role, message)}
        if message.name is not None:
            rendered["name"] = self._user_text.mark(message.name)
        if message.tool_call_id is not None:
            rendered["tool_call_id"] = self._user_text.mark(message.tool_call_id)
        if message.tool_calls:
            rendered["tool_calls"] = [self._tool_call(call) for call in message.tool_calls]
        return rendered

    def _content(self, index: int, role: Role, message: Message) -> Json:
        """A string where that says the same, else parts if the template reads parts, else text in order."""
        texts = [p for p in message.parts if isinstance(p, TextPart)]
        if len(texts) == len(message.parts) <= 1 and self._takes_string[role]:
            return self._user_text.mark(texts[0].text) if texts else ""
        if self._takes_list[role]:
            return [self._list_part(part) for part in message.parts]
        return "\n".join(self._string_part(index, message.role, part) for part in message.parts)

    def _list_part(self, part: TextPart | MediaPart) -> Json:
        if isinstance(part, TextPart):
            return {"type": "text", "text": self._user_text.mark(part.text)}
        return {"type": part.source.modality}

    def _string_part(self, index: int, role: Role, part: TextPart | MediaPart) -> str:
        if isinstance(part, TextPart):
            return self._user_text.mark(part.text)
        placeholder = self._placeholders.get(part.source.modality)
        if placeholder is None:
            raise BadRequest(
                f"this model takes no {part.source.modality} in a {role} message",
                param=f"messages[{index}].content",
            )
        return placeholder

    def _tool_call(self, call: ToolCall) -> Json:
        try:
            arguments = json.loads(call.arguments)
        except json.JSONDecodeError:
            arguments = None
        # Templates print the arguments as JSON; what is no JSON object goes in as the text it is.
        arguments = arguments if isinstance(arguments, dict) else call.arguments
        function: Json = {
            "name": self._user_text.mark(call.name),
            "arguments": self._user_text.mark_json(arguments),
        }
        return {"id": self._user_text.mark(call.id), "type": "function", "function": function}

    # --- what the template takes ----------------------------------------------------------------------------
    def _renders_alike(self, role: Role) -> bool:
        parts: Json = [{"type": "text", "text": _PROBE}]
        as_list = self._probe(role, parts)
        if as_list is None or _PROBE not in as_list:
            return False
        as_string = self._probe(role, _PROBE)
        # A template that prints the list itself shows its keys.
        return as_list == as_string or ("'type'" not in as_list and '"type"' not in as_list)

    def _renders_string(self, role: Role) -> bool:
        rendered = self._probe(role, _PROBE)
        return rendered is not None and _PROBE in rendered

    def _probe(self, role: Role, content: Json) -> str | None:
        """The rendering of a conversation that ends in a message with this content; None: refused."""
        if self._hf.chat_template is None:
            return None
        message: Json = {"role": role, "content": content}
        question: Json = {"role": "user", "content": "?"}
        before = [question] if role in ("assistant", "tool") else []
        after = [question] if role in ("system", "developer") else []
        try:
            return str(self._hf.apply_chat_template([*before, message, *after], tokenize=False))
        except _TEMPLATE_ERRORS:
            return None

    # --- ids → text -----------------------------------------------------------------------------------------
    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return str(self._hf.decode(token_ids, skip_special_tokens=skip_special_tokens))

    def token_text(self, token_id: int) -> str:
        return self._bytes[token_id].decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return self._bytes[token_id]

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special_ids


def _named_token_ids(folder: Path) -> set[int]:
    """Ids that the model's configuration gives a meaning (image_token_id, audio_token_index, ...)."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) if path.exists() else {}
    suffixes = ("_token_id", "_token_index")
    named = [*config.items(), *config.get("thinker_config", {}).items()]
    return {value for key, value in named if key.endswith(suffixes) and isinstance(value, int)}


def _legacy_template(folder: Path) -> str | None:
    """The template of chat_template.json (older vision checkpoints), which goes before the tokenizer's."""
    path = folder / "chat_template.json"
    if (folder / "chat_template.jinja").exists() or not path.exists():
        return None
    template = json.loads(path.read_text())["chat_template"]
    assert isinstance(template, str)
    return template
