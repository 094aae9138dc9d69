"""Opening a media file that lies in memory with FFmpeg (PyAV), and turning FFmpeg's errors into ours.

Only file formats are open to a client: playlists and scripts (hls, dash, concat) name other files and URLs,
which FFmpeg would read.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager

import av
from av.container import InputContainer
from av.stream import Stream

from contracts.errors import MediaDecodeError

FORMATS = (
    "aac,ac3,aiff,amr,amrnb,amrwb,ape,asf,au,avi,caf,dts,eac3,flac,flv,gif,gsm,h264,hevc,ivf,loas,m4v,matroska,"
    "mov,mp3,mpeg,mpegts,mpegvideo,nut,obu,ogg,rm,tta,voc,w64,wav,wv"
)
_OPTIONS = {"format_whitelist": FORMATS, "protocol_whitelist": "none"}
_NAMES = "wav, mp3, flac, ogg, opus, aac, m4a, amr, mp4, mov, webm, mkv, avi and others"


@contextmanager
def opened(data: bytes, kind: str) -> Iterator[InputContainer]:
    """The demuxed container; `kind` ("audio" or "video") is for messages. Raises MediaDecodeError."""
    if not data:
        raise MediaDecodeError(f"the {kind} file is empty (zero bytes)")
    try:
        container = av.open(io.BytesIO(data), mode="r", options=_OPTIONS, metadata_errors="ignore")
    except (av.FFmpegError, ValueError):  # ValueError: PyAV on a format that it cannot describe
        raise MediaDecodeError(f"the content is not a readable {kind} file; supported: {_NAMES}") from None
    with container, malformed(kind):
        yield container


def check_codec(stream: Stream, kind: str) -> None:
    """Raises MediaDecodeError when nothing here can decode the track."""
    if stream.codec_context is None:
        raise MediaDecodeError(f"the {kind} track has an unknown codec")


@contextmanager
def malformed(kind: str) -> Iterator[None]:
    """Turns what PyAV raises on bad content into MediaDecodeError."""
    try:
        yield
    except av.FFmpegError as error:
        what = f": {error.strerror[:1].lower()}{error.strerror[1:]}" if error.strerror else ""
        raise MediaDecodeError(f"the {kind} is corrupt or unsupported{what}") from error
