"""StartProgress: what a start is at, by who does it; told to clients that ask and, while it lasts, to the
log."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)

LOG_EVERY_S = 10.0


class StartProgress:
    """`who`: a stage, or a part of the front process. All methods on one event loop."""

    def __init__(self) -> None:
        self._steps: dict[str, tuple[str, float]] = {}  # who → doing what, since when (monotonic)
        self._timer: asyncio.TimerHandle | None = None
        self._has_begun = False

    def begin(self, who: str, doing: str) -> None:
        """Ends what it did before."""
        self._has_begun = True
        self._steps[who] = (doing, time.monotonic())

    def end(self, who: str) -> None:
        self._steps.pop(who, None)

    @contextmanager
    def step(self, who: str, doing: str) -> Iterator[None]:
        """Of the front process, whose steps nobody else logs."""
        self.begin(who, doing)
        began_s = time.monotonic()
        yield
        self.end(who)
        logger.info("%s: %s took %.1f s", who, doing, time.monotonic() - began_s)

    def by_who(self) -> dict[str, str]:
        now = time.monotonic()
        return {who: f"{doing}, {now - since:.0f} s so far" for who, (doing, since) in self._steps.items()}

    def text(self) -> str:
        steps = "; ".join(f"{who}: {doing}" for who, doing in self.by_who().items())
        return steps or ("nearly there" if self._has_begun else "beginning")

    @contextmanager
    def logged(self) -> Iterator[None]:
        """Within it a line says every `LOG_EVERY_S` what is under way."""
        self._set_timer()
        try:
            yield
        finally:
            assert self._timer is not None
            self._timer.cancel()

    def _set_timer(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(LOG_EVERY_S, self._tell)

    def _tell(self) -> None:
        for who, doing in self.by_who().items():
            logger.info("%s: %s", who, doing)
        self._set_timer()
