"""What spoken answers may not do to everybody else: hold the event loop while they are encoded, or stay in
memory
when their client has left."""

from __future__ import annotations

import asyncio
import gc
import threading
import tracemalloc
from typing import Any

import pytest

from tests.api.fakes import Script
from tests.api.serving import TIMEOUT_S, client, running, user
from tests.api.spoken_fakes import SpeakingService, SpeechScript
from tests.api.test_disconnect import CHAT, connected
from vocoder.containers.encoder import AudioEncoder

SPEECH = "/v1/audio/speech"
SPOKEN = {"modalities": ["text", "audio"], "audio": {"voice": "ethan", "format": "wav"}}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "speech": (SPEECH, {"input": "a long text", "voice": "ethan", "response_format": "mp3"}),
    "chat": (CHAT, {**user("a"), **SPOKEN}),
    "streamed chat": (
        CHAT,
        {**user("a"), **SPOKEN, "audio": {**SPOKEN["audio"], "format": "pcm16"}, "stream": True},
    ),
}


@pytest.mark.parametrize("method", ["encode", "finish"])
@pytest.mark.parametrize("kind", BODIES)
def test_others_are_answered_while_sound_is_encoded(
    kind: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SCH-09. The encoder goes on only when another request has been answered in the meantime."""
    begun, answered = threading.Event(), threading.Event()
    work = getattr(AudioEncoder, method)

    def slowly(*args: Any) -> Any:
        begun.set()
        assert answered.wait(TIMEOUT_S), "the loop was held"
        return work(*args)

    monkeypatch.setattr(AudioEncoder, method, slowly)
    path, body = BODIES[kind]

    async def run() -> None:
        async with client(SpeakingService()) as http:
            speaking = asyncio.create_task(http.post(path, json=body))
            assert await asyncio.to_thread(begun.wait, TIMEOUT_S)
            assert (await http.get("/health")).status_code == 200
            answered.set()
            assert (await speaking).status_code == 200

    asyncio.run(run())


@pytest.mark.parametrize("kind", ["speech", "chat"])
def test_the_sound_of_answers_whose_client_left_goes_too(kind: str) -> None:
    """SSE-06: a whole response holds its sound until the end, a quarter of a megabyte each here."""
    path, body = BODIES[kind]
    body |= {"input": "y" * 400} if kind == "speech" else {"max_tokens": 400}
    num_clients, rounds = 8, 10

    async def leave(service: SpeakingService, port: int, num_chunks: int) -> None:
        async with connected(port, body, path):
            await service.wait_for(lambda: service.num_chunks == num_chunks)

    async def run() -> list[int]:
        held: list[int] = []
        script = Script([tuple(b"y" * 400)])
        service = SpeakingService(script, speech=SpeechScript(chunk_samples=1 << 16, hold_at_chunk=1))
        async with running(service) as server:
            for number in range(1, rounds + 1):
                num_chunks = number * num_clients
                await asyncio.gather(*(leave(service, server.port, num_chunks) for _ in range(num_clients)))
                await service.wait_for(lambda: all(f.outcome == "aborted" for f in service.flows.values()))
                service.flows.clear()
                gc.collect()
                held.append(tracemalloc.get_traced_memory()[0])
        return held

    tracemalloc.start()
    try:
        held = asyncio.run(run())
    finally:
        tracemalloc.stop()
    early, late = min(held[: rounds // 2]), min(held[rounds // 2 :])  # what else is held comes and goes
    assert late - early < 2 * num_clients << 18, f"grows by more than two rounds in five: {held}"
