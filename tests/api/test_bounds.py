"""Every bound that a client can run into is filled over HTTP: 429 with Retry-After, and all is well again.

All bounds, with their settings and the tests of those further inside: ARCHITECTURE.md, section 11.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from contracts.params import SamplingParams
from stages.launch import serve_service
from stages.lm_stage import LMStage
from stages.omni_service import OmniService
from stages.options import ServeOptions
from stages.service import SpeechOptions
from stages.talker_stage import TalkerStage
from tests.api.serving import running
from tests.served import data_url, picture
from tests.tiny_omni import VOICES

torch.set_num_threads(1)
TIMEOUT_S = 180.0  # never reached by a machine that is only slow
CHAT, SPEECH = "/v1/chat/completions", "/v1/audio/speech"


@dataclass(frozen=True)
class Server:
    service: OmniService
    http: httpx.AsyncClient

    async def ask(self, *parts: Any, path: str = CHAT, **fields: Any) -> httpx.Response:
        content = list(parts) or "hello"
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 2, **fields}
        return await self.http.post(path, json=body)

    async def speak(self) -> httpx.Response:
        return await self.http.post(
            SPEECH, json={"input": "hello", "voice": VOICES[0], "response_format": "pcm"}
        )

    async def nobody_is_left(self) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while self.service.stats()["front"]["open_requests"]:
                await self.service.stages_changed()
            await self.service.drained()
            reports = await self.service.check_integrity()
            while any(r.busy for r in reports):
                reports = await self.service.check_integrity()
        assert [r.problem for r in reports if r.problem] == []


@asynccontextmanager
async def serving(folder: Path, *overrides: str, deployment: Path | None = None) -> AsyncIterator[Server]:
    given = ("thinker.kv_memory=8MiB", "preprocess.workers=1", *overrides)
    options = ServeOptions(model=folder, dtype="float32", overrides=given, deployment=deployment)
    async with (
        serve_service(options) as service,
        running(service) as server,
        httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT_S) as http,
    ):
        yield Server(service, http)
        await Server(service, http).nobody_is_left()


@contextmanager
def halted(stage: type[LMStage] | type[TalkerStage], patch: pytest.MonkeyPatch) -> Iterator[None]:
    """The stage takes messages and computes nothing."""
    gate = threading.Event()
    has_work = stage.has_work
    patch.setattr(stage, "has_work", lambda self: gate.is_set() and has_work(self))
    try:
        yield
    finally:
        gate.set()


def refused(response: httpx.Response, words: str) -> None:
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["code"]) == (429, "rate_limit_error", "queue_full")
    assert int(response.headers["retry-after"]) >= 1
    assert words in error["message"]


async def finished(server: Server, held: list[asyncio.Task[httpx.Response]]) -> None:
    """What was let in is answered once there is room again."""
    await server.service.check_integrity()  # a message wakes the stage that was halted
    assert [response.status_code for response in await asyncio.gather(*held)] == [200] * len(held)


async def overfilled(tasks: list[asyncio.Task[httpx.Response]], held: int, words: str) -> None:
    """All but `held` of the tasks are refused; those stay in `tasks`."""
    async with asyncio.timeout(TIMEOUT_S):
        while len(tasks) > held:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                refused(task.result(), words)
                tasks.remove(task)


def test_open_requests(tiny: Callable[[str], Path]) -> None:
    async def main() -> None:
        async with serving(tiny("llama"), "server.max_requests=1") as server:
            with pytest.MonkeyPatch.context() as patch:
                with halted(LMStage, patch):
                    tasks = [asyncio.create_task(server.ask()) for _ in range(3)]
                    await overfilled(tasks, 1, "1 requests are open already")
                    streamed = await server.ask(stream=True)
                    refused(streamed, "1 requests are open already")
                await finished(server, tasks)
            assert (await server.ask()).status_code == 200
            board = server.service._coordinator.board
            board.put("thinker", "failed")
            missing = await server.ask()
            assert (missing.status_code, missing.headers["retry-after"]) == (503, "5")
            board.put("thinker", "ready")
            assert (await server.ask()).status_code == 200

    asyncio.run(main())


def test_waiting_room_of_the_language_model(tiny: Callable[[str], Path]) -> None:
    async def main() -> None:
        async with serving(tiny("llama"), "thinker.max_waiting_requests=2") as server:
            with pytest.MonkeyPatch.context() as patch:
                with halted(LMStage, patch):
                    tasks = [asyncio.create_task(server.ask()) for _ in range(4)]
                    await overfilled(tasks, 2, "waiting")
                await finished(server, tasks)
            assert (await server.ask()).status_code == 200

    asyncio.run(main())


def test_preprocessing_queue_and_arena(tiny: Callable[[str], Path]) -> None:
    """One picture fills the arena: the others wait for it, and only those beyond the queue are refused."""
    pictures = [{"type": "image_url", "image_url": {"url": data_url(picture(i))}} for i in range(6)]
    queue = ("preprocess.max_queued_jobs=3", "preprocess.arena_bytes=32KiB")

    async def main() -> None:
        async with serving(tiny("qwen2_5_vl"), *queue) as server:
            assert server.service.preprocessor is not None
            (pid,) = server.service.preprocessor.pool.worker_pids()
            os.kill(pid, signal.SIGSTOP)
            tasks = [asyncio.create_task(server.ask(part)) for part in pictures]
            await overfilled(tasks, 4, "media items are waiting for preprocessing")
            os.kill(pid, signal.SIGCONT)
            await finished(server, tasks)
            assert (await server.ask(pictures[-1])).status_code == 200

    asyncio.run(main())


@pytest.mark.parametrize("connector", ["inproc", "shm"])
def test_credits_of_an_edge(tiny: Callable[[str], Path], tmp_path: Path, connector: str) -> None:
    """The encoder waits for the language model, chunk by chunk: nobody is refused or forgotten."""
    deployment = tmp_path / "one-credit.toml"
    edge = f'source = "vision"\ntarget = "thinker"\nconnector = "{connector}"\ncapacity = 1'
    deployment.write_text(f"[[edge]]\n{edge}\n[stage.vision]\nmax_batch_items = 4\n")
    pictures = [{"type": "image_url", "image_url": {"url": data_url(picture(i))}} for i in range(8)]

    async def main() -> None:
        async with serving(tiny("qwen2_5_vl"), deployment=deployment) as server:
            answers = await asyncio.gather(*(server.ask(*pictures[i : i + 2]) for i in range(7)))
            assert [answer.status_code for answer in answers] == [200] * 7

    asyncio.run(main())


def test_spoken_answers(tiny_omni: Callable[[str], Path]) -> None:
    bounds = ("vocoder.max_streams=2", "talker.max_waiting_requests=1", "talker.kv_memory=8MiB")

    async def main() -> None:
        async with serving(tiny_omni("qwen3_omni_moe"), *bounds, "server.max_speech_s=0.5") as server:
            with pytest.MonkeyPatch.context() as patch:
                with halted(TalkerStage, patch):
                    tasks = [asyncio.create_task(server.speak()) for _ in range(2)]
                    await overfilled(tasks, 1, "waiting to be spoken")
                    with server.service._speech.admitted(SpeechOptions(), SamplingParams()):
                        refused(await server.speak(), "2 answers are being spoken already")
                await finished(server, tasks)
            assert (await server.speak()).status_code == 200

    asyncio.run(main())
