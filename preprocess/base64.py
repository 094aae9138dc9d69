"""Plain base64 decoded in C, without the interpreter's lock; by the interpreter where nothing is compiled."""

from __future__ import annotations

import binascii
import ctypes
import functools
from collections.abc import Callable

from contracts.compilation import cache_directory
from preprocess.native import BASE64

GROUP_CHARS, GROUP_BYTES = 4, 3


def compile_base64() -> None:
    """Raises BuildError where it cannot be done."""
    BASE64.build(cache_directory())


def decode_plain(text: str, start: int = 0) -> bytearray | None:
    """What `binascii` gives, in its strict mode, of the text from `start` on; None where that raises."""
    native = _native()
    num_groups = max(0, (len(text) - start) // GROUP_CHARS - 1) if native and text.isascii() else 0
    try:  # the last group, which may be padded, or all
        rest = binascii.a2b_base64(text[start + num_groups * GROUP_CHARS :], strict_mode=True)
    except ValueError:  # binascii.Error is one, too
        return None
    if native is None or not num_groups:
        return bytearray(rest)
    num_bytes = num_groups * GROUP_BYTES
    decoded = bytearray(num_bytes + len(rest))
    decoded[num_bytes:] = rest
    # Where the characters are: to copy half a megabyte takes longer than to decode it.
    address = _address_of(text, None) + start
    failed = native(address, num_groups, (ctypes.c_uint8 * num_bytes).from_buffer(decoded))
    return None if failed else decoded


def is_compiled() -> bool:
    return _native() is not None


_address_of = ctypes.pythonapi.PyUnicode_AsUTF8AndSize
_address_of.restype = ctypes.c_void_p
_address_of.argtypes = [ctypes.py_object, ctypes.c_void_p]


@functools.cache
def _native() -> Callable[[int, int, ctypes.Array[ctypes.c_uint8]], int] | None:
    """None until it is compiled: whoever serves compiles first."""
    path = BASE64.path(cache_directory())
    if not path.exists():
        return None
    try:
        library = ctypes.CDLL(str(path))
    except OSError:  # of another C library: the folder is shared between machines
        return None
    decode = library.decode_base64
    decode.restype = ctypes.c_int32
    decode.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]
    return decode
