"""Content digests: 128 bits over the whole content, domain-separated, seeded with a deployment secret."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable
from typing import Literal, NewType

import msgspec
import numpy as np
import xxhash

ContentDigest = NewType("ContentDigest", bytes)
"""16 bytes. Equal digests mean equal content, up to the collision odds of the chosen hash."""

DIGEST_BYTES = 16
Buffer = bytes | bytearray | memoryview


class Digester(msgspec.Struct, frozen=True):
    """Makes digests. The secret keeps one deployment's digests unpredictable to its clients.

    `xxh3` is fast and seeded, not cryptographic; `sha256` (keyed by prefix, truncated to 128 bits) is for
    deployments whose tenants may try to forge collisions.
    """

    secret: bytes
    algorithm: Literal["xxh3", "sha256"] = "xxh3"

    @staticmethod
    def random(algorithm: Literal["xxh3", "sha256"] = "xxh3") -> Digester:
        return Digester(secret=secrets.token_bytes(16), algorithm=algorithm)

    def of_bytes(self, data: Buffer, options: str = "") -> ContentDigest:
        """`bytes_digest`: the encoded bytes and every processor option that changes the result."""
        return self._digest(b"bytes", options.encode(), data)

    def of_text(self, text: str, options: str = "") -> ContentDigest:
        """Of a data URL's text, never taken for a digest of what it encodes."""
        return self._digest(b"text", options.encode(), text.encode("utf-8", "surrogatepass"))

    def of_array(self, array: np.ndarray, context: str = "") -> ContentDigest:
        """`pixel_digest`: dtype, shape, elements in C order, and `context`: what else tells items apart."""
        header = f"{array.dtype.str}|{','.join(map(str, array.shape))}|{context}".encode()
        body = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        return self._digest(b"array", header, body.data)

    def _digest(self, domain: bytes, header: bytes, body: Buffer) -> ContentDigest:
        if self.algorithm == "sha256":
            h = hashlib.sha256()
            for part in self._framed(domain, header, body):
                h.update(part)
            return ContentDigest(h.digest()[:DIGEST_BYTES])
        x = xxhash.xxh3_128(seed=int.from_bytes(self.secret[:8], "little"))
        for part in self._framed(domain, header, body):
            x.update(part)
        return ContentDigest(x.digest())

    def _framed(self, domain: bytes, header: bytes, body: Buffer) -> Iterable[Buffer]:
        # Every field is length-prefixed: "ab"+"c" never equals "a"+"bc".
        for part in (self.secret, domain, header, body):
            yield len(part).to_bytes(8, "little")
            yield part
