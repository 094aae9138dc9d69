"""The steps of a stage's start, in the log of the process that takes them and told to the front process."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from stages.memory_plan import StagePlan

logger = logging.getLogger(__name__)

Tell = Callable[[str], None]  # what the stage does now, to the front process; from the stage's thread


def untold(doing: str) -> None:
    """Where the log is enough."""


@contextmanager
def start_step(plan: StagePlan, doing: str, tell: Tell) -> Iterator[None]:
    """A step may take minutes; the process's log names the worker."""
    rank = f" rank {plan.rank}" if plan.rank else ""
    who = f"stage {plan.stage}{rank} on {plan.device}"
    logger.info("%s: %s", who, doing)
    tell(doing)
    began_s = time.monotonic()
    yield
    logger.info("%s: %s took %.1f s", who, doing, time.monotonic() - began_s)
