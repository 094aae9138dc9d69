"""The one image decoder: sniffs by content, checks the header, decodes to upright RGB, resizes to uint8.

Pillow does the decoding. ICC profiles are ignored, as the reference processors do.
"""

from __future__ import annotations

import io
import struct
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageChops, ImageFile
from PIL.BmpImagePlugin import BmpImageFile
from PIL.GifImagePlugin import GifImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import TiffImageFile
from PIL.WebPImagePlugin import WebPImageFile

from contracts.errors import MediaDecodeError, MediaTooLarge
from contracts.specs import ImageSpec
from preprocess.resampling import Resize, UInt8, resize_by_pillow
from preprocess.resize import ResizedShape
from preprocess.sniff import SUPPORTED_FORMATS, canvas_size, check_png, sniff

_OPENERS: dict[str, type[ImageFile.ImageFile]] = {
    "jpeg": JpegImageFile,
    "png": PngImageFile,
    "gif": GifImageFile,
    "webp": WebPImageFile,
    "bmp": BmpImageFile,
    "tiff": TiffImageFile,
}
assert frozenset(_OPENERS) == SUPPORTED_FORMATS

_ORIENTATION_TAG = 0x0112
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_16_BIT_MODES = ("I;16", "I;16L", "I;16B", "I;16N")

# What Pillow's parsers raise on malformed input. Anything else ends the worker, and with it only this item.
_MALFORMED = (
    OSError,
    SyntaxError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    ArithmeticError,
    EOFError,
    RuntimeError,
    struct.error,
    zlib.error,
)


class OpenedImage(NamedTuple):
    """A parsed header: nothing is decoded yet. `size` is width, height after EXIF orientation."""

    image: ImageFile.ImageFile
    size: tuple[int, int]
    orientation: int


def open_image(data: bytes, max_source_pixels: int) -> OpenedImage:
    """Parses the header only. Raises MediaDecodeError (unsupported or malformed), MediaTooLarge (pixels)."""
    format_name = sniff(data)
    if size := canvas_size(data, format_name):
        _check_size(*size, max_source_pixels)  # before Pillow: these decoders allocate the canvas on opening
    with _malformed(format_name):
        image = _OPENERS[format_name](io.BytesIO(data))
    _check_size(*image.size, max_source_pixels)
    if format_name == "png":
        check_png(data)
    with _malformed(format_name):
        orientation = _orientation(image)
    width, height = image.size
    if orientation in (5, 6, 7, 8) and format_name != "tiff":  # Pillow reports TIFF sizes upright
        width, height = height, width
    return OpenedImage(image, (width, height), orientation)


def decode_image(
    opened: OpenedImage,
    shape: ResizedShape,
    spec: ImageSpec,
    resize: Resize = resize_by_pillow,
    out_HWC: UInt8 | None = None,
) -> UInt8:
    """Decodes, turns upright, resizes: [shape.height, shape.width, 3] uint8, C order, in `out_HWC` if that
    is given (and then partly written, perhaps, when this raises).

    Animated files give their first frame on its full canvas. A multi-picture file gives its first picture.
    """
    image = opened.image
    format_name = (image.format or "image").lower()
    with _malformed(format_name):
        image.load()
        plain = _to_opaque(image, spec)
        if isinstance(image, TiffImageFile):
            upright = plain  # turned by its plugin while loading
        elif opened.orientation in _UPRIGHT:
            upright = plain.transpose(_UPRIGHT[opened.orientation])
        else:
            upright = plain
    if upright.size != opened.size:
        raise MediaDecodeError(f"the {format_name} image's size differs from its header's")
    if out_HWC is None:
        out_HWC = np.empty((shape.height, shape.width, 3), np.uint8)
    assert out_HWC.shape == (shape.height, shape.width, 3)
    size = (shape.width, shape.height)
    if upright.mode == "RGB" and upright.size != size:
        return resize(upright, size, spec.resample, out_HWC)
    pixels = np.asarray(upright) if upright.size == size else resize(upright, size, spec.resample)
    # Grey stays one channel until here: resizing treats channels alike, so a third of the work is enough.
    out_HWC[:] = pixels if upright.mode == "RGB" else pixels[:, :, None]
    return out_HWC


@contextmanager
def _malformed(format_name: str) -> Iterator[None]:
    """Turns what Pillow raises on bad content into MediaDecodeError, and keeps its warnings to itself."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except Image.DecompressionBombError:
        raise MediaTooLarge(f"the {format_name} image is too large to decode") from None
    except _MALFORMED as error:
        truncated = isinstance(error, EOFError) or "truncated" in str(error).lower()
        what = "is truncated: it ends early" if truncated else "is corrupt, or truncated"
        raise MediaDecodeError(f"the {format_name} image {what}") from error


def _check_size(width: int, height: int, max_source_pixels: int) -> None:
    if width < 1 or height < 1:
        raise MediaDecodeError("the image has no pixels")
    if width * height > max_source_pixels:
        raise MediaTooLarge(
            f"the image has {width}x{height} pixels; the limit is {max_source_pixels} pixels in all"
        )


def _orientation(image: ImageFile.ImageFile) -> int:
    """1 for none, an invalid value, or an EXIF block that cannot be parsed (it then orients nothing)."""
    try:
        value = image.getexif().get(_ORIENTATION_TAG)
    except _MALFORMED:
        return 1
    return value if isinstance(value, int) and value in _UPRIGHT else 1


def _to_opaque(image: ImageFile.ImageFile, spec: ImageSpec) -> Image.Image:
    """RGB, or L for a grey image without transparency."""
    if image.mode in _16_BIT_MODES:
        return _from_16_bit(image, spec)
    if image.mode == "CMYK":
        return _cmyk(image).convert("RGB")
    has_alpha = "A" in image.getbands() or "a" in image.getbands() or "transparency" in image.info
    if has_alpha:
        return _composite(image.convert("RGBA"), spec)
    if image.mode in ("L", "RGB"):
        return image
    if image.mode == "1":
        return image.convert("L")
    if image.mode in ("P", "RGBX", "YCbCr"):
        return image.convert("RGB")
    raise MediaDecodeError(
        f"unsupported colour mode {image.mode!r}; send 8-bit or 16-bit grey, RGB(A) or CMYK"
    )


def _composite(rgba: Image.Image, spec: ImageSpec) -> Image.Image:
    opaque = rgba.getchannel("A").getextrema() == (255, 255)
    if spec.alpha == "drop" or opaque:
        return rgba.convert("RGB")
    white = Image.new("RGBA", rgba.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, rgba).convert("RGB")


def _cmyk(image: Image.Image) -> Image.Image:
    """Pillow takes every CMYK JPEG for an Adobe one (ink inverted). Without the APP14 marker it is not."""
    if isinstance(image, JpegImageFile) and "adobe" not in image.info:
        return ImageChops.invert(image)
    return image


def _from_16_bit(image: Image.Image, spec: ImageSpec) -> Image.Image:
    """The high byte of each sample, as Pillow does for 16-bit RGB (its conversion to 8 bits clips at 255)."""
    samples = np.asarray(image)
    grey = Image.fromarray((samples >> 8).astype(np.uint8))
    transparent = image.info.get("transparency")
    if not isinstance(transparent, int) or spec.alpha == "drop":
        return grey
    white = Image.new("L", image.size, 255)
    mask = Image.fromarray(np.where(samples == transparent, 0, 255).astype(np.uint8))
    return Image.composite(grey, white, mask)
