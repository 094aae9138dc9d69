"""Every kind of image file gives the picture that it shows, or a 400 that says what is wrong."""

from __future__ import annotations

import io
import struct
import zlib

import msgspec
import numpy as np
import pytest
from PIL import Image, ImageOps

from contracts.errors import MediaDecodeError, MediaError, MediaTooLarge
from contracts.media import MediaOptions
from contracts.specs import ImageSpec
from preprocess.images import decode_image, open_image
from preprocess.resize import pixel_budget, resized_shape
from tests.preprocess.samples import TINY, encode, noise, picture

EXACT = msgspec.structs.replace(TINY, max_pixels=1 << 20)  # sizes that are multiples of 8 stay as they are


def decode(data: bytes, spec: ImageSpec = EXACT, max_source_pixels: int = 1_000_000) -> np.ndarray:
    opened = open_image(data, max_source_pixels)
    shape = resized_shape(*opened.size, spec, pixel_budget(spec, MediaOptions()))
    return decode_image(opened, shape, spec)


def test_plain_rgb_is_untouched() -> None:
    pixels = noise(64, 48)
    np.testing.assert_array_equal(decode(encode(pixels)), pixels)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("format_name", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_exif_orientation_is_applied(orientation: int, format_name: str) -> None:
    stored = picture(24, 16)
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"lossless": True} if format_name == "WEBP" else {}
    data = encode(stored, format_name, exif=exif, **options)
    as_stored = stored if format_name != "JPEG" else Image.open(io.BytesIO(encode(stored, "JPEG")))
    tagged = Image.Image.copy(as_stored)
    tagged.getexif()[0x0112] = orientation
    expected = np.asarray(ImageOps.exif_transpose(tagged))
    assert open_image(data, 1000).size == (expected.shape[1], expected.shape[0])
    np.testing.assert_array_equal(decode(data), expected)
    assert expected.shape[:2] == ((24, 16) if orientation >= 5 else (16, 24))


