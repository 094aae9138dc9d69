"""StageBoard: the state of every stage as the front process knows it, and the questions put to all of
them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Literal

from contracts.errors import EngineError
from contracts.media import MediaItem
from contracts.messages import (
    CacheWasReset,
    CheckIntegrity,
    Heard,
    IntegrityReport,
    Listen,
    ResetCache,
    StageStats,
    ToStage,
)
from contracts.timings import Timing, edge_name
from stages.start_progress import StartProgress

StageState = Literal["starting", "ready", "restarting", "failed"]
logger = logging.getLogger(__name__)

SendToStage = Callable[[str, ToStage], None]


class StageBoard:
    """All methods run on the front process's loop."""

    def __init__(
        self, stages: tuple[str, ...], send: SendToStage, progress: StartProgress | None = None
    ) -> None:
        self._send = send
        self._progress = progress or StartProgress()
        self._states: dict[str, StageState] = dict.fromkeys(stages, "starting")
        self._details: dict[str, str] = {}
        self.stats: dict[str, dict[str, float]] = {}  # by stage, and by edge ("vision->thinker")
        self._timings: dict[str, tuple[Timing, ...]] = {}
        self._changed = asyncio.Event()
        self._answers: dict[int, tuple[set[str], asyncio.Future[None]]] = {}
        self._reports: dict[int, list[IntegrityReport]] = {}
        self._heard: dict[int, Heard] = {}
        self._next_token = 0

    # --- states -----------------------------------------------------------------------------------------

    def state(self, stage: str) -> StageState:
        return self._states[stage]

    def is_ready(self, stage: str) -> bool:
        return self._states[stage] == "ready"

    def all_ready(self) -> bool:
        return all(state == "ready" for state in self._states.values())

    def states(self) -> dict[str, tuple[str, str]]:
        """Stage → state and what to say of it."""
        return {name: (state, self._details.get(name, "")) for name, state in self._states.items()}

    def put(self, stage: str, state: StageState, detail: str | None = None) -> None:
        self._states[stage] = state
        if state == "ready":
            logger.info("stage %s is ready: %s", stage, detail)
        if detail is not None:
            self._details[stage] = detail
        if state == "restarting":
            self._progress.begin(stage, "starting again")
        else:
            self._progress.end(stage)
        self.touch()
        if state != "ready":
            for token in [t for t, (waiting, _) in self._answers.items() if stage in waiting]:
                self._answered(token, stage)

    def begun(self, stage: str, doing: str) -> None:
        """A step of its start."""
        self._details[stage] = doing
        self._progress.begin(stage, doing)

    def touch(self) -> None:
        """Wakes those who wait for a change."""
        self._changed.set()

    async def changed(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    async def wait_started(self) -> None:
        """Returns when every stage is ready; raises EngineError when one failed to start."""
        while not self.all_ready():
            for stage, state in self._states.items():
                if state == "failed":
                    raise EngineError(self._details[stage], stage=stage)
            await self.changed()

    # --- questions ---------------------------------------------------------------------------------------

    async def reset_cache(self) -> None:
        token, stages, answered = self._ask()
        for stage in stages:
            self._send(stage, ResetCache(token))
        await answered

    async def check_integrity(self) -> tuple[IntegrityReport, ...]:
        token, stages, answered = self._ask()
        for stage in stages:
            self._send(stage, CheckIntegrity(token))
        await answered
        return tuple(self._reports.pop(token, ()))

    def num_asked(self, stage: str) -> int:
        """Questions that it has not answered yet."""
        return sum(stage in waiting for waiting, _ in self._answers.values())

    async def listen(self, stage: str, item: MediaItem) -> Heard | None:
        """None: the stage went away before it answered."""
        self._next_token += 1
        token, answered = self._next_token, asyncio.get_running_loop().create_future()
        self._answers[token] = ({stage}, answered)
        self._send(stage, Listen(token, item))
        await answered
        return self._heard.pop(token, None)

    def answered(self, message: CacheWasReset | IntegrityReport | Heard) -> None:
        if isinstance(message, Heard) and message.token in self._answers:
            self._heard[message.token] = message
        if isinstance(message, IntegrityReport):
            self._reports.setdefault(message.token, []).append(message)
        if message.token in self._answers:
            self._answered(message.token, message.stage)

    def told(self, message: StageStats) -> None:
        self.stats[message.stage] = message.values
        for target, values in message.edges.items():
            self.stats[edge_name(message.stage, target)] = values
        self._timings[message.stage] = message.timings

    def timings(self) -> tuple[Timing, ...]:
        return tuple(timing for timings in self._timings.values() for timing in timings)

    def _ask(self) -> tuple[int, tuple[str, ...], asyncio.Future[None]]:
        """A question's number, who is asked, and the future of their last answer."""
        self._next_token += 1
        stages = tuple(stage for stage, state in self._states.items() if state == "ready")
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if stages:
            self._answers[self._next_token] = (set(stages), future)
        else:
            future.set_result(None)
        return self._next_token, stages, future

    def _answered(self, token: int, stage: str) -> None:
        waiting, future = self._answers[token]
        waiting.discard(stage)
        if not waiting:
            del self._answers[token]
            if not future.done():
                future.set_result(None)
