"""A response's speech: PCM from the service into the client's format, off the event loop."""

from __future__ import annotations

import asyncio
import base64
import struct

import numpy as np

from vocoder.containers.encoder import AudioEncoder

# Whole 16-bit samples and whole base64 groups: such pieces decode alone, and so does their concatenation.
_WHOLE_BYTES = 6


class SpeechEncoder:
    """One container for a whole response, however many answers it is spoken from."""

    def __init__(self, format: str, sample_rate: int, speed: float = 1.0) -> None:
        self._encoder = AudioEncoder(format, sample_rate, speed)
        self._format = format
        self.mime = self._encoder.mime

    async def encode(self, samples: bytes) -> bytes:
        """`samples`: float32 little-endian. What is ready of the container, which may be nothing."""
        pcm = np.frombuffer(samples, dtype="<f4")
        return await asyncio.to_thread(self._encoder.encode, pcm.astype(np.float32, copy=False))

    async def finish(self) -> bytes:
        return await asyncio.to_thread(self._encoder.finish)

    def with_sizes(self, body: bytes) -> bytes:
        """A whole response, whose header may now say how long it is."""
        if self._format != "wav":
            return body
        # RIFF size at 4, data size at 40: the header has the one fixed layout.
        head = bytearray(body[:44])
        struct.pack_into("<I", head, 4, len(body) - 8)
        struct.pack_into("<I", head, 40, len(body) - 44)
        return bytes(head) + body[44:]


class Base64Pieces:
    """Bytes as they come into base64 text that decodes piece by piece and as a whole."""

    def __init__(self) -> None:
        self._rest = b""

    def push(self, data: bytes) -> str:
        data = self._rest + data
        whole = len(data) - len(data) % _WHOLE_BYTES
        self._rest = data[whole:]
        return base64.b64encode(data[:whole]).decode()

    def finish(self) -> str:
        rest, self._rest = self._rest, b""
        return base64.b64encode(rest).decode()