@pytest.mark.parametrize("value", [0, 9, 65535])
def test_an_invalid_orientation_turns_nothing(value: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = value
    pixels = noise(24, 16)
    np.testing.assert_array_equal(decode(encode(pixels, exif=exif)), pixels)


def test_an_unreadable_exif_block_does_not_spoil_the_image() -> None:
    plain = encode(picture(24, 16), "JPEG")
    block = b"Exif\0\0" + b"II*\0\xff\xff\xff\xff" + b"junk" * 10
    data = plain[:2] + b"\xff\xe1" + struct.pack(">H", len(block) + 2) + block + plain[2:]
    np.testing.assert_array_equal(decode(data), decode(plain))


@pytest.mark.parametrize("format_name", ["PNG", "WEBP"])
def test_alpha_is_composited_onto_white(format_name: str) -> None:
    options = {"lossless": True} if format_name == "WEBP" else {}
    rgba = noise(64, 64, channels=4)
    rgba[..., 3] = 0
    rgba[16:48, 16:48] = (10, 200, 30, 255)
    first = decode(encode(rgba, format_name, **options))
    rgba[:16, :, :3] = 99  # what lies under alpha 0 does not matter
    np.testing.assert_array_equal(decode(encode(rgba, format_name, **options)), first)
    assert (first[0, 0] == 255).all()
    assert first[20, 20].tolist() == [10, 200, 30]


def test_half_transparency_blends_with_white() -> None:
    image = Image.merge("LA", [Image.new("L", (32, 32), 100), Image.new("L", (32, 32), 128)])
    result = decode(encode(image))
    expected = round(100 * 128 / 255 + 255 * 127 / 255)
    assert np.abs(result.astype(int) - expected).max() <= 1
    assert result.shape == (32, 32, 3)


def test_the_alpha_policy_is_the_models() -> None:
    rgba = np.full((16, 16, 4), (10, 20, 30, 0), np.uint8)
    drop = msgspec.structs.replace(EXACT, alpha="drop")
    assert (decode(encode(rgba)) == 255).all()
    assert decode(encode(rgba), drop)[0, 0].tolist() == [10, 20, 30]
    assert drop.key() != EXACT.key()


def test_palette_with_byte_transparency_equals_the_rgba_file() -> None:
    palette = Image.new("P", (32, 32))
    palette.putdata([(x * y) % 4 for y in range(32) for x in range(32)])
    palette.putpalette([255, 0, 0, 0, 255, 0, 0, 0, 255, 9, 9, 9] + [0] * 756)
    data = encode(palette, transparency=bytes([255, 0, 128, 255]))
    rgba = Image.open(io.BytesIO(data)).convert("RGBA")
    np.testing.assert_array_equal(decode(data), decode(encode(rgba)))
    assert (decode(data)[1, 1] == 255).all()  # index 1 is fully transparent: white, not green


@pytest.mark.parametrize("mode", ["P", "L", "1", "RGB"])
def test_single_colour_transparency_becomes_white(mode: str) -> None:
    image = Image.new(mode, (16, 16), 0)
    data = encode(image, transparency=(0, 0, 0) if mode == "RGB" else 0)
    assert (decode(data) == 255).all()


def test_grey_becomes_three_equal_channels() -> None:
    for format_name in ("JPEG", "PNG"):
        pixels = decode(encode(picture(33, 50).convert("L"), format_name))
        assert pixels.ndim == 3
        assert (pixels == pixels[..., :1]).all()


def test_16_bit_grey_keeps_its_range() -> None:
    ramp = np.arange(64 * 64, dtype=np.uint16).reshape(64, 64) * 16
    for format_name in ("PNG", "TIFF"):
        np.testing.assert_array_equal(decode(encode(ramp, format_name))[..., 0], ramp >> 8)


def test_16_bit_grey_with_a_transparent_value() -> None:
    samples = np.full((16, 16), 0x1234, np.uint16)
    samples[0, 0] = 0x1235
    ihdr = struct.pack(">IIBBBBB", 16, 16, 16, 0, 0, 0, 0)
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in samples)
    data = b"\x89PNG\r\n\x1a\n" + b"".join(
        _chunk(*part)
        for part in ((b"IHDR", ihdr), (b"tRNS", b"\x12\x34"), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    )
    result = decode(data)
    assert result[0, 0, 0] == 0x12
    assert (result.reshape(-1, 3)[1:] == 255).all()


def _chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def _strip_adobe(jpeg: bytes) -> bytes:
    at = jpeg.index(b"\xff\xee\x00\x0eAdobe")
    return jpeg[:at] + jpeg[at + 16 :]


def test_cmyk_jpeg_polarity_with_and_without_the_adobe_marker() -> None:
    red = Image.new("CMYK", (32, 32), (0, 255, 255, 0))
    adobe = encode(red, "JPEG", quality=95)  # Pillow stores ink inverted, with the marker, as Adobe does
    assert b"Adobe" in adobe
    inverted = encode(Image.new("CMYK", (32, 32), (255, 0, 0, 255)), "JPEG", quality=95)
    plain = _strip_adobe(inverted)  # ink as it is, no marker
    for data in (adobe, plain):
        mean = decode(data).reshape(-1, 3).mean(axis=0)
        np.testing.assert_allclose(mean, [255, 0, 0], atol=6)


def test_ycck_jpeg() -> None:
    """Adobe transform 2: luma and chroma of the ink amounts taken as RGB, and inverted black."""
    luma_chroma = Image.new("RGB", (1, 1), (0, 255, 255)).convert("YCbCr").getpixel((0, 0))  # ink of pure red
    stored = (*luma_chroma, 255)
    data = encode(Image.new("CMYK", (32, 32), tuple(255 - s for s in stored)), "JPEG", quality=95)
    at = data.index(b"Adobe") + 11
    assert data[at] == 0
    ycck = data[:at] + b"\x02" + data[at + 1 :]
    np.testing.assert_allclose(decode(ycck).reshape(-1, 3).mean(axis=0), [255, 0, 0], atol=6)


def test_animations_give_their_first_frame() -> None:
    frames = [Image.new("RGB", (32, 32), colour) for colour in ("red", "lime", "blue")]
    frames[1].putpixel((0, 0), (1, 2, 3))
    for format_name, extra in (("GIF", {"disposal": 2}), ("WEBP", {"lossless": True}), ("PNG", {})):
        data = encode(frames[0], format_name, save_all=True, append_images=frames[1:], duration=100, **extra)
        pixels = decode(data)
        assert pixels.shape == (32, 32, 3)
        assert pixels.reshape(-1, 3).mean(axis=0).tolist() == [255, 0, 0], format_name
        np.testing.assert_array_equal(pixels, decode(data))


def test_a_gif_frame_smaller_than_its_canvas_is_placed_on_it() -> None:
    data = bytearray(encode(Image.new("P", (8, 8), 1), "GIF", transparency=0))
    data[6:10] = struct.pack("<HH", 16, 24)  # logical screen
    assert open_image(bytes(data), 10_000).size == (16, 24)
    assert decode(bytes(data)).shape == (24, 16, 3)


def test_content_decides_whatever_was_declared() -> None:
    pixels = noise(16, 16)
    for format_name in ("PNG", "BMP", "TIFF"):
        np.testing.assert_array_equal(decode(encode(pixels, format_name)), pixels)


@pytest.mark.parametrize("lossless", [True, False])
def test_webp_is_decoded(lossless: bool) -> None:
    pixels = decode(encode(picture(64, 64), "WEBP", lossless=lossless))
    assert np.abs(pixels.astype(int) - np.asarray(picture(64, 64))).mean() < 12


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (b"\0\0\0\x1cftypheic\0\0\0\0mif1heicmiaf" + b"\0" * 64, "heic"),
        (b"\0\0\0\x18ftypmif1\0\0\0\0heicmiaf" + b"\0" * 64, "heic"),
        (b"\0\0\0\x1cftypavif\0\0\0\0avifmif1miaf" + b"\0" * 64, "avif"),
        (b"\0\0\0\x1cftypisom\0\0\2\0isomiso2mp41" + b"\0" * 64, "mp4"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "svg"),
        (b"<!DOCTYPE html><html></html>", "html"),
        (b"%PDF-1.7 ...", "pdf"),
        (b"\0\0\0\x0cJXL \r\n\x87\n", "jpeg xl"),
    ],
)
def test_unsupported_formats_are_named(data: bytes, name: str) -> None:
    with pytest.raises(MediaDecodeError, match=f"unsupported image format: {name}") as caught:
        decode(data)
    assert caught.value.status == 400


