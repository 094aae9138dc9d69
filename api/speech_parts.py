"""The spoken pieces of one text, in order: the next one is under way while this one is being heard."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Literal

from api.generation import Generation
from contracts.errors import NoSpeech, TooManyRequests
from stages.service import AudioChunk


class _Piece:
    """A generation that may begin before its turn: accepted, and its first sound made.

    `departure`: a full server does not refuse the rest of a speech that it has begun; whenever a request has
    left, the piece asks again.
    """

    def __init__(
        self, make: Callable[[], Generation], departure: Callable[[], asyncio.Event] | None = None
    ) -> None:
        self._make = make
        self._departure = departure
        self.generation = make()
        self._first = asyncio.create_task(self._begin())
        self._heard_first = False

    async def _begin(self) -> AudioChunk | None:
        if self._departure is None:
            return await self._try()
        while True:
            place_freed = self._departure()
            try:
                return await self._try()
            except TooManyRequests as error:
                await self.generation.__aexit__(type(error), error, None)
                self.generation = self._make()
            await place_freed.wait()

    async def _try(self) -> AudioChunk | None:
        await self.generation.__aenter__()
        await self.generation.start()
        return await self._read()

    async def next(self) -> AudioChunk | None:
        """None: all of it was spoken."""
        if self._heard_first:
            return await self._read()
        chunk = await self._first
        self._heard_first = True
        return chunk

    async def _read(self) -> AudioChunk | None:
        while not self.generation.done:
            part = await self.generation.next_part()
            if isinstance(part, AudioChunk):
                return part
        return None

    def check_said(self) -> None:
        if not self.generation.num_audio_samples:
            raise NoSpeech("the model ended its speech before it began; try another text")

    async def close(self, kind: type[BaseException] | None, error: BaseException | None) -> None:
        self._first.cancel()
        await asyncio.gather(self._first, return_exceptions=True)
        if self.generation.entered:
            await self.generation.__aexit__(kind, error, None)


class SpeechParts:
    """The sound of all pieces. An async context manager: leaving it early aborts what is under way.

    At most two pieces are open: the one being heard and, once that has begun to sound, the one after it.
    """

    def __init__(
        self,
        makers: Iterable[Callable[[], Generation]],
        departure: Callable[[], asyncio.Event],
        *,
        goes_on: bool,
    ) -> None:
        """`departure`: see `stages.service.Service.departure`. `goes_on`: a piece that stays mute after
        others have sounded does not keep those behind it from being heard; `check_said` tells of it then."""
        self._makers = deque(makers)
        self._num_pieces = len(self._makers)
        self._departure = departure
        self._goes_on = goes_on
        self._mute: list[int] = []  # numbers of pieces, from 1
        self._open: deque[_Piece] = deque()
        self._begun = False
        self.num_prompt_tokens = 0
        self.num_samples = 0
        self._cut = False  # a piece was ended at its bound

    async def __aenter__(self) -> SpeechParts:
        self._open_next()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for piece in self._open:
            await piece.close(kind, error)

    def _open_next(self) -> None:
        if self._makers:
            self._open.append(_Piece(self._makers.popleft(), self._departure if self._begun else None))
            self._begun = True

    async def next(self) -> bytes | None:
        """The next samples, float32 little-endian; None after the last. Raises NoSpeech for a piece that
        ended before it began, unless the speech `goes_on` without it."""
        while self._open:
            piece = self._open[0]
            try:
                chunk = await piece.next()
                if chunk is None:
                    piece.check_said()
            except NoSpeech as error:
                if not (self._goes_on and self.num_samples):
                    raise
                self._mute.append(self._num_pieces - len(self._makers) - len(self._open) + 1)
                await self._leave(piece, error)
                continue
            if chunk is None:
                await self._leave(piece)
                continue
            self._cut |= chunk.finish_reason == "length"
            if not chunk.samples:
                continue
            self.num_samples += len(chunk.samples) // 4
            if len(self._open) == 1:
                self._open_next()
            return chunk.samples
        return None

    @property
    def finish_reason(self) -> Literal["stop", "length"]:
        return "length" if self._cut else "stop"

    def check_said(self) -> None:
        """At the end: raises NoSpeech where a part of the text was left unsaid."""
        if not self._mute:
            return
        numbers = ", ".join(map(str, self._mute))
        raise NoSpeech(
            f"of {self._num_pieces} parts of the text that were spoken one after another, part {numbers}"
            " stayed without sound: the model ended it before it began; speak that part again"
        )

    async def _leave(self, piece: _Piece, error: NoSpeech | None = None) -> None:
        assert piece.generation.prompt is not None
        self.num_prompt_tokens += len(piece.generation.prompt.prompt_token_ids)
        self._open.popleft()
        await piece.close(None if error is None else type(error), error)
        if not self._open:
            self._open_next()
