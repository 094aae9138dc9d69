"""`data:` URLs (RFC 2397) to bytes. Decodes slice by slice, so that a thread doing it lets the event loop
run in between; never echoes the payload."""

from __future__ import annotations

import binascii
from urllib.parse import unquote

from contracts.errors import MediaError, MediaTooLarge
from preprocess.base64 import decode_plain, is_compiled

_SLICE_CHARS = 1 << 20  # a few milliseconds of base64 decoding, which holds the interpreter lock
_WHITESPACE = b" \t\r\n\v\f"
_URL_SAFE = bytes.maketrans(b"-_", b"+/")
_HEADER_CHARS = 1024


def decode_data_url(url: str, max_bytes: int) -> bytearray:
    """Extra parameters, any case, whitespace, the URL-safe alphabet, percent-encoding and missing padding are
    accepted; the declared media type is ignored (the content decides). Raises MediaError, MediaTooLarge.
    """
    text, start = _payload(url)
    data = _decode_plain(text, start, max_bytes) or _decode_base64(text, start, max_bytes)
    if not data:
        raise MediaError("the data URL is empty: there is no data after the comma")
    return data


def decode_quickly(url: str, max_bytes: int) -> bytearray | None:
    """`decode_data_url` where that takes a tenth of a millisecond a megabyte: of a payload without anything
    unusual, if base64 is decoded in C. None for any other, errors of the payload among them."""
    return _decode_plain(*_payload(url), max_bytes) if is_compiled() else None


def _payload(url: str) -> tuple[str, int]:
    """A text and where in it base64 begins. Raises MediaError for another header."""
    comma = url.find(",", 0, _HEADER_CHARS)
    if comma < 0:
        raise MediaError("the data URL has no comma; expected data:<type>;base64,<data>")
    parameters = [part.strip().lower() for part in url[len("data:") : comma].split(";")]
    if "base64" not in parameters[1:]:
        raise MediaError("the data URL lacks ';base64'; only data:<type>;base64,<data> is supported")
    start = comma + 1
    if url.find("%", start) >= 0:
        return unquote(url[start:], errors="replace"), 0
    return url, start


def _decode_plain(text: str, start: int, max_bytes: int) -> bytearray | None:
    """What almost all clients send, in one pass: no other alphabet, nothing between the characters. None: it
    is not that, or empty, or too long (for one pass of the interpreter's, or at all)."""
    num_chars = len(text) - start
    if num_chars // 4 * 3 > max_bytes + 3 or (num_chars > _SLICE_CHARS and not is_compiled()):
        return None
    decoded = decode_plain(text, start)
    return decoded if decoded and len(decoded) <= max_bytes else None


def _decode_base64(text: str, start: int, max_bytes: int) -> bytearray:
    decoded, carry = bytearray(), b""
    for position in range(start, len(text), _SLICE_CHARS):
        carry += _clean(text[position : position + _SLICE_CHARS])
        whole = len(carry) - len(carry) % 4
        if b"=" in carry[:whole]:
            break  # padding: only the end may follow
        decoded += _strict(carry[:whole])
        carry = carry[whole:]
        if len(decoded) > max_bytes:
            raise MediaTooLarge(f"the item is larger than the limit of {max_bytes} bytes")
    else:
        position = len(text)
    if _clean(text[position + _SLICE_CHARS :]).strip(b"="):
        raise _not_base64()
    decoded += _strict(carry.rstrip(b"=") + b"=" * (-len(carry.rstrip(b"=")) % 4))
    if len(decoded) > max_bytes:
        raise MediaTooLarge(f"the item is larger than the limit of {max_bytes} bytes")
    return decoded


def _clean(text: str) -> bytes:
    try:
        return text.encode("ascii").translate(_URL_SAFE, _WHITESPACE)
    except UnicodeEncodeError:
        raise _not_base64() from None


def _strict(chars: bytes) -> bytes:
    try:
        return binascii.a2b_base64(chars, strict_mode=True) if chars else b""
    except binascii.Error:
        raise _not_base64() from None


def _not_base64() -> MediaError:
    return MediaError("the payload is not valid base64")
