"""A run as one HTML file that needs nothing else, and its charts as SVG files."""

from __future__ import annotations

import html
from pathlib import Path

from benchmarks.chat.charts import Chart, Point, Series, cdf_points
from benchmarks.chat.result import ChatReport
from benchmarks.chat.table import format_report
from benchmarks.samples import Summary

_STYLE = """body{font:14px/1.5 sans-serif;margin:2em auto;max-width:1180px;color:#111}
pre{background:#f6f7f9;padding:1em;overflow-x:auto}figure{display:inline-block;margin:.5em}"""


def charts_of(report: ChatReport) -> tuple[Chart, ...]:
    latency = report.latency
    ttfts = {"cold": latency.ttft_cold, "warm": latency.ttft_warm, "text": latency.ttft_text}
    charts = (
        _cdf("ttft", "Time to first token", ttfts),
        _cdf("itl", "Inter-token latency", {"per token": latency.itl, "per chunk": latency.chunk_gap}),
        _cdf("e2e", "End to end", {"e2e": latency.e2e}),
        _by_turn(report),
        _over_time(report),
        _running(report),
    )
    return tuple(chart for chart in charts if any(series.points for series in chart.series))


def write_page(report: ChatReport, folder: Path) -> Path:
    """Writes `index.html` and one SVG a chart; returns the page."""
    folder.mkdir(parents=True, exist_ok=True)
    charts = charts_of(report)
    for chart in charts:
        (folder / f"{chart.file_name}.svg").write_text(chart.svg())
    page = folder / "index.html"
    page.write_text(render_page(report, charts))
    return page


def render_page(report: ChatReport, charts: tuple[Chart, ...]) -> str:
    figures = "\n".join(f"<figure>{chart.svg()}</figure>" for chart in charts)
    title = html.escape(f"bench chat: {report.server.model or report.server.url}")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{title}</h1>\n"
        f"<pre>{html.escape(format_report(report))}</pre>\n{figures}\n</body></html>\n"
    )


def _cdf(file_name: str, title: str, summaries: dict[str, Summary | None]) -> Chart:
    series = tuple(Series(name, cdf_points(one.cdf)) for name, one in summaries.items() if one is not None)
    return Chart(file_name, title, "ms", "% of samples", series)


def _by_turn(report: ChatReport) -> Chart:
    summaries = [(turn + 1, one) for turn, one in enumerate(report.ttft_by_turn) if one is not None]
    series = (
        Series("p50", tuple((turn, one.p50) for turn, one in summaries)),
        Series("p90", tuple((turn, one.p90) for turn, one in summaries)),
    )
    return Chart("ttft_by_turn", "Time to first token by turn", "turn", "ms", series)


def _over_time(report: ChatReport) -> Chart:
    def dots(name: str, cold: bool) -> Series:
        rows = [row for row in report.rows if row.cold is cold and row.failure is None]
        return Series(
            name, tuple((row.start_s, row.ttft_ms) for row in rows if row.ttft_ms is not None), "dots"
        )

    series = (dots("cold", True), dots("warm", False))
    return Chart("ttft_over_time", "Time to first token over the run", "s since start", "ms", series)


def _running(report: ChatReport) -> Chart:
    changes = sorted(
        [(row.start_s, 1) for row in report.rows]
        + [(row.start_s + row.e2e_ms / 1e3, -1) for row in report.rows]
    )
    points: list[Point] = []
    running = 0
    for at_s, change in changes:
        points += [(at_s, running), (at_s, running + change)]
        running += change
    return Chart(
        "running", "Requests running", "s since start", "requests", (Series("running", tuple(points)),)
    )
