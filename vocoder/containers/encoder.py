"""One response's audio: float32 PCM in, the bytes of one container out as soon as the codec gives them."""

from __future__ import annotations

import struct
from fractions import Fraction
from typing import Protocol

import av
import numpy as np
import numpy.typing as npt

from vocoder.containers.formats import AudioFormat, Codec, find_format
from vocoder.containers.retime import Retimer, Samples

UNKNOWN_SIZE = 0xFFFF_FFFF
PCM16_SCALE = 32768


class AudioEncoder:
    """`encode` as PCM comes, `finish` once. The container's header comes with the first bytes.

    Not finished, it is simply dropped. `speed` changes the tempo, not the pitch. One thread at a time; an
    `encode`
    costs a few milliseconds per second of audio.
    """

    def __init__(self, format: str, sample_rate: int, speed: float = 1.0) -> None:
        self._format: AudioFormat = find_format(format)
        self.mime = self._format.mime
        self.sample_rate = self._format.encoding_rate(sample_rate)
        self.num_samples = 0  # encoded so far, after the change of speed and rate
        self._retimer = Retimer(sample_rate, self.sample_rate, speed)
        self._writer: _Writer = _new_writer(self._format, self.sample_rate)
        self._finished = False

    @property
    def num_decoded_samples(self) -> int:
        """What a decoder gives back when the stream ends here; see formats.py for the reasons."""
        return self._format.decoded(self.num_samples, self.sample_rate)

    def encode(self, pcm: Samples) -> bytes:
        """Takes mono samples in [-1, 1] (louder ones are clipped); gives what is ready, which may be
        nothing."""
        assert not self._finished
        assert pcm.dtype == np.float32
        assert pcm.ndim == 1
        return self._write(self._retimer.push(pcm))

    def finish(self) -> bytes:
        assert not self._finished
        self._finished = True
        return self._write(self._retimer.finish()) + self._writer.finish()

    def _write(self, samples: Samples) -> bytes:
        self.num_samples += len(samples)
        return self._writer.write(np.clip(samples, -1.0, 1.0))


class _Writer(Protocol):
    def write(self, samples: Samples) -> bytes: ...

    def finish(self) -> bytes: ...


def _new_writer(audio_format: AudioFormat, rate: int) -> _Writer:
    if audio_format.codec is not None:
        return _CodecWriter(audio_format.codec, rate)
    return _Pcm16Writer(wav_header(rate) if audio_format.name == "wav" else b"")


def wav_header(rate: int) -> bytes:
    """16-bit mono of unknown length: readers go on to the end of the stream."""
    riff = struct.pack("<4sI4s", b"RIFF", UNKNOWN_SIZE, b"WAVE")
    layout = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, rate, rate * 2, 2, 16)
    return riff + layout + struct.pack("<4sI", b"data", UNKNOWN_SIZE)


def to_pcm16(samples: Samples) -> bytes:
    scaled = np.rint(samples * np.float32(PCM16_SCALE))
    clipped: npt.NDArray[np.int16] = np.clip(scaled, -PCM16_SCALE, PCM16_SCALE - 1).astype("<i2")
    return clipped.tobytes()


class _Pcm16Writer:
    def __init__(self, header: bytes) -> None:
        self._header = header

    def write(self, samples: Samples) -> bytes:
        header, self._header = self._header, b""
        return header + to_pcm16(samples)

    def finish(self) -> bytes:
        header, self._header = self._header, b""
        return header


class _Sink:
    """What FFmpeg writes into. It has no `seek`, so the muxers know that they stream."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def write(self, data: bytes) -> int:
        self._parts.append(bytes(data))
        return len(data)

    def take(self) -> bytes:
        data = b"".join(self._parts)
        self._parts.clear()
        return data


class _CodecWriter:
    def __init__(self, codec: Codec, rate: int) -> None:
        self._sink = _Sink()
        self._rate = rate
        self._num_written = 0
        options = {"flush_packets": "1", "fflags": "+bitexact", **dict(codec.muxer_options)}
        self._container = av.open(self._sink, "w", format=codec.muxer, options=options)
        self._stream = self._container.add_stream(codec.name, rate=rate)
        self._stream.layout = "mono"
        self._stream.format = codec.sample_format
        if codec.bit_rate is not None:
            self._stream.bit_rate = codec.bit_rate
        self._container.start_encoding()

    def write(self, samples: Samples) -> bytes:
        if len(samples):
            frame = av.AudioFrame.from_ndarray(samples[None], format="flt", layout="mono")
            frame.sample_rate = self._rate
            frame.time_base = Fraction(1, self._rate)
            frame.pts = self._num_written
            self._num_written += len(samples)
            self._mux(frame)
        return self._sink.take()

    def finish(self) -> bytes:
        if self._num_written:
            self._mux(None)
        self._container.close()
        return self._sink.take()

    def _mux(self, frame: av.AudioFrame | None) -> None:
        for packet in self._stream.encode(frame):
            self._container.mux(packet)
