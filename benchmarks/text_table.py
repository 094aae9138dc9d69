"""Plain text tables with aligned columns."""

from __future__ import annotations

from collections.abc import Sequence


def render(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The first column is left-aligned, the others are right-aligned. Every row is as long as the header."""
    assert all(len(row) == len(header) for row in rows)
    widths = [max(len(cell) for cell in column) for column in zip(header, *rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (header, *rows)
    )


def number(value: float | None, unit: str = "") -> str:
    """Three to four significant digits; a dash for what was not measured."""
    if value is None:
        return "-"
    digits = 0 if abs(value) >= 1000 else 1 if abs(value) >= 100 else 2 if abs(value) >= 1 else 3
    return f"{value:.{digits}f}{unit}"


def percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
