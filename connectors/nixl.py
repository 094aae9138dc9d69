"""The NIXL connector: an edge between any two processes, of any two hosts; the receiver reads the sender's
memory (RDMA where there is, else whatever UCX finds, TCP at last)."""

from __future__ import annotations

import queue
import secrets
import selectors
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from mmap import PAGESIZE

import msgspec

from connectors.link import Link
from connectors.nixl_messages import (
    FIRST_EPOCH,
    GREETING_BYTES,
    Attach,
    Begin,
    End,
    Meet,
    NixlDescription,
    PeerDead,
    attachments,
    same_token,
    tell,
)
from connectors.nixl_receiver import NixlReceiver
from connectors.nixl_sender import NixlSender

__all__ = ["NixlDescription", "NixlEdge", "NixlReceiver", "NixlSender"]

_PEERS: dict[End, End] = {"sender": "receiver", "receiver": "sender"}


@dataclass(frozen=True)
class _Attached:
    link: Link
    port: int


class NixlEdge:
    """The parent's: where both ends meet, and who says which of them is dead. Outlives both.

    The contract of `ShmEdge`: `mark_dead` tells the other end at once, `reset` begins the next epoch, in
    which the end that lives on takes part by itself. An end whose process dies is marked dead as soon as its
    connection breaks. Sends wait until the receiver of their epoch is there.
    """

    def __init__(self, description: NixlDescription, listener: socket.socket) -> None:
        self._description = description
        self._listener = listener
        self._epoch = FIRST_EPOCH
        self._ends: dict[End, _Attached] = {}
        self._dead: set[End] = set()
        self._strangers: set[Link] = set()
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._bell, self._bell_heard = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"edge {description.name}", daemon=True)
        self._thread.start()

    @classmethod
    def create(cls, name: str, capacity_bytes: int, max_chunks: int, host: str = "127.0.0.1") -> NixlEdge:
        """`host`: an address of this machine that both ends can reach. The network must be trusted: a token
        keeps strangers out, nothing is encrypted."""
        assert capacity_bytes > 0, f"edge {name}: {capacity_bytes} bytes"
        assert max_chunks > 0, f"edge {name}: {max_chunks} chunks"
        listener = socket.create_server((host, 0))
        listener.setblocking(False)
        description = NixlDescription(
            name=name,
            host=host,
            port=listener.getsockname()[1],
            token=secrets.token_hex(16),
            pool_bytes=-(-capacity_bytes // PAGESIZE) * PAGESIZE,
            max_chunks=max_chunks,
        )
        return cls(description, listener)

    @property
    def fds(self) -> tuple[int, ...]:
        """Nothing is inherited."""
        return ()

    def description(self) -> NixlDescription:
        return self._description

    def mark_dead(self, end: End) -> None:
        """The peer's waits end in PeerLost, and so do its later ones until a reset."""
        self._do(lambda: self._end_died(end))

    def reset(self) -> None:
        """Begins the next epoch. A dead end's place is free for the next holder."""
        self._do(self._begin_next)

    def close(self) -> None:
        """Ends that are still there get PeerLost. Idempotent."""
        if self._thread.is_alive():
            self._do(self._end)
            self._thread.join()
            self._bell.close()
            self._bell_heard.close()  # here: the last ring may come after the thread has seen the end

    # --- the thread: whatever changes the edge happens here -------------------------------------------------

    def _do(self, command: Callable[[], None]) -> None:
        self._commands.put(command)
        self._bell.send(b"\0")

    def _run(self) -> None:
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._bell_heard, selectors.EVENT_READ, self._answer)
        while not self._closed:
            events = self._selector.select()
            while not self._commands.empty():  # first: what was asked for before somebody came
                self._commands.get()()
            for key, _ in events:
                if key.fileobj in (self._listener, self._bell_heard) or key.fd in self._selector.get_map():
                    key.data()
        for link in [*self._strangers, *(attached.link for attached in self._ends.values())]:
            link.close()
        self._listener.close()
        self._selector.close()

    def _end(self) -> None:
        self._closed = True

    def _answer(self) -> None:
        self._bell_heard.recv(4096)

    def _accept(self) -> None:
        try:
            stream, _ = self._listener.accept()
        except OSError:  # it went away before we came
            return
        link = Link(stream, GREETING_BYTES)
        self._strangers.add(link)
        self._selector.register(link, selectors.EVENT_READ, lambda: self._heard(link))

    def _heard(self, link: Link) -> None:
        try:
            messages = attachments(link)
        except msgspec.DecodeError:
            messages = []
            self._drop(link)
        for message in messages:
            if link not in self._strangers or not self._attach(link, message):
                self._drop(link)
        if link.is_ended:
            self._drop(link)

    def _attach(self, link: Link, message: Attach) -> bool:
        if not same_token(self._description.token, message.token) or message.end in self._ends:
            return False
        if message.end in self._dead:  # it died since the last reset: perhaps before anybody saw it there
            self._begin_next()
        self._strangers.discard(link)
        self._ends[message.end] = _Attached(link, message.port)
        tell(link, Begin(self._epoch))
        if _PEERS[message.end] in self._dead:
            tell(link, PeerDead(self._epoch))
        self._introduce()
        return True

    def _introduce(self) -> None:
        if len(self._ends) == len(_PEERS):
            sender, receiver = self._ends["sender"], self._ends["receiver"]
            tell(sender.link, Meet(self._epoch, receiver.link.peer_host, receiver.port))

    def _drop(self, link: Link) -> None:
        if link in self._strangers or any(link is attached.link for attached in self._ends.values()):
            self._selector.unregister(link)
        self._strangers.discard(link)
        for end, attached in list(self._ends.items()):
            if attached.link is link:
                del self._ends[end]
                self._tell_dead(end)
        link.close()

    def _end_died(self, end: End) -> None:
        if end in self._ends:
            self._drop(self._ends[end].link)
        else:
            self._tell_dead(end)

    def _tell_dead(self, end: End) -> None:
        peer = self._ends.get(_PEERS[end])
        if end not in self._dead and peer is not None:
            tell(peer.link, PeerDead(self._epoch))
        self._dead.add(end)

    def _begin_next(self) -> None:
        self._epoch += 1
        self._dead.clear()
        for attached in self._ends.values():
            tell(attached.link, Begin(self._epoch))
        self._introduce()
