"""The listening socket, taken before anything large is imported."""

from __future__ import annotations

import socket

BACKLOG = 2048


def listen(host: str, port: int) -> socket.socket:
    """Clients may connect at once, and are answered when the server runs. A taken port fails here. Port 0:
    any free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        reason = (error.strerror or "it is not to be had").lower()
        raise OSError(error.errno, f"cannot listen on {host}:{port}: {reason}") from None
    listener.setblocking(False)
    return listener
