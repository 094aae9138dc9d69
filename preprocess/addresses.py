"""Which network addresses a client may make this server connect to."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable

Resolver = Callable[[str, int], Awaitable[list[str]]]
"""(host, port) → numeric addresses in order of preference. Raises OSError."""

_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


async def system_resolver(host: str, port: int) -> list[str]:
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def is_public(address: str) -> bool:
    """True for a global unicast address. An IPv6 address that stands for an IPv4 one is judged by that one;
    tunnels (6to4, Teredo) are never public: their ranges are not global."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is not None:
            parsed = parsed.ipv4_mapped
        elif parsed in _NAT64:
            parsed = ipaddress.IPv4Address(int(parsed) & 0xFFFFFFFF)
        elif parsed.is_site_local or parsed.sixtofour is not None or parsed.teredo is not None:
            return False
    special = parsed.is_multicast or parsed.is_reserved or parsed.is_unspecified or parsed.is_loopback
    return parsed.is_global and not special and not parsed.is_link_local
