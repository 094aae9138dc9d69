"""What encoded bytes are, by content alone, and what their headers say before any decoder sees them."""

from __future__ import annotations

import struct
import zlib

from contracts.errors import MediaDecodeError

SUPPORTED_FORMATS = frozenset({"jpeg", "png", "gif", "webp", "bmp", "tiff"})

_MAGIC = (
    (b"\xff\xd8\xff", "jpeg"),
    (b"\x89PNG\r\n\x1a\n", "png"),
    (b"GIF87a", "gif"),
    (b"GIF89a", "gif"),
    (b"BM", "bmp"),
    (b"II*\0", "tiff"),
    (b"MM\0*", "tiff"),
    (b"II+\0", "tiff"),
    (b"MM\0+", "tiff"),
    (b"\xff\x0a", "jpeg xl"),
    (b"\0\0\0\x0cJXL ", "jpeg xl"),
    (b"\0\0\0\x0cjP  ", "jpeg 2000"),
    (b"\xff\x4f\xff\x51", "jpeg 2000"),
    (b"%PDF", "pdf"),
    (b"8BPS", "psd"),
    (b"\0\0\1\0", "ico"),
    (b"\x1a\x45\xdf\xa3", "webm"),
    (b"OggS", "ogg"),
)
_HEIC_BRANDS = {b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"}
_AVIF_BRANDS = {b"avif", b"avis"}
_PNG_SIGNATURE_BYTES = 8


def sniff(data: bytes) -> str:
    """One of SUPPORTED_FORMATS. Raises MediaDecodeError, naming the format when it is a known one."""
    if not data:
        raise MediaDecodeError("the image is empty (zero bytes)")
    name = _name(data)
    if name is None:
        raise MediaDecodeError(f"the content is not an image; supported: {_supported()}")
    if name not in SUPPORTED_FORMATS:
        raise MediaDecodeError(f"unsupported image format: {name}; supported: {_supported()}")
    return name


def _supported() -> str:
    return ", ".join(sorted(SUPPORTED_FORMATS))


def _name(data: bytes) -> str | None:
    for magic, name in _MAGIC:
        if data.startswith(magic):
            return name
    if data[:4] == b"RIFF":
        return {b"WEBP": "webp", b"WAVE": "wav", b"AVI ": "avi"}.get(data[8:12])
    if data[4:8] == b"ftyp":
        return _iso_brand(data)
    text = data[:256].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith((b"<!doctype html", b"<html")):
        return "html"
    if text.startswith((b"<svg", b"<?xml")):
        return "svg"
    return None


def _iso_brand(data: bytes) -> str:
    box = data[8 : min(int.from_bytes(data[:4], "big"), 256)]
    brands = {box[i : i + 4] for i in range(0, len(box), 4) if i != 4}  # 4: the minor version, no brand
    if brands & _AVIF_BRANDS:
        return "avif"
    return "heic" if brands & _HEIC_BRANDS else "mp4"


def canvas_size(data: bytes, format_name: str) -> tuple[int, int] | None:
    """Width and height from the first bytes, for formats whose decoder allocates its canvas on opening."""
    if format_name == "gif" and len(data) >= 10:
        width, height = struct.unpack_from("<HH", data, 6)
        return width, height
    if format_name == "webp" and len(data) >= 30:
        return _webp_size(data)
    return None


def _webp_size(data: bytes) -> tuple[int, int] | None:
    chunk = data[12:16]
    if chunk == b"VP8X":
        return int.from_bytes(data[24:27], "little") + 1, int.from_bytes(data[27:30], "little") + 1
    if chunk == b"VP8L":
        bits = int.from_bytes(data[21:25], "little")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if chunk == b"VP8 ":
        width, height = struct.unpack_from("<HH", data, 26)
        return width & 0x3FFF, height & 0x3FFF
    return None


def check_png(data: bytes) -> None:
    """Every chunk is whole and its CRC right, up to IEND (Pillow skips image data's CRC). ISO 15948, 5.3."""
    view, position = memoryview(data), _PNG_SIGNATURE_BYTES
    while position + 12 <= len(data):
        (length,) = struct.unpack_from(">I", data, position)
        end = position + 12 + length
        if end > len(data):
            break
        (expected,) = struct.unpack_from(">I", data, end - 4)
        if zlib.crc32(view[position + 4 : end - 4]) != expected:
            raise MediaDecodeError("the png image is corrupt (a chunk's checksum is wrong)")
        if data[position + 4 : position + 8] == b"IEND":
            return
        position = end
    raise MediaDecodeError("the png image is truncated")
