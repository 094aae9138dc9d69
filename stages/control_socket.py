"""A ZMQ socket on an event loop, without a task or a future for each message."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import zmq


class ControlSocket:
    """Hands every message to `take` as it comes. Made and used on one loop.

    The socket's descriptor tells only that something may have changed, and any call, also a send, may take it
    away: so all there is is read whenever it tells, and once more after a send.
    """

    def __init__(self, kind: int, take: Callable[[list[bytes]], None]) -> None:
        """`kind`: zmq.ROUTER or zmq.DEALER."""
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(kind)
        self._socket.set_hwm(0)  # whoever sends is bounded by the requests in flight, and never waits
        self._take = take
        self._loop = asyncio.get_running_loop()
        self._looks = False

    def bind(self, endpoint: str) -> str:
        """Returns the address that it became."""
        self._socket.bind(endpoint)
        return self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def connect(self, endpoint: str) -> None:
        self._socket.connect(endpoint)

    def start(self) -> None:
        """From now on messages are taken."""
        self._loop.add_reader(self._socket.FD, self._read)
        self._look_soon()

    def send(self, *frames: bytes) -> None:
        """After `close` it goes nowhere, as to a peer that is gone."""
        if not self._socket.closed:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
            self._look_soon()

    def close(self) -> None:
        """What is still to be sent is dropped. Also without a `start`."""
        self._loop.remove_reader(self._socket.FD)
        self._socket.close(linger=0)
        self._context.term()

    def _look_soon(self) -> None:
        if not self._looks:
            self._looks = True
            self._loop.call_soon(self._look)

    def _look(self) -> None:
        self._looks = False
        self._read()

    def _read(self) -> None:
        while not self._socket.closed:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._take(frames)
            except BaseException:
                self._look_soon()  # for the messages behind it
                raise
