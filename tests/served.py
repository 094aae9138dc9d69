"""A service of a checkpoint on a loop in a thread, for tests that talk to the graph without HTTP."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import threading
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar
from unittest import mock

import numpy as np
from PIL import Image

from contracts.conversation import Conversation, MediaPart, Message, TextPart
from contracts.media import MediaSource
from contracts.messages import TokenLogprobs
from contracts.params import SamplingParams
from lm_engine.budgets import StepDraft
from lm_engine.engine import LMEngine
from lm_engine.scheduler import Scheduler
from stages.launch import serve_service
from stages.omni_service import OmniService
from stages.options import ServeOptions
from stages.service import GenerationRequest, PromptReady

T = TypeVar("T")
Shape = Literal["file", "one", "per-stage"]
TIMEOUT_S = 600.0  # never reached by a machine that is only slow


def picture(seed: int, width: int = 84, height: int = 84) -> Image.Image:
    """A seeded picture with structure at several scales."""
    rng = np.random.default_rng(seed)
    small = Image.fromarray(rng.integers(0, 256, (5, 7, 3), dtype=np.uint8))
    return small.resize((width, height), Image.Resampling.BILINEAR)


def data_url(image: Image.Image) -> str:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


Turn = tuple[str, Sequence["str | Image.Image | MediaSource"]]


def conversation(turns: Sequence[Turn]) -> Conversation:
    """Turns of (role, parts); a part is text, a picture, or other media as it is asked for."""
    messages = tuple(
        Message(
            role=role,  # type: ignore[arg-type]
            parts=tuple(_part(p) for p in parts),
        )
        for role, parts in turns
    )
    return Conversation(messages=messages)


def _part(part: str | Image.Image | MediaSource) -> TextPart | MediaPart:
    if isinstance(part, str):
        return TextPart(part)
    return MediaPart(part if isinstance(part, MediaSource) else MediaSource("image", data_url(part)))


def hf_messages(turns: Sequence[Turn]) -> tuple[list[dict[str, Any]], list[Image.Image]]:
    """The same conversation for the oracle."""
    messages = [
        {
            "role": role,
            "content": [
                {"type": "text", "text": p} if isinstance(p, str) else {"type": "image"} for p in parts
            ],
        }
        for role, parts in turns
    ]
    return messages, [p for _, parts in turns for p in parts if isinstance(p, Image.Image)]


@dataclass
class Answer:
    """Per sample: token ids, logprobs and finish reason."""

    prompt_token_ids: list[int] = field(default_factory=list)
    media_tokens: dict[str, int] = field(default_factory=dict)
    token_ids: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    finish_reasons: dict[int, str] = field(default_factory=dict)
    num_cached_tokens: int | None = None

    @property
    def tokens(self) -> list[int]:
        return self.token_ids[0]


@contextlib.contextmanager
def meeting(num_requests: int) -> Iterator[None]:
    """LM engines of this process begin with none of so many requests before all have come to them, and decode
    none before all have their embeddings: however fast the engine is, they run side by side."""
    has_work, plan_decodes = LMEngine.has_work, Scheduler._plan_decodes
    have_come = have_all = False

    def once_all_have_come(engine: LMEngine) -> bool:
        nonlocal have_come
        have_come = have_come or len(engine._scheduler.requests) >= num_requests
        return have_come and has_work(engine)

    def once_all_have_all(scheduler: Scheduler, draft: StepDraft) -> None:
        nonlocal have_all
        have_all = have_all or (bool(scheduler._decoding) and not scheduler.waits_for_embeddings)
        if have_all:
            plan_decodes(scheduler, draft)

    with (
        mock.patch.object(LMEngine, "has_work", once_all_have_come),
        mock.patch.object(Scheduler, "_plan_decodes", once_all_have_all),
    ):
        yield


class Served:
    """Context manager. `overrides` are `PATH=VALUE` settings of the deployment, `options` further
    ServeOptions."""

    def __init__(self, folder: Path, *overrides: str, workers: Shape = "one", **options: Any) -> None:
        self._options = ServeOptions(
            model=folder, dtype="float32", overrides=overrides, workers=workers, **options
        )
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), name="served")
        self._error: BaseException | None = None
        self._num_events = 0
        self._progress = asyncio.Event()
        self.service: OmniService

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        try:
            async with serve_service(self._options) as service:
                self.service = service
                self._ready.set()
                await self._stopping.wait()
        except BaseException as error:
            self._error = error
            raise
        finally:
            self._ready.set()

    def __enter__(self) -> Served:
        self._thread.start()
        assert self._ready.wait(TIMEOUT_S), "the service did not start"
        if self._error is not None:
            self._thread.join(TIMEOUT_S)
            raise self._error
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive(), "the service did not stop"

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(TIMEOUT_S)

    async def answer(self, turns: Sequence[Turn], cache_salt: str | None = None, **sampling: Any) -> Answer:
        params = SamplingParams(**{"temperature": 0.0, "max_tokens": 12, **sampling})
        request = GenerationRequest(input=conversation(turns), sampling=params, cache_salt=cache_salt)
        answer = Answer()
        async for event in self.service.generate(request):
            self._num_events += 1
            self._progress.set()
            if isinstance(event, PromptReady):
                answer.prompt_token_ids = event.prompt_token_ids
                answer.media_tokens = event.media_tokens
                continue
            if event.num_cached_tokens is not None:
                answer.num_cached_tokens = event.num_cached_tokens
            for delta in event.deltas:
                answer.token_ids.setdefault(delta.sample, []).extend(delta.token_ids)
                answer.logprobs.setdefault(delta.sample, []).extend(delta.logprobs)
                if delta.finish_reason is not None:
                    answer.finish_reasons[delta.sample] = delta.finish_reason
        return answer

    def ask(self, turns: Sequence[Turn], cache_salt: str | None = None, **sampling: Any) -> Answer:
        return self.run(self.answer(turns, cache_salt, **sampling))

    def ask_all(self, conversations: Sequence[Sequence[Turn]], **sampling: Any) -> list[Answer]:
        async def gather() -> list[Answer]:
            return list(await asyncio.gather(*(self.answer(turns, **sampling) for turns in conversations)))

        return self.run(gather())

    async def progress(self, num_events: int) -> None:
        """Returns after so many further events of any requests."""
        wanted = self._num_events + num_events
        async with asyncio.timeout(TIMEOUT_S):
            while self._num_events < wanted:
                self._progress.clear()
                await self._progress.wait()

    def stats(self, stage: str) -> dict[str, float]:
        return self.service.stats()[stage]

    def reset_cache(self) -> None:
        self.run(self.service.reset_cache())

    async def worker_restarted(self, stage: str, times: int) -> None:
        """Returns when the worker of `stage` has been started again that often and is ready."""
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                (worker,) = (w for w in self.service.workers() if stage in w.stages)
                if worker.restarts >= times and worker.state == "ready":
                    return
                await self.service.stages_changed()

    def assert_clean(self) -> None:
        """Every conservation law holds and nothing of any request is left."""

        async def check() -> list[str]:
            await self.service.drained()
            reports = await self.service.check_integrity()
            while any(r.busy for r in reports):  # the step that was under way at the end has yet to land
                reports = await self.service.check_integrity()
            return [f"{r.stage}: {r.problem}" for r in reports if r.problem]

        assert self.run(check()) == []
