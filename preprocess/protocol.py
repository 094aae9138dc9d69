"""What the pool and its workers say to each other, and the framing: u32 length, msgpack; a task's encoded
bytes follow its frame raw."""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import TypeAlias

import msgspec

from contracts.digests import Buffer, ContentDigest, Digester
from contracts.errors import ErrorInfo
from contracts.media import MediaItem
from contracts.specs import MediaLimits
from preprocess.recipes import Recipe
from preprocess.resampling import ResizeChoice

MAX_FRAME_BYTES = 1 << 20
_LENGTH = struct.Struct("<I")


# --- pool → worker ------------------------------------------------------------------------------------------
class Setup(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """First frame of a worker's life."""

    arena: str
    arena_bytes: int
    digester: Digester
    limits: MediaLimits
    resize: ResizeChoice


class Task(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """`payload_bytes` of encoded media follow the frame."""

    recipe: Recipe
    bytes_digest: ContentDigest
    payload_bytes: int


class Grant(msgspec.Struct, frozen=True, tag=True):
    """Answers SizeKnown: the features' place in the arena."""

    offset: int


class Drop(msgspec.Struct, frozen=True, tag=True):
    """Answers SizeKnown when nobody wants the item any more; the worker is idle again."""


ToWorker: TypeAlias = Setup | Task | Grant | Drop


# --- worker → pool ------------------------------------------------------------------------------------------
class Ready(msgspec.Struct, frozen=True, tag=True):
    rss_bytes: int


class SizeKnown(msgspec.Struct, frozen=True, tag=True):
    """The features will take `nbytes`; none is made yet."""

    nbytes: int


class Done(msgspec.Struct, frozen=True, tag=True):
    """The features are written: at least one item. `rss_bytes`: the worker's private memory now."""

    items: tuple[MediaItem, ...]
    rss_bytes: int = 0


class TaskFailed(msgspec.Struct, frozen=True, tag=True):
    """The item is bad; the worker is fine."""

    error: ErrorInfo
    rss_bytes: int = 0


FromWorker: TypeAlias = Ready | SizeKnown | Done | TaskFailed


class WorkerChannel:
    """The worker's end: blocking."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)

    def send(self, message: FromWorker) -> None:
        body = self._encoder.encode(message)
        self._sock.sendall(_LENGTH.pack(len(body)) + body)

    def receive(self) -> ToWorker:
        """Raises EOFError when the pool is gone."""
        (length,) = _LENGTH.unpack(self.receive_bytes(_LENGTH.size))
        return self._decoder.decode(self.receive_bytes(length))

    def receive_bytes(self, count: int) -> bytes:
        buffer = bytearray(count)
        view, filled = memoryview(buffer), 0
        while filled < count:
            received = self._sock.recv_into(view[filled:])
            if received == 0:
                raise EOFError("the pool closed the connection")
            filled += received
        return bytes(buffer)


class PoolChannel:
    """The pool's end, on the event loop. A cancelled call may stop mid-frame: end the worker then."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)

    async def send(self, message: ToWorker, payload: Buffer = b"") -> None:
        """Raises ConnectionError when the worker is gone."""
        loop = asyncio.get_running_loop()
        body = self._encoder.encode(message)
        await loop.sock_sendall(self._sock, _LENGTH.pack(len(body)) + body)
        if payload:
            await loop.sock_sendall(self._sock, memoryview(payload))

    async def receive(self) -> FromWorker:
        """Raises ConnectionError when the worker is gone, msgspec.MsgspecError on a malformed frame."""
        (length,) = _LENGTH.unpack(await self._read(_LENGTH.size))
        if length > MAX_FRAME_BYTES:
            raise msgspec.DecodeError(f"frame of {length} bytes")
        return self._decoder.decode(await self._read(length))

    async def _read(self, count: int) -> bytes:
        loop = asyncio.get_running_loop()
        buffer = bytearray(count)
        view, filled = memoryview(buffer), 0
        while filled < count:
            received = await loop.sock_recv_into(self._sock, view[filled:])
            if received == 0:
                raise ConnectionResetError("the worker closed the connection")
            filled += received
        return bytes(buffer)

    def close(self) -> None:
        self._sock.close()
