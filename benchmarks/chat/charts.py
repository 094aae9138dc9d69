"""Charts as small inline SVG: lines and dots over labelled axes. No library, no script, no other file."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

WIDTH, HEIGHT = 560, 300
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 34, 46
COLORS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#475569")
Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    name: str
    points: tuple[Point, ...]
    mark: Literal["line", "dots"] = "line"


@dataclass(frozen=True)
class Chart:
    """`file_name` without its ending. Axes start at zero, so that lengths can be compared."""

    file_name: str
    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]

    def svg(self) -> str:
        xs = [x for series in self.series for x, _ in series.points]
        ys = [y for series in self.series for _, y in series.points]
        frame = _Frame(max(xs, default=1.0) or 1.0, max(ys, default=1.0) or 1.0)
        body = [
            f'<text x="{LEFT}" y="18" font-weight="bold">{html.escape(self.title)}</text>',
            *frame.axes(self.x_label, self.y_label),
        ]
        for index, series in enumerate(self.series):
            body += _draw(series, frame, COLORS[index % len(COLORS)])
            body.append(_legend(series.name, index))
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}"'
            f' height="{HEIGHT}" font-family="sans-serif" font-size="11">'
            f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>{"".join(body)}</svg>'
        )


@dataclass(frozen=True)
class _Frame:
    """Maps data to pixels."""

    x_max: float
    y_max: float

    def x(self, value: float) -> float:
        return LEFT + value / self.x_max * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - value / self.y_max * (HEIGHT - TOP - BOTTOM)

    def axes(self, x_label: str, y_label: str) -> list[str]:
        base, middle = HEIGHT - BOTTOM, (TOP + HEIGHT - BOTTOM) / 2
        parts = [f'<path d="M{LEFT} {TOP}V{base}H{WIDTH - RIGHT}" fill="none" stroke="#333"/>']
        for tick in ticks(self.x_max):
            x = self.x(tick)
            parts.append(f'<path d="M{x:.1f} {base}v4" stroke="#333"/>')
            parts.append(f'<text x="{x:.1f}" y="{base + 16}" text-anchor="middle">{tick:g}</text>')
        for tick in ticks(self.y_max):
            y = self.y(tick)
            parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#e5e7eb"/>')
            parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
        center = (LEFT + WIDTH - RIGHT) / 2
        parts.append(
            f'<text x="{center}" y="{HEIGHT - 10}" text-anchor="middle">{html.escape(x_label)}</text>'
        )
        parts.append(
            f'<text transform="translate(14 {middle}) rotate(-90)" text-anchor="middle">'
            f"{html.escape(y_label)}</text>"
        )
        return parts


def ticks(limit: float, num_wanted: int = 5) -> list[float]:
    """Round numbers from zero up to `limit`: steps of 1, 2 or 5 times a power of ten."""
    assert limit > 0
    rough = limit / num_wanted
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    return [index * step for index in range(math.floor(limit / step * 1.0001) + 1)]


def _draw(series: Series, frame: _Frame, color: str) -> list[str]:
    points = [(frame.x(x), frame.y(y)) for x, y in series.points]
    if series.mark == "dots":
        return [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.2" fill="{color}"/>' for x, y in points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return [f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.8"/>']


def _legend(name: str, index: int) -> str:
    y = TOP + 6 + 15 * index
    color = COLORS[index % len(COLORS)]
    return (
        f'<rect x="{WIDTH - 132}" y="{y}" width="10" height="10" fill="{color}"/>'
        f'<text x="{WIDTH - 117}" y="{y + 9}">{html.escape(name)}</text>'
    )


def cdf_points(cdf: Sequence[float]) -> tuple[Point, ...]:
    """(value, percent of samples not above it)"""
    steps = len(cdf) - 1
    return tuple((value, 100 * index / steps) for index, value in enumerate(cdf))
