"""What the client itself costs: the same client against a server that only writes chunks, in this process."""

from __future__ import annotations

import asyncio
import contextlib

import msgspec

from benchmarks.chat.result import Overhead
from benchmarks.samples import summarize
from benchmarks.wire.clock import Clock
from benchmarks.wire.connection import HttpPool
from benchmarks.wire.sse import SseDecoder

NUM_STEPS = 32
STEP_S = 0.02
"""A decode step of 20 ms; all streams get their token at once, as a batching server sends them."""


class _Stamp(msgspec.Struct):
    """A chunk of about the size of a real one, with the time at which it was written."""

    at_s: float
    id: str = "chatcmpl-00000000000000000000000000000000"
    object: str = "chat.completion.chunk"
    choices: tuple[dict[str, dict[str, str]], ...] = ({"delta": {"content": " word"}},)


class _StampServer:
    """Answers every request with `NUM_STEPS` stamped chunks, once `streams` of them have come."""

    def __init__(self, clock: Clock, streams: int) -> None:
        self._clock = clock
        self._writers: list[asyncio.StreamWriter] = []
        self._streams = streams
        self._all_here = asyncio.Event()

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        self._writers.append(writer)
        if len(self._writers) == self._streams:
            self._all_here.set()

    async def send_all(self) -> None:
        await self._all_here.wait()
        started_s = self._clock.now()
        for step in range(NUM_STEPS):
            await self._clock.sleep_until(started_s + step * STEP_S)
            for writer in self._writers:
                event = b"data: " + msgspec.json.encode(_Stamp(self._clock.now())) + b"\n\n"
                writer.write(b"%x\r\n%b\r\n" % (len(event), event))
        for writer in self._writers:
            writer.write(b"0\r\n\r\n")

    async def close(self) -> None:
        for writer in self._writers:
            writer.close()
            with contextlib.suppress(ConnectionError):  # the client may have closed first
                await writer.wait_closed()


async def measure_overhead(clock: Clock, streams: int) -> Overhead:
    server = _StampServer(clock, streams)
    listener = await asyncio.start_server(server.accept, "127.0.0.1", 0)
    pool = HttpPool(f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}", clock)
    delays_ms: list[float] = []
    decode = msgspec.json.Decoder(_Stamp).decode

    async def read_one() -> None:
        sse = SseDecoder()

        def sink(at_s: float, data: bytes) -> None:
            delays_ms.extend((at_s - decode(event.data).at_s) * 1e3 for event in sse.feed(data))

        await pool.request("GET", "/", b"", sink)

    cpu_started_s = clock.cpu_s()
    async with listener:
        await asyncio.gather(server.send_all(), *(read_one() for _ in range(streams)))
        cpu_s = clock.cpu_s() - cpu_started_s
        pool.close()
        await server.close()
    delay = summarize(delays_ms)
    assert delay is not None
    assert delay.count == streams * NUM_STEPS
    return Overhead(streams, delay.count, cpu_s * 1e6 / delay.count, delay)
