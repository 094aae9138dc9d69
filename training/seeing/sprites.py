"""Printed text and emoji, drawn once and kept: fonts, glyph places, the list of emoji."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

# Debian: fonts-dejavu-core, fonts-liberation, fonts-open-sans, fonts-lato, fonts-roboto-unhinted,
# fonts-comic-neue, fonts-inconsolata, fonts-urw-base35, fonts-freefont-ttf, fonts-noto-color-emoji.
FONT_FILES = (
    *("DejaVuSans.ttf", "DejaVuSans-Bold.ttf", "DejaVuSerif.ttf", "DejaVuSansMono.ttf"),
    *("LiberationSans-Regular.ttf", "LiberationSans-Bold.ttf", "LiberationSerif-Regular.ttf"),
    *("LiberationSerif-Bold.ttf", "LiberationMono-Regular.ttf", "OpenSans-Regular.ttf", "OpenSans-Bold.ttf"),
    *("Lato-Regular.ttf", "Lato-Bold.ttf", "Roboto-Regular.ttf", "Roboto-Bold.ttf", "ComicNeue-Bold.otf"),
    *("Inconsolata.otf", "C059-Roman.otf", "URWGothic-Demi.otf"),
)
HELD_OUT_FONT_FILES = ("P052-Roman.otf", "FreeSansBold.ttf")  # of evaluation alone
EMOJI_FONT = "NotoColorEmoji.ttf"
EMOJI_SIZE = 109  # the only size of its bitmaps
BUILT_IN = ""  # the font inside Pillow
SYSTEM_FONTS = Path("/usr/share/fonts")


@dataclass(frozen=True)
class Emoji:
    character: str
    name: str


@cache
def emoji_list() -> tuple[Emoji, ...]:
    lines = Path(__file__).with_name("emoji.txt").read_text(encoding="utf-8").splitlines()
    return tuple(Emoji(*line.split(" ", 1)) for line in lines)


@dataclass(frozen=True)
class TextSprite:
    mask: Image.Image  # "L", cut to its ink
    centres: tuple[tuple[float, float], ...]  # of each character, in the mask


class Sprites:
    """Everything that comes out of font files. One a process: it keeps what it has opened."""

    def __init__(self, directory: Path = SYSTEM_FONTS) -> None:
        found = {path.name: path for path in directory.rglob("*.[to]tf")}
        self._files = {
            name: found[name] for name in (*FONT_FILES, *HELD_OUT_FONT_FILES, EMOJI_FONT) if name in found
        }
        self.fonts = (BUILT_IN, *(name for name in FONT_FILES if name in found))
        self.held_out_fonts = tuple(name for name in HELD_OUT_FONT_FILES if name in found) or (BUILT_IN,)
        self._opened: dict[tuple[str, int], ImageFont.FreeTypeFont] = {}
        self._emoji: dict[str, Image.Image] = {}

    @property
    def has_emoji(self) -> bool:
        return EMOJI_FONT in self._files

    def files(self) -> list[Path]:
        return list(self._files.values())

    def missing(self) -> list[str]:
        return [name for name in (*FONT_FILES, *HELD_OUT_FONT_FILES, EMOJI_FONT) if name not in self._files]

    def text(self, text: str, font: str, size: int) -> TextSprite:
        face = self._face(font, size if size < 24 else size // 3 * 3)  # few sizes: each stays open
        left, top, right, bottom = face.getbbox(text)
        mask = Image.new("L", (int(right - left) + 2, int(bottom - top) + 2), 0)
        ImageDraw.Draw(mask).text((1 - left, 1 - top), text, fill=255, font=face)
        ends = [face.getlength(text[:end]) for end in range(len(text) + 1)]
        middle = mask.height / 2
        centres = [((a + b) / 2 - left + 1, middle) for a, b in itertools.pairwise(ends)]
        return TextSprite(mask, tuple(centres))

    def emoji(self, character: str) -> Image.Image:
        if character not in self._emoji:
            face = self._face(EMOJI_FONT, EMOJI_SIZE)
            image = Image.new("RGBA", (160, 160), (0, 0, 0, 0))
            ImageDraw.Draw(image).text((4, 4), character, font=face, embedded_color=True)
            self._emoji[character] = image.crop(image.getbbox())
        return self._emoji[character]

    def _face(self, font: str, size: int) -> ImageFont.FreeTypeFont:
        key = (font, size)
        if key not in self._opened:
            if font == BUILT_IN:
                face = ImageFont.load_default(size)
                assert isinstance(face, ImageFont.FreeTypeFont), "Pillow was built without FreeType"
            else:
                face = ImageFont.truetype(str(self._files[font]), size, layout_engine=ImageFont.Layout.BASIC)
            self._opened[key] = face
        return self._opened[key]
