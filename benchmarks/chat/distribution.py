"""Numbers and sizes drawn from what the user wrote: `64`, `32-128` (uniform) or `32,64,128` (choice)."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Numbers:
    """Uniform over `low` to `high`, both included, or over `choices` when there are any."""

    text: str
    low: int
    high: int
    choices: tuple[int, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Numbers:
        """Raises ValueError, which argparse shows to the user."""
        if "," in text:
            choices = tuple(int(part) for part in text.split(","))
            return cls(text, min(choices), max(choices), choices)
        low, _, high = text.partition("-")
        numbers = cls(text, int(low), int(high or low))
        if numbers.low > numbers.high:
            raise ValueError(f"{text!r} is an empty range")
        return numbers

    def draw(self, rng: random.Random) -> int:
        return rng.choice(self.choices) if self.choices else rng.randint(self.low, self.high)


@dataclass(frozen=True)
class Size:
    width: int
    height: int

    @classmethod
    def parse(cls, text: str) -> Size:
        width, _, height = text.lower().partition("x")
        size = cls(int(width), int(height or width))
        if min(size.width, size.height) < 1:
            raise ValueError(f"{text!r} is not a size")
        return size


@dataclass(frozen=True)
class Sizes:
    """`1024x1024`, `256x256-1024x768` (each side uniform) or `512x512,1024x768` (choice)."""

    text: str
    low: Size
    high: Size
    choices: tuple[Size, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Sizes:
        if "," in text:
            choices = tuple(Size.parse(part) for part in text.split(","))
            return cls(text, choices[0], choices[0], choices)
        low, _, high = text.partition("-")
        sizes = cls(text, Size.parse(low), Size.parse(high or low))
        if sizes.low.width > sizes.high.width or sizes.low.height > sizes.high.height:
            raise ValueError(f"{text!r} is an empty range")
        return sizes

    def draw(self, rng: random.Random) -> Size:
        if self.choices:
            return rng.choice(self.choices)
        width = rng.randint(self.low.width, self.high.width)
        return Size(width, rng.randint(self.low.height, self.high.height))
