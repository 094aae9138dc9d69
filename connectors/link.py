"""Framed messages over a stream socket that never blocks: what the ends of a remote edge tell each other."""

from __future__ import annotations

import asyncio
import select
import socket
import struct
from collections.abc import Callable

_LENGTH = struct.Struct("<I")
_READ_BYTES = 1 << 18
MAX_FRAME_BYTES = 1 << 24
CONNECT_TIMEOUT_S = 5.0
LEFTOVER_BYTES = 64
SILENCE_S = 20  # of a peer's kernel, after which it is taken for dead


def connect(host: str, port: int, local_host: str = "") -> Link:
    """Raises OSError. Blocks until the connection stands. `local_host`: the address of this machine to
    connect
    from, when the route's own is not the one that others reach."""
    source = (local_host, 0) if local_host else None
    return Link(socket.create_connection((host, port), timeout=CONNECT_TIMEOUT_S, source_address=source))


class Link:
    """All calls from one thread at a time. What the kernel does not take at once is kept and sent by the loop
    that watches. `max_frame_bytes` may be raised once the peer is known."""

    def __init__(self, stream: socket.socket, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        stream.setblocking(False)
        if stream.family in (socket.AF_INET, socket.AF_INET6):
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _notice_silence(stream)
        self.max_frame_bytes = max_frame_bytes
        self.is_ended = False  # by the peer, or closed: no more frames come
        self._stream = stream
        self._incoming = bytearray()
        self._outgoing = bytearray()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._writing = False

    @property
    def leftover(self) -> bytes:
        """The beginning of what came and is no whole frame: it tells who spoke otherwise."""
        return bytes(self._incoming[:LEFTOVER_BYTES])

    @property
    def local_host(self) -> str:
        return str(self._stream.getsockname()[0])

    @property
    def peer_host(self) -> str:
        return str(self._stream.getpeername()[0])

    def fileno(self) -> int:
        return self._stream.fileno()

    def send(self, frame: bytes) -> None:
        """Frames after the end of the link are lost; the end shows to whoever receives."""
        if self.is_ended:
            return
        self._outgoing += _LENGTH.pack(len(frame))
        self._outgoing += frame
        self._flush()

    def receive(self) -> list[bytes]:
        """All whole frames that are there."""
        while not self.is_ended:
            try:
                data = self._stream.recv(_READ_BYTES)
            except BlockingIOError:
                break
            except OSError:  # the peer is gone, however it went
                self._end()
                break
            if not data:
                self._end()
                break
            self._incoming += data
        return self._frames()

    def wait(self) -> None:
        """Blocks until something came, or CONNECT_TIMEOUT_S; for before there is a loop."""
        poller = select.poll()  # unlike select(), for descriptors of any number
        poller.register(self._stream, select.POLLIN)
        poller.poll(CONNECT_TIMEOUT_S * 1000)

    def watch(self, heard: Callable[[], None]) -> None:
        """Calls `heard` on the running loop whenever something came. Idempotent; one loop at a time."""
        if self._loop is None and not self.is_ended:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._stream, heard)
            self._flush()

    def unwatch(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._stream)
            if self._writing:
                self._loop.remove_writer(self._stream)
        self._loop, self._writing = None, False

    def close(self) -> None:
        """Idempotent. What was not sent is lost."""
        self.unwatch()
        self.is_ended = True
        self._stream.close()

    def _frames(self) -> list[bytes]:
        frames: list[bytes] = []
        position = 0
        while len(self._incoming) - position >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._incoming, position)
            if length > self.max_frame_bytes:
                self._end()
                del self._incoming[:position]
                del self._incoming[LEFTOVER_BYTES:]
                return frames
            start = position + _LENGTH.size
            if len(self._incoming) - start < length:
                break
            position = start + length
            frames.append(bytes(self._incoming[start:position]))
        del self._incoming[:position]
        return frames

    def _flush(self) -> None:
        while self._outgoing:
            try:
                sent = self._stream.send(self._outgoing)
            except BlockingIOError:
                break
            except OSError:
                self._outgoing.clear()  # the peer is gone; `receive` will tell
                break
            del self._outgoing[:sent]
        self._set_writing(bool(self._outgoing))

    def _set_writing(self, writing: bool) -> None:
        if self._loop is None or writing == self._writing:
            return
        self._writing = writing
        if writing:
            self._loop.add_writer(self._stream, self._flush)
        else:
            self._loop.remove_writer(self._stream)

    def _end(self) -> None:
        self.unwatch()
        self.is_ended = True


def _notice_silence(stream: socket.socket) -> None:
    """A machine that vanishes says no goodbye: the kernel asks, and ends the connection without an answer."""
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENCE_S // 4)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, SILENCE_S // 4)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE_S * 1000)
