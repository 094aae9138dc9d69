"""Draws one picture: what is on it, its pixels, and what each cell (one token of the tower) shows.

Coordinates are fractions of the picture's width and height. A cell is CELL pixels square.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
from PIL import Image

from training.seeing.layout import Phrase, letter_cells
from training.seeing.palette import COLOURS, SHAPES, VARIANTS, Rgb, shape_mask, tint
from training.seeing.sprites import Emoji, Sprites, emoji_list
from training.seeing.vocabulary import Split, held_out_pair, number, split_words, word

CELL = 28
LABELS_PER_CELL = 4
COUNTS = ("one", "two", "three", "four", "five")
PLACES = (
    *("top left", "top", "top right", "left", "centre", "right"),
    *("bottom left", "bottom", "bottom right"),
)
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
DIGITS = "0123456789"
# What a cell may be labelled with, as phrases of the language model; label 0 is "nothing".
LABELS: tuple[str, ...] = (
    *("", *COLOURS, *SHAPES, *COUNTS, *PLACES, *LETTERS, *DIGITS),
    *(emoji.name for emoji in emoji_list()),
)
_FIRST_EMOJI = len(LABELS) - len(emoji_list())
LABEL_OF = {name: index for index, name in enumerate(LABELS[:_FIRST_EMOJI]) if name}
# All that tokens may say: see `headline` and `Painter`.
SPOKEN: tuple[str, ...] = (*LABELS[1:], "six", "background", "object", "objects", "number", "word", "emoji")
MARGIN = 0.035  # how far a centre keeps from the lines between places

Kind = Literal["things", "number", "word", "emoji", "nothing"]
Pixels = npt.NDArray[np.uint8]
Labels = npt.NDArray[np.int16]  # [rows * columns, LABELS_PER_CELL]


@dataclass(frozen=True)
class Thing:
    colour: str
    shape: str
    x: float
    y: float
    place: str


@dataclass(frozen=True)
class Scene:
    kind: Kind
    background: str | None = None  # None: no one colour
    things: tuple[Thing, ...] = ()
    text: str = ""
    text_colour: str = ""
    emoji: Emoji | None = None

    def counted(self, shape: str) -> int:
        return sum(thing.shape == shape for thing in self.things)


class Canvas:
    """A picture under way."""

    def __init__(self, image: Image.Image, rows: int, columns: int) -> None:
        self.image = image
        self.rows, self.columns = rows, columns
        self.taken: list[tuple[float, float, float, float]] = []
        self.phrases: list[Phrase] = []
        self._cells: dict[tuple[int, int], list[int]] = {}

    def free(self, box: tuple[float, float, float, float], gap: float) -> bool:
        a, b, c, d = box
        return all(a > r + gap or c < p - gap or b > s + gap or d < q - gap for p, q, r, s in self.taken)

    def label(self, x: float, y: float, names: tuple[int, ...]) -> tuple[int, int]:
        """Adds to the cell that holds a point; labels that no longer fit are dropped. Returns the cell."""
        row = min(self.rows - 1, max(0, int(y * self.rows)))
        column = min(self.columns - 1, max(0, int(x * self.columns)))
        cell = self._cells.setdefault((row, column), [])
        cell += [name for name in names if name not in cell]
        return row, column

    def say(self, row: int, column: int, *names: str) -> None:
        """What the tokens from a cell on are to be."""
        self.phrases.append(Phrase(row * self.columns + column, names))

    def labels(self) -> Labels:
        array = np.zeros((self.rows * self.columns, LABELS_PER_CELL), np.int16)
        for (row, column), names in self._cells.items():
            kept = names[:LABELS_PER_CELL]
            array[row * self.columns + column, : len(kept)] = kept
        return array


@dataclass(frozen=True)
class Picture:
    scene: Scene
    pixels: Pixels  # [height, width, 3]
    labels: Labels
    phrases: tuple[Phrase, ...]
    noise: float  # standard deviation, on 0..255, to be added where the picture is used


class Painter:
    """Draws scenes of one split; everything random comes from the generator it is given."""

    def __init__(self, sprites: Sprites, words: tuple[str, ...], split: Split) -> None:
        self._sprites = sprites
        self._words = split_words(words, split)
        self._split = split

    def draw(self, kind: Kind, rows: int, columns: int, rng: random.Random) -> Picture:
        if kind == "emoji" and not self._sprites.has_emoji:
            kind = "things"
        width, height = columns * CELL, rows * CELL
        # Served pictures were resized from some other size: softer or coarser than drawn ones.
        scale = rng.choice((1.0, 1.0, 1.0, 1.0, 1.0, 0.6, 0.8, 1.5))
        background = rng.choice(list(COLOURS)) if rng.random() < 0.55 else "white"
        size = (round(width * scale), round(height * scale))
        canvas = Canvas(Image.new("RGB", size, tint(background, rng)), rows, columns)
        if kind == "things":
            scene = Scene(kind, background, self._things(canvas, background, rng))
        elif kind in ("number", "word"):
            scene = self._text(canvas, kind, background, rng)
        elif kind == "emoji":
            scene = self._emoji(canvas, background, rng)
        else:
            scene = self._nothing(canvas, background, rng)
        image = canvas.image
        if scale != 1.0:
            image = image.resize(
                (width, height), rng.choice((Image.Resampling.BICUBIC, Image.Resampling.BILINEAR))
            )
        noise = 0.0 if rng.random() < 0.6 else rng.uniform(1, 16)
        phrases = (Phrase(0, headline(scene)), *canvas.phrases)
        return Picture(scene, np.asarray(image), canvas.labels(), phrases, noise)

    # --- coloured shapes ---
    def _things(self, canvas: Canvas, background: str, rng: random.Random) -> tuple[Thing, ...]:
        placed: list[tuple[Thing, tuple[float, float]]] = []
        wanted = self._wanted(background, rng)
        largest = 0.62 if len(wanted) == 1 else 0.42 if len(wanted) < 4 else 0.33
        alike = rng.uniform(0.2, largest) if rng.random() < 0.3 else None
        for colour, shape in wanted:
            spot = self._spot(canvas, shape, alike or rng.uniform(0.17, largest), rng)
            if spot is not None:
                x, y, width, height = spot
                self._draw_shape(canvas, colour, shape, spot, rng)
                placed.append((Thing(colour, shape, x, y, place_of(x, y)), (width, height)))
        placed.sort(key=lambda one: (int(one[0].y * canvas.rows), one[0].x))  # as they are read
        things = tuple(thing for thing, _ in placed)
        for thing, (width, height) in placed:
            count = sum(other.shape == thing.shape for other in things)
            names = (thing.colour, thing.shape, COUNTS[count - 1], thing.place)
            label_box(canvas, thing.x, thing.y, width, height, tuple(LABEL_OF[name] for name in names))
            left = max(0, int((thing.x - width / 2) * canvas.columns))
            said = (count_name(count), thing.colour, thing.shape, thing.place)
            canvas.say(int(thing.y * canvas.rows), left, *said)
        return things

    def _wanted(self, background: str, rng: random.Random) -> list[tuple[str, str]]:
        how = rng.random()
        if how < 0.2:
            return [self._pair(background, rng)]
        if how < 0.6:
            return [self._pair(background, rng) for _ in range(rng.randint(2, 4))]
        colour, shape = self._pair(background, rng)  # several of one shape, most of one colour
        wanted = [(colour, shape)] * rng.randint(1, 5)
        if rng.random() < 0.3:
            wanted = [
                (colour if rng.random() < 0.5 else self._pair(background, rng, shape)[0], shape)
                for _ in wanted
            ]
        others = [self._pair(background, rng) for _ in range(rng.choice((0, 0, 1, 2)))]
        wanted += [(other, kind) for other, kind in others if kind != shape]
        rng.shuffle(wanted)
        return wanted[:6]

    def _pair(self, background: str, rng: random.Random, shape: str | None = None) -> tuple[str, str]:
        while True:
            colour, kind = rng.choice(list(COLOURS)), shape or rng.choice(list(SHAPES))
            allowed = self._split == "held_out" or not held_out_pair(colour, kind)
            if colour != background and allowed:
                return colour, kind

    def _spot(
        self, canvas: Canvas, shape: str, size: float, rng: random.Random
    ) -> tuple[float, float, float, float] | None:
        """Centre and extent, in fractions, where nothing is yet; None when there is no room."""
        short = min(canvas.image.size)
        for attempt in range(30):
            side = short * max(0.15, size * 0.95**attempt)
            wide, high = (side, side) if shape != "rectangle" else _oblong(side, rng)
            width, height = wide / canvas.image.width, high / canvas.image.height
            x = rng.uniform(width / 2, 1 - width / 2)
            y = rng.uniform(height / 2, 1 - height / 2)
            box = (x - width / 2, y - height / 2, x + width / 2, y + height / 2)
            if min(abs(v - line) for v in (x, y) for line in (1 / 3, 2 / 3)) > MARGIN and canvas.free(
                box, 0.02
            ):
                canvas.taken.append(box)
                return x, y, width, height
        return None

    def _draw_shape(
        self,
        canvas: Canvas,
        colour: str,
        shape: str,
        spot: tuple[float, float, float, float],
        rng: random.Random,
    ) -> None:
        x, y, width, height = spot
        size = max(1, round(width * canvas.image.width)), max(1, round(height * canvas.image.height))
        mask = shape_mask(shape, rng.randrange(VARIANTS)).resize(size, Image.Resampling.BILINEAR)
        if rng.random() < 0.3:
            mask = mask.point(lambda value: 255 * (value > 127))  # as drawn without smoothing
        corner = round((x - width / 2) * canvas.image.width), round((y - height / 2) * canvas.image.height)
        canvas.image.paste(tint(colour, rng), (*corner, corner[0] + size[0], corner[1] + size[1]), mask)

    # --- text, emoji, nothing ---
    def _text(self, canvas: Canvas, kind: Kind, background: str, rng: random.Random) -> Scene:
        text = number(self._split, rng) if kind == "number" else word(self._words, self._split, rng)
        colour = rng.choice([name for name in COLOURS if readable(name, background)])
        fonts = self._sprites.fonts
        if self._split == "held_out" and rng.random() < 0.2:
            fonts = self._sprites.held_out_fonts
        font = rng.choice(fonts)
        width, height = canvas.image.size
        probe = self._sprites.text(text, font, 40).mask.size
        most = min(0.94 * width / probe[0], 0.8 * height / probe[1])
        least = min(most, 15 * len(text) * (width / (canvas.columns * CELL)) / probe[0])
        size = max(8, int(40 * rng.uniform(max(least, 0.4 * most), most)))
        sprite = self._sprites.text(text, font, size)
        left = rng.randint(0, max(0, width - sprite.mask.width))
        top = rng.randint(0, max(0, height - sprite.mask.height))
        right, bottom = left + sprite.mask.width, top + sprite.mask.height
        canvas.image.paste(tint(colour, rng), (left, top, right, bottom), sprite.mask)
        cells = [
            canvas.label((left + x) / width, (top + y) / height, (LABEL_OF[character],))
            for character, (x, y) in zip(text, sprite.centres, strict=True)
        ]
        line = letter_cells([column for _, column in cells], cells[0][0], canvas.columns)
        for character, cell in zip(text, line, strict=True):
            canvas.say(0, cell, character)
        return Scene(kind, background, text=text, text_colour=colour)

    def _emoji(self, canvas: Canvas, background: str, rng: random.Random) -> Scene:
        chosen = rng.randrange(len(emoji_list()))
        emoji = emoji_list()[chosen]
        sprite = self._sprites.emoji(emoji.character)
        width, height = canvas.image.size
        scale = min(width, height) * rng.uniform(0.3, 0.95) / max(sprite.size)
        size = (max(1, int(sprite.width * scale)), max(1, int(sprite.height * scale)))
        sprite = sprite.resize(size, Image.Resampling.BILINEAR)
        left, top = rng.randint(0, width - sprite.width), rng.randint(0, height - sprite.height)
        canvas.image.paste(sprite, (left, top), sprite)
        x, y = (left + sprite.width / 2) / width, (top + sprite.height / 2) / height
        label = _FIRST_EMOJI + chosen
        label_box(canvas, x, y, sprite.width / width, sprite.height / height, (label,))
        canvas.say(int(y * canvas.rows), max(0, int(left / width * canvas.columns)), emoji.name)
        return Scene("emoji", background, emoji=emoji)

    def _nothing(self, canvas: Canvas, background: str, rng: random.Random) -> Scene:
        """One colour, noise, or colours that run into each other."""
        width, height = canvas.image.size
        how = rng.random()
        if how < 0.35:
            return Scene("nothing", background)
        side = rng.choice((2, 3, 4, 8, 32, 96))
        drawn = np.random.default_rng(rng.getrandbits(32)).integers(0, 256, (side, side, 3), dtype=np.uint8)
        filter_ = Image.Resampling.BICUBIC if side < 32 else Image.Resampling.NEAREST
        canvas.image = Image.fromarray(drawn).resize((width, height), filter_)
        return Scene("nothing", None)


def place_of(x: float, y: float) -> str:
    return PLACES[min(2, int(y * 3)) * 3 + min(2, int(x * 3))]


def label_box(
    canvas: Canvas, x: float, y: float, width: float, height: float, names: tuple[int, ...]
) -> None:
    """Labels the cells of the inner part of a box, its centre at least."""
    rows, columns = canvas.rows, canvas.columns
    reach_x, reach_y = width * 0.4, height * 0.4
    for row in range(max(0, int((y - reach_y) * rows)), min(rows, int((y + reach_y) * rows) + 1)):
        for column in range(
            max(0, int((x - reach_x) * columns)), min(columns, int((x + reach_x) * columns) + 1)
        ):
            canvas.label((column + 0.5) / columns, (row + 0.5) / rows, names)


def headline(scene: Scene) -> tuple[str, ...]:
    """What a picture's first tokens say of all of it: "white background five objects", "red word"."""
    behind = () if scene.background is None else (scene.background, "background")
    if scene.kind == "things":
        count = len(scene.things)
        return (*behind, count_name(count), "objects" if count > 1 else "object")
    if scene.kind == "nothing":
        return behind
    return (*behind, *((scene.text_colour,) if scene.text else ()), scene.kind)


def count_name(count: int) -> str:
    return COUNTS[count - 1] if count <= len(COUNTS) else "six"


def readable(colour: str, background: str) -> bool:
    """Whether text of one colour on the other stands out in brightness."""
    return abs(_brightness(COLOURS[colour][0]) - _brightness(COLOURS[background][0])) > 60


def _brightness(colour: Rgb) -> float:
    red, green, blue = colour
    return 0.3 * red + 0.59 * green + 0.11 * blue


def _oblong(side: float, rng: random.Random) -> tuple[float, float]:
    short = side / rng.uniform(1.6, 2.6)
    return (side, short) if rng.random() < 0.5 else (short, side)
