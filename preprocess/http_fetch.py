"""Guarded http(s): resolve once, refuse non-global addresses, connect to the address that was checked."""

from __future__ import annotations

import asyncio

import httpx

from contracts.errors import MediaFetchError, MediaTooLarge
from contracts.specs import MediaLimits
from preprocess.addresses import Resolver, is_public

_MAX_URL_CHARS = 8192
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_HEADERS = {
    "User-Agent": "omnistage/0.1 (+media fetch)",
    "Accept": "image/*, audio/*, video/*, */*;q=0.5",
    "Accept-Encoding": "identity",  # a compressed body could exceed the byte limit many times over
}


class _Retryable(Exception):
    """The connection failed before a whole answer came; one more try is allowed."""


class HttpFetcher:
    """Holds no connection between fetches: they are pinned to addresses, and hosts must not share them."""

    def __init__(self, limits: MediaLimits, resolver: Resolver) -> None:
        self._limits = limits
        self._resolve = resolver
        # trust_env off: a proxy or netrc from the environment would bypass the address check.
        self._client = httpx.AsyncClient(
            trust_env=False,
            follow_redirects=False,
            timeout=None,  # one overall limit in `fetch`
            limits=httpx.Limits(max_keepalive_connections=0),
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def fetch(self, url: str) -> bytearray:
        """Follows up to limits.max_redirects redirects, each checked like the first URL."""
        target = _parse(url)
        try:
            async with asyncio.timeout(self._limits.fetch_timeout_s):
                return await self._follow(target)
        except TimeoutError:
            limit_s = self._limits.fetch_timeout_s
            raise MediaFetchError(f"{_host(target)} did not deliver within {limit_s:g} s") from None

    async def _follow(self, target: httpx.URL) -> bytearray:
        retries_left = 1
        hops = 0
        while True:
            try:
                answer = await self._get(target, attempt=1 - retries_left)
            except _Retryable as error:
                if not retries_left:
                    raise MediaFetchError(f"fetching from {_host(target)} failed: {error}") from None
                retries_left -= 1
                continue
            if isinstance(answer, bytearray):
                return answer
            hops += 1
            if hops > self._limits.max_redirects:
                raise MediaFetchError(
                    f"{_host(target)} redirects more than {self._limits.max_redirects} times"
                )
            target = answer

    async def _get(self, target: httpx.URL, attempt: int) -> bytearray | httpx.URL:
        """One request: the body, or where it redirects to."""
        address = await self._checked_address(target, attempt)
        pinned = target.copy_with(host=address, username=None, password=None)
        extensions = {"sni_hostname": target.raw_host.decode("ascii")} if target.scheme == "https" else {}
        headers = {**_HEADERS, "Host": target.netloc.decode("ascii")}
        try:
            async with self._client.stream("GET", pinned, headers=headers, extensions=extensions) as response:
                if response.status_code in _REDIRECTS:
                    return _redirect_target(target, response)
                if response.status_code != 200:
                    raise MediaFetchError(f"{_host(target)} answered with status {response.status_code}")
                return await self._read(target, response)
        except httpx.TransportError as error:
            raise _Retryable(_in_words(error)) from error

    async def _read(self, target: httpx.URL, response: httpx.Response) -> bytearray:
        limit = self._limits.max_item_bytes
        if response.headers.get("content-encoding", "identity").lower() != "identity":
            raise MediaFetchError(f"{_host(target)} sent a compressed body although asked not to")
        declared = response.headers.get("content-length", "0")
        too_large = MediaTooLarge(f"the item at {_host(target)} is larger than the limit of {limit} bytes")
        if declared.isdecimal() and int(declared) > limit:
            raise too_large
        body = bytearray()
        async for chunk in response.aiter_raw():
            body += chunk
            if len(body) > limit:
                raise too_large
        if not body:
            raise MediaFetchError(f"{_host(target)} sent an empty body")
        return body

    async def _checked_address(self, target: httpx.URL, attempt: int) -> str:
        """Resolves afresh for every hop; a retry takes the next address. All of them must be public."""
        port = target.port or {"http": 80, "https": 443}[target.scheme]
        try:
            addresses = await self._resolve(target.raw_host.decode("ascii"), port)
        except (OSError, UnicodeError):
            raise MediaFetchError(f"the host {_host(target)} cannot be resolved") from None
        if not addresses:
            raise MediaFetchError(f"the host {_host(target)} has no address")
        if not self._limits.allow_private_addresses and not all(map(is_public, addresses)):
            raise MediaFetchError(
                f"the host {_host(target)} has a non-public address; fetching it is refused"
            )
        return addresses[attempt % len(addresses)]


def _in_words(error: httpx.TransportError) -> str:
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return "no connection could be made"
    if isinstance(error, httpx.TimeoutException):
        return "it stopped answering"
    return "the connection broke off"


def _parse(url: str) -> httpx.URL:
    if len(url) > _MAX_URL_CHARS:
        raise MediaFetchError(f"the URL is longer than {_MAX_URL_CHARS} characters")
    try:
        target = httpx.URL(url)
    except (httpx.InvalidURL, UnicodeError):
        raise MediaFetchError("malformed URL") from None
    if target.scheme not in ("http", "https") or not target.host:
        raise MediaFetchError("malformed URL: expected https://host/path")
    return target


def _redirect_target(target: httpx.URL, response: httpx.Response) -> httpx.URL:
    location = response.headers.get("location")
    if not location:
        raise MediaFetchError(f"{_host(target)} redirects without saying where to")
    try:
        joined = target.join(location)
    except (httpx.InvalidURL, UnicodeError):
        raise MediaFetchError(f"{_host(target)} redirects to a malformed URL") from None
    return _parse(str(joined))


def _host(target: httpx.URL) -> str:
    return repr(target.host[:100])
