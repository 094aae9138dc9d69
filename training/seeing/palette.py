"""Colours and shapes that the drawn pictures are made of, and their names."""

from __future__ import annotations

import math
import random
from functools import cache

from PIL import Image, ImageDraw

Rgb = tuple[int, int, int]

# Several anchors a name; each use is jittered a little around one of them.
COLOURS: dict[str, tuple[Rgb, ...]] = {
    "red": ((255, 0, 0), (220, 20, 40), (200, 0, 0), (235, 40, 30)),
    "orange": ((255, 165, 0), (255, 140, 0), (245, 130, 20)),
    "yellow": ((255, 255, 0), (250, 220, 20), (255, 235, 60)),
    "green": ((0, 128, 0), (0, 255, 0), (40, 160, 60), (0, 170, 0), (50, 205, 50)),
    "blue": ((0, 0, 255), (30, 90, 220), (0, 0, 128), (65, 105, 225), (30, 144, 255)),
    "purple": ((128, 0, 128), (150, 50, 200), (110, 30, 160)),
    "pink": ((255, 192, 203), (255, 105, 180), (250, 150, 190)),
    "brown": ((139, 69, 19), (120, 72, 30), (110, 60, 20)),
    "black": ((0, 0, 0), (20, 20, 20)),
    "white": ((255, 255, 255), (248, 248, 248)),
    "grey": ((128, 128, 128), (150, 150, 150), (110, 110, 110)),
}
SHAPES: dict[str, str] = {  # singular: plural
    "circle": "circles",
    "square": "squares",
    "triangle": "triangles",
    "rectangle": "rectangles",
    "star": "stars",
    "heart": "hearts",
    "diamond": "diamonds",
    "cross": "crosses",
    "ring": "rings",
    "moon": "moons",
}
JITTER = 10
MASK_SIDE, OVERSAMPLING = 160, 4
VARIANTS = 12  # rotations of a shape that turns


def tint(name: str, rng: random.Random) -> Rgb:
    red, green, blue = rng.choice(COLOURS[name])
    return _near(red, rng), _near(green, rng), _near(blue, rng)


def _near(value: int, rng: random.Random) -> int:
    return min(255, max(0, value + rng.randint(-JITTER, JITTER)))


@cache
def shape_mask(shape: str, variant: int) -> Image.Image:
    """A square "L" mask; `variant` (below VARIANTS) turns the shapes that stay themselves when turned."""
    side = MASK_SIDE * OVERSAMPLING
    mask = Image.new("L", (side, side), 0)
    draw = ImageDraw.Draw(mask)
    turn = (variant - VARIANTS // 2) / VARIANTS  # of a turn, -0.5 to 0.5
    if shape in ("circle", "ring", "moon"):
        draw.ellipse((0, 0, side - 1, side - 1), fill=255)
        hole = {"ring": (0.25, 0.25, 0.75, 0.75), "moon": (0.32, -0.05, 1.22, 0.85)}.get(shape)
        if hole:
            draw.ellipse(tuple(side * x for x in hole), fill=0)
        if shape == "moon":
            mask = mask.rotate(turn * 120)
    elif shape == "heart":
        draw.ellipse((0, side * 0.05, side * 0.53, side * 0.58), fill=255)
        draw.ellipse((side * 0.47, side * 0.05, side - 1, side * 0.58), fill=255)
        draw.polygon([(side * x, side * y) for x, y in ((0.03, 0.42), (0.97, 0.42), (0.5, 1.0))], fill=255)
    else:
        draw.polygon([(side * x, side * y) for x, y in _outline(shape, turn)], fill=255)
    return mask.resize((MASK_SIDE, MASK_SIDE), Image.Resampling.BOX)


def _outline(shape: str, turn: float) -> list[tuple[float, float]]:
    if shape in ("square", "rectangle"):
        return [(0, 0), (1, 0), (1, 1), (0, 1)]
    if shape == "diamond":
        return [(0.5, 0), (0.9, 0.5), (0.5, 1), (0.1, 0.5)]
    if shape == "cross":
        a, b = 0.33, 0.67
        arms = [
            (a, 0),
            (b, 0),
            (b, a),
            (1, a),
            (1, b),
            (b, b),
            (b, 1),
            (a, 1),
            (a, b),
            (0, b),
            (0, a),
            (a, a),
        ]
        return _rotated(arms, turn * 20, 0.92)
    if shape == "triangle":
        return _rotated([(0.5, 0), (1, 0.9), (0, 0.9)], turn * 60, 0.85 if turn else 1.0)
    assert shape == "star", shape
    points = []
    for k in range(10):
        angle = math.pi * (k / 5 - 0.5) + turn * math.radians(36)
        radius = 0.5 if k % 2 == 0 else 0.21
        points.append((0.5 + radius * math.cos(angle), 0.5 + radius * math.sin(angle)))
    return points


def _rotated(points: list[tuple[float, float]], degrees: float, scale: float) -> list[tuple[float, float]]:
    cos, sin = math.cos(math.radians(degrees)) * scale, math.sin(math.radians(degrees)) * scale
    return [
        (0.5 + (x - 0.5) * cos - (y - 0.5) * sin, 0.5 + (x - 0.5) * sin + (y - 0.5) * cos) for x, y in points
    ]
