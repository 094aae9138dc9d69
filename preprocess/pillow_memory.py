"""Where Pillow keeps the pixels of a picture: to take them out of it copies them twice."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_int64, c_void_p
from dataclasses import dataclass

from PIL import Image

PIXEL_BYTES = 4  # of the mode RGB as well; the fourth means nothing
CAN_EXPORT = hasattr(Image.Image, "__arrow_c_array__")  # since Pillow 11.2


class _ArrowArray(ctypes.Structure):
    """Of the Arrow C data interface."""


_ArrowArray._fields_ = [
    *((name, c_int64) for name in ("length", "null_count", "offset", "n_buffers", "n_children")),
    ("buffers", POINTER(c_void_p)),
    ("children", POINTER(POINTER(_ArrowArray))),
    *((name, c_void_p) for name in ("dictionary", "release", "private_data")),
]
_pointer_in = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_in.restype = c_void_p
_pointer_in.argtypes = [ctypes.py_object, ctypes.c_char_p]


@dataclass(frozen=True)
class Pixels:
    """[H, W, PIXEL_BYTES] of uint8 at `address`, to be read as long as this lives."""

    address: int
    owner: object


def pixels_of(image: Image.Image) -> Pixels | None:
    """None for another mode than RGB, and where they do not lie in one piece, as those of large pictures."""
    if image.mode != "RGB" or not CAN_EXPORT:
        return None
    try:
        _, owner = image.__arrow_c_array__()
    except ValueError:
        return None
    array = ctypes.cast(_pointer_in(owner, b"arrow_array"), POINTER(_ArrowArray)).contents
    values = array.children[0].contents
    assert array.length == image.width * image.height
    assert values.length == array.length * PIXEL_BYTES
    assert not array.offset
    assert not values.offset
    return Pixels(values.buffers[1], owner)
