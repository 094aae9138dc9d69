"""From a client's MediaSource to encoded bytes: data URLs, guarded http(s), files under the media root.

Runs in the front process, on its event loop: workers never touch the network. Every failure is a 400 that
names the host and the status, never the full URL (it may hold secrets) or the payload.
"""

from __future__ import annotations

import asyncio
import os
import re
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from urllib.parse import unquote, urlsplit

from contracts.digests import Buffer
from contracts.errors import MediaError, MediaFetchError, MediaTooLarge, TooManyRequests
from contracts.media import MediaSource
from contracts.specs import MediaLimits
from preprocess.addresses import Resolver, system_resolver
from preprocess.data_url import decode_data_url, decode_quickly
from preprocess.http_fetch import HttpFetcher

INLINE_BYTES = 128 << 10
"""Payloads up to this size are handled on the event loop (well under a millisecond), above in a thread."""

INLINE_COMPILED_CHARS = 1 << 20
"""Of a data URL that is decoded in C: 0.15 ms, less than a thread takes to answer."""

DECODING_THREADS = 2
"""Decoding base64 holds the interpreter lock, so that more threads decode no more, only all at once: of 32
payloads that came together the first was there with the last. Two, so that a large one is not in everybody's
way."""

_SCHEME = re.compile(r"\s*([A-Za-z][A-Za-z0-9+.-]{0,19}):")
_BASE64_LIKE = re.compile(r"[A-Za-z0-9+/_=\s-]{40}")


class Fetcher:
    """One per front process. Bounded: `max_concurrent` sources in progress, then TooManyRequests."""

    def __init__(
        self, limits: MediaLimits, *, max_concurrent: int = 256, resolver: Resolver = system_resolver
    ) -> None:
        self._limits = limits
        self._max_concurrent = max_concurrent
        self._in_progress = 0
        self._http = HttpFetcher(limits, resolver)
        self._decoders = ThreadPoolExecutor(DECODING_THREADS, thread_name_prefix="base64")

    async def __aenter__(self) -> Fetcher:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.close()
        self._decoders.shutdown(wait=False)

    async def fetch(self, source: MediaSource) -> Buffer:
        """The encoded bytes, at most limits.max_item_bytes. Raises MediaError kinds, TooManyRequests."""
        if self._in_progress >= self._max_concurrent:
            raise TooManyRequests(
                f"{self._in_progress} media sources are being fetched, the limit; retry later",
                stage="preprocess",
                retry_after_s=1.0,
            )
        self._in_progress += 1
        try:
            return await self._dispatch(source.url)
        finally:
            self._in_progress -= 1

    async def _dispatch(self, url: str) -> Buffer:
        match = _SCHEME.match(url)
        if match is None:
            raise _no_scheme(url)
        scheme = match[1].lower()
        if scheme == "data":
            return await self._data(url[match.start(1) :])
        if scheme in ("http", "https"):
            return await self._http.fetch(url.strip())
        if scheme == "file":
            return await asyncio.to_thread(read_file_url, url.strip(), self._limits)
        raise MediaError(f"unsupported URL scheme '{scheme}'; use https:, http: or data:")

    async def _data(self, url: str) -> Buffer:
        if len(url) <= INLINE_BYTES:
            return decode_data_url(url, self._limits.max_item_bytes)
        if len(url) <= INLINE_COMPILED_CHARS:
            data = decode_quickly(url, self._limits.max_item_bytes)
            if data is not None:
                return data
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._decoders, decode_data_url, url, self._limits.max_item_bytes)


def _no_scheme(url: str) -> MediaError:
    if not url.strip():
        return MediaError("the URL is empty")
    if _BASE64_LIKE.match(url) and not url.startswith(("/", ".")):
        hint = "it looks like bare base64; send it as data:image/png;base64,<data>"
    elif url.startswith("/9j/"):  # base64 of a JPEG
        hint = "it looks like a bare base64 JPEG; send it as data:image/jpeg;base64,<data>"
    else:
        hint = "file paths are not accepted; use https:, http: or data:"
    return MediaError(f"the URL has no scheme: {hint}")


def read_file_url(url: str, limits: MediaLimits) -> bytes:
    """Reads `file:///path` when it lies, symbolic links resolved, under limits.media_root. Blocks."""
    if limits.media_root is None:
        raise MediaFetchError("file: URLs are off on this server; use https: or data:")
    if len(url) > 8192 or not url.lower().startswith("file://"):
        raise MediaFetchError("malformed file URL; expected file:///absolute/path")
    parts = urlsplit(url)
    path = unquote(parts.path)
    if parts.netloc not in ("", "localhost") or not path.startswith("/") or "\0" in path:
        raise MediaFetchError("malformed file URL; expected file:///absolute/path")
    root = Path(limits.media_root).resolve()
    try:
        real = Path(path).resolve(strict=False)
        if not real.is_relative_to(root):
            raise MediaFetchError("the file lies outside the server's media root")
        return _read_regular(real, root, limits.max_item_bytes)
    except (OSError, RuntimeError):  # RuntimeError: a loop of symbolic links
        raise MediaFetchError("the file does not exist or cannot be read") from None


def _read_regular(path: Path, root: Path, max_bytes: int) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        # The path may have been exchanged since it was resolved: judge what was really opened.
        if not Path(os.readlink(f"/proc/self/fd/{descriptor}")).is_relative_to(root):
            raise MediaFetchError("the file lies outside the server's media root")
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise MediaFetchError("the file URL names no regular file")
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise MediaTooLarge(f"the item is larger than the limit of {max_bytes} bytes")
    return data