def test_real_avif_is_refused_although_pillow_could_read_it() -> None:
    with pytest.raises(MediaDecodeError, match="avif"):
        decode(encode(picture(16, 16), "AVIF"))


@pytest.mark.parametrize(
    "data", [b"", b"hello, this is plain text", b"\0" * 100, b"\xff\xd8", b"\x89PNG\r\n\x1a\n"]
)
def test_what_is_no_image_is_a_400(data: bytes) -> None:
    with pytest.raises(MediaDecodeError):
        decode(data)


@pytest.mark.parametrize("format_name", ["JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF"])
def test_a_truncated_image_is_a_400(format_name: str) -> None:
    data = encode(noise(64, 64), format_name)
    decode(data)
    for cut in (128, len(data) // 2, len(data) - 40):
        with pytest.raises(MediaDecodeError, match="truncated") as caught:
            decode(data[:-cut])
        assert "Error" not in caught.value.message, "words, not the name of an exception"


def test_a_png_without_its_end_is_a_400() -> None:
    with pytest.raises(MediaDecodeError, match="truncated"):
        decode(encode(noise(16, 16))[:-12])


@pytest.mark.parametrize("chunk", [b"IHDR", b"IDAT", b"IEND"])
def test_a_flipped_png_checksum_is_a_400(chunk: bytes) -> None:
    data = bytearray(encode(noise(16, 16)))
    at = data.index(chunk)
    (length,) = struct.unpack_from(">I", data, at - 4)
    data[at + 4 + length] ^= 1
    with pytest.raises(MediaDecodeError):
        decode(bytes(data))


def test_trailing_bytes_after_the_end_are_ignored() -> None:
    data = encode(noise(16, 16))
    np.testing.assert_array_equal(decode(data + b"trailing"), decode(data))


@pytest.mark.parametrize("format_name", ["PNG", "GIF", "WEBP", "BMP", "TIFF", "JPEG"])
def test_the_pixel_limit_is_checked_before_decoding(
    format_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = encode(Image.new("RGB", (101, 100)), format_name)
    open_image(data, 10_100)
    monkeypatch.setattr(Image.core, "new", None)  # nothing may allocate a raster
    monkeypatch.setattr(Image.core, "fill", None)
    with pytest.raises(MediaTooLarge, match="101x100") as caught:
        open_image(data, 10_099)
    assert caught.value.status == 400


def test_a_declared_bomb_of_a_few_bytes_is_refused() -> None:
    ihdr = struct.pack(">IIBBBBB", 20_000, 20_000, 8, 2, 0, 0, 0)
    data = (
        b"\x89PNG\r\n\x1a\n"
        + _chunk(b"IHDR", ihdr)
        + _chunk(b"IDAT", zlib.compress(b""))
        + _chunk(b"IEND", b"")
    )
    with pytest.raises(MediaTooLarge):
        decode(data, max_source_pixels=100_000_000)
    webp = b"RIFF\0\0\0\0WEBPVP8X\x0a\0\0\0\0\0\0\0" + b"\xff\x3f\x00" * 2 + b"\0" * 8
    with pytest.raises(MediaTooLarge, match="16384x16384"):
        decode(webp, max_source_pixels=100_000_000)


@pytest.mark.parametrize("size", [(1, 1), (100, 1), (1, 100), (3, 3), (3, 1), (7, 9)])
@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA"])
def test_tiny_images_are_enlarged(size: tuple[int, int], mode: str) -> None:
    pixels = decode(encode(Image.new(mode, size, 255 if mode == "L" else (255,) * len(mode))))
    assert pixels.shape[0] % 8 == pixels.shape[1] % 8 == 0
    assert (pixels == 255).all()


def test_floating_point_tiff_is_refused_by_mode() -> None:
    with pytest.raises(MediaDecodeError, match="'F'"):
        decode(encode(np.ones((16, 16), np.float32), "TIFF"))


def test_the_first_picture_of_a_multi_picture_jpeg() -> None:
    first, second = picture(32, 32, seed=1), picture(32, 32, seed=2)
    data = encode(first, "MPO", save_all=True, append_images=[second])
    assert np.abs(decode(data).astype(int) - np.asarray(first)).mean() < 10


def test_errors_are_short_and_hold_no_content() -> None:
    for data in (b"A" * 5000, b"GIF89a" + b"secret" * 1000, b"\xff\xd8\xff" + b"secret" * 1000):
        with pytest.raises(MediaError) as caught:
            decode(data)
        assert len(caught.value.message) < 200
        assert "secret" not in caught.value.message
