"""A worker that stays down: whoever needs it is told so at once, and everybody else is served."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from tests.api.serving import client
from tests.parity.test_matrix import A
from tests.served import TIMEOUT_S, Served, data_url

SETTINGS = ("thinker.kv_memory=8MiB", "vision.replicas=2", "preprocess.workers=1", "server.max_restarts=0")


def chat(*parts: dict[str, Any]) -> dict[str, Any]:
    content = [*parts, {"type": "text", "text": "what is it?"}]
    messages = [{"role": "user", "content": content}]
    return {"messages": messages, "max_tokens": 6, "temperature": 0, "ignore_eos": True}


def test_only_requests_that_need_a_dead_stage_fail(tiny: Callable[[str], Path]) -> None:
    """REL-02. One of two replicas, then both, then the stage that everybody needs."""
    picture = chat({"type": "image_url", "image_url": {"url": data_url(A)}})
    text = chat()

    async def ask(http: httpx.AsyncClient, body: dict[str, Any]) -> httpx.Response:
        """Of a new conversation each time: no cache stands in for a stage."""
        await served.service.reset_cache()
        return await http.post("/v1/chat/completions", json=body)

    async def kill(stage: str) -> None:
        (worker,) = (w for w in served.service.workers() if stage in w.stages)
        os.kill(worker.pid, signal.SIGKILL)
        async with asyncio.timeout(TIMEOUT_S):
            while {h.stage: h.state for h in served.service.health()}[stage] != "failed":
                await served.service.stages_changed()

    async def health(http: httpx.AsyncClient) -> tuple[int, str]:
        response = await http.get("/health")
        return response.status_code, response.json()["error"]["message"]

    def content(response: httpx.Response) -> str:
        assert response.status_code == 200, response.text
        answer: str = response.json()["choices"][0]["message"]["content"]
        return answer

    async def main() -> None:
        async with client(served.service) as http:
            seen, read = content(await ask(http, picture)), content(await ask(http, text))
            assert (await http.get("/health")).status_code == 200

            await kill("vision.0")
            assert content(await ask(http, picture)) == seen
            assert content(await ask(http, text)) == read
            status, reason = await health(http)
            assert status == 503
            assert "vision.0 failed" in reason
            assert "vision.1" not in reason

            await kill("vision.1")
            refused = await ask(http, picture)
            assert refused.status_code == 503
            assert "vision" in refused.json()["error"]["message"]
            assert content(await ask(http, text)) == read

            await kill("thinker")
            for body in (picture, text):
                assert (await ask(http, body)).status_code == 503
            status, reason = await health(http)
            assert status == 503
            assert "thinker failed" in reason
            assert (await http.get("/v1/models")).status_code == 200

    with Served(tiny("qwen2_5_vl"), *SETTINGS, workers="per-stage") as served:
        served.run(main())
        assert served.service.stats()["front"]["open_requests"] == 0
