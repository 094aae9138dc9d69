"""From a group of generations to a response: all at once, or streamed with one write per engine step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from api.generation import ChoiceDelta, GenerationGroup
from api.responses import FinishText, Usage
from api.sample_text import ScoredToken
from api.schemas import StreamOptions
from api.sse import DONE, EventWriter

UsageField = Usage | None | msgspec.UnsetType


@dataclass(frozen=True)
class UsageMode:
    """`final`: a last chunk with usage alone. `continuous`: the counts so far in every chunk as well."""

    final: bool
    continuous: bool

    @staticmethod
    def of(options: StreamOptions | None) -> UsageMode:
        final = bool(options and options.include_usage)
        return UsageMode(final, final and bool(options and options.continuous_usage_stats))

    def field(self, group: GenerationGroup) -> UsageField:
        """What an ordinary chunk carries: null, not nothing, announces the final chunk (as OpenAI does)."""
        if self.continuous:
            return group.usage()
        return None if self.final else msgspec.UNSET


@dataclass
class Collected:
    """A whole choice."""

    pieces: list[str]
    tokens: list[ScoredToken] = field(default_factory=list)
    finish: FinishText | None = None
    stop_reason: str | int | None = None

    @property
    def text(self) -> str:
        return "".join(self.pieces)


async def collect(group: GenerationGroup, echoes: list[str]) -> tuple[list[Collected], Usage]:
    """Every choice, complete; `echoes` are the texts they start with."""
    choices = [Collected([echo]) for echo in echoes]
    async with group:
        await group.start()
        while not group.done:
            for step in await group.next_step():
                into, delta = choices[step.choice], step.delta
                into.pieces.append(delta.text)
                into.tokens.extend(delta.tokens)
                into.finish, into.stop_reason = delta.finish, delta.stop_reason
        usage = group.usage()
    return choices, usage


class ChunkEncoder(Protocol):
    """Makes a stream's events, as bytes ready to send."""

    def opening(self, usage: UsageField) -> bytes: ...

    def delta(self, step: ChoiceDelta, usage: UsageField) -> bytes: ...

    def final_usage(self, usage: Usage) -> bytes: ...


async def stream(group: GenerationGroup, chunks: ChunkEncoder, mode: UsageMode, writer: EventWriter) -> None:
    """The first write waits for the first token, so that errors until then keep their HTTP status.

    The generations are closed before the last write: a slow reader of the end holds nothing.
    """
    async with group:
        await group.start()
        step = await group.next_step()
        events = chunks.opening(mode.field(group))
        while True:
            if step:
                usage = mode.field(group)
                events += b"".join([chunks.delta(delta, usage) for delta in step])
            if group.done:
                break
            if events:
                await writer.write(events)
            events = b""
            step = await group.next_step()
        if mode.final:
            events += chunks.final_usage(group.usage())
    await writer.write(events + DONE, last=True)
