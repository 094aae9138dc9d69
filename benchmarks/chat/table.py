"""A report as text: one run, or two side by side."""

from __future__ import annotations

from benchmarks.chat.result import ChatReport
from benchmarks.samples import Summary
from benchmarks.text_table import number, percent, render

PERCENTILES = ("p50", "p90", "p99", "mean")


def format_report(report: ChatReport) -> str:
    load = report.workload
    title = [
        *report.environment.lines(),
        f"server    {report.server.url}  {report.server.model or '(its only model)'}"
        + (f"  version {report.server.version}" if report.server.version else ""),
        f"workload  {load.sessions} sessions (+{load.warmup_sessions} warm-up) x {load.turns} turns;"
        f" {load.load};"
        f" images {load.images} of {load.image_size} {load.image_format}, reuse {load.reuse};"
        f" {load.output_tokens} tokens out, history {load.history}, seed {load.seed}",
        f"bytes     sha256 {load.sha256}",
    ]
    parts = ["\n".join(title), _latency(report), _figures(report)]
    parts += [f"warning: {warning}" for warning in report.warnings]
    return "\n\n".join(parts)


def _latency(report: ChatReport) -> str:
    floors = {floor.metric: floor for floor in report.floors}
    rows = [
        [name, *(number(value) for value in _values(summary)), str(summary.count), _floor_cell(report, name)]
        for name, summary in report.latency.named().items()
    ]
    table = render(["ms", *PERCENTILES, "n", "floor"], rows)
    notes = [f"floor of {floor.metric}: {floor.why}" for floor in floors.values() if floor.why]
    return "\n".join([table, *notes])


def _floor_cell(report: ChatReport, name: str) -> str:
    return next((number(floor.value_ms) for floor in report.floors if floor.metric == name), "-")


def _values(summary: Summary) -> tuple[float, float, float, float]:
    return summary.p50, summary.p90, summary.p99, summary.mean


def _figures(report: ChatReport) -> str:
    cache, client, rate = report.cache, report.client, report.throughput
    lines = [
        f"requests  {report.good} good of {report.sent} sent, {report.skipped} skipped,"
        f" in {rate.duration_s:.2f} s:"
        f" {number(rate.requests_per_s)} req/s, {number(rate.output_tokens_per_s)} output tok/s,"
        f" {number(rate.input_tokens_per_s)} input tok/s",
        f"failures  {', '.join(f'{kind} {count}' for kind, count in report.failures.items()) or 'none'}",
        f"cache     expected of prompt tokens {percent(cache.expected_prefix)}, of images"
        f" {percent(cache.expected_images)}; the server's usage says {percent(cache.usage_share)}"
        + "".join(f", {name} {percent(count.share)}" for name, count in cache.counters.items()),
        f"client    {client.cpu_share:.0%} of a core"
        + (
            f"; against a trivial server {client.overhead.cpu_us_per_chunk:.0f} us a chunk, delay p50"
            f" {client.overhead.delay.p50:.2f} ms, p99 {client.overhead.delay.p99:.2f} ms at"
            f" {client.overhead.streams} streams"
            if client.overhead
            else ""
        ),
    ]
    if report.goodput is not None:
        lines.append(
            f"goodput   {number(report.goodput.requests_per_s)} req/s,"
            f" {percent(report.goodput.share)} of requests, at {report.goodput.slo.text}"
        )
    return "\n".join(lines)


def format_comparison(left: ChatReport, right: ChatReport) -> str:
    """`ratio` is right over left. Different bytes on the wire are said first: such runs do not compare."""
    rows = [["server", left.server.url, right.server.url, ""]]
    rows.append(["model", left.server.model or "-", right.server.model or "-", ""])
    for name in {**left.latency.named(), **right.latency.named()}:
        one, other = left.latency.named().get(name), right.latency.named().get(name)
        for which in (0, 2):
            rows.append(_pair(f"{name} {PERCENTILES[which]} ms", _at(one, which), _at(other, which)))
    for label, a, b in _compared_figures(left, right):
        rows.append(_pair(label, a, b))
    rows.append(["failures", str(sum(left.failures.values())), str(sum(right.failures.values())), ""])
    head = ""
    if left.workload.sha256 != right.workload.sha256:
        head = "warning: the two runs sent different bytes (seed, sizes or options differ)\n"
    if left.workload.load != right.workload.load:
        head += f"warning: different load: {left.workload.load}; {right.workload.load}\n"
    return head + render(["", "A", "B", "B/A"], rows)


def _compared_figures(left: ChatReport, right: ChatReport) -> list[tuple[str, float | None, float | None]]:
    a, b = left.throughput, right.throughput
    good = [one.goodput.requests_per_s if one.goodput else None for one in (left, right)]
    return [
        ("requests/s", a.requests_per_s, b.requests_per_s),
        ("output tok/s", a.output_tokens_per_s, b.output_tokens_per_s),
        ("goodput req/s", good[0], good[1]),
        ("cache share expected", left.cache.expected_prefix, right.cache.expected_prefix),
        ("cache share by usage", left.cache.usage_share, right.cache.usage_share),
    ]


def _at(summary: Summary | None, which: int) -> float | None:
    return None if summary is None else _values(summary)[which]


def _pair(label: str, a: float | None, b: float | None) -> list[str]:
    ratio = f"{b / a:.2f}x" if a and b is not None else "-"
    return [label, number(a), number(b), ratio]
