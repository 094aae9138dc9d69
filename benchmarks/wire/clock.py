"""The clock every measurement reads, so that tests can put exact times on a run. Seconds throughout."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Seconds on a monotonic scale with an arbitrary zero."""
        ...

    async def sleep_until(self, at_s: float) -> None:
        """Returns once `now()` has reached `at_s`; at once when it already has."""
        ...

    def cpu_s(self) -> float:
        """CPU seconds this process has used."""
        ...


class MonotonicClock:
    def now(self) -> float:
        return time.perf_counter()

    def cpu_s(self) -> float:
        return time.process_time()

    async def sleep_until(self, at_s: float) -> None:
        delay_s = at_s - self.now()
        if delay_s > 0:
            await asyncio.sleep(delay_s)
