"""Kinds of numbers in a config.json: what no model can work with is refused where the file is read, by the
field's name."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

Count = Annotated[int, Meta(ge=1)]
Positive = Annotated[float, Meta(gt=0)]


def check_multiple(field: str, value: int, of: str, divisor: int) -> None:
    """For `__post_init__` of a config: msgspec adds the file and the path to what this raises."""
    if divisor < 1 or value % divisor:
        raise ValueError(f"{field} {value} is no multiple of {of} {divisor}")
