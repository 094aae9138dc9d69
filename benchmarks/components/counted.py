"""What a server on this machine has counted of itself, and the processor time its processes took, between two
moments: where the time of a case went."""

from __future__ import annotations

import http.client
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from benchmarks.components.run_servers import Running
from benchmarks.text_table import number

_SAMPLE = re.compile(
    r"^(?:omnistage|vllm):(?P<name>\w+_(?:total|sum|count))\{(?P<labels>[^}]*)\} (?P<value>\S+)$", re.M
)
_STAGE = re.compile(r'\bstage="([^"]*)"')
_CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
LEAST_SHOWN_S = 0.005

Counts = Mapping[str, float]


def counted(running: Running) -> dict[str, float]:
    """By "name stage"; the processor's seconds by "cpu_seconds command". Stages tell theirs when they are
    idle, and four times a second."""
    return parse_counts(_metrics(running.port)) | cpu_seconds(running.process.pid)


def _metrics(port: int) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", "/metrics")
        return connection.getresponse().read().decode()
    finally:
        connection.close()


def parse_counts(exposition: str) -> dict[str, float]:
    counts: dict[str, float] = {}
    for sample in _SAMPLE.finditer(exposition):
        stage = _STAGE.search(sample["labels"])
        key = sample["name"] if stage is None else f"{sample['name']} {stage[1]}"
        counts[key] = counts.get(key, 0.0) + float(sample["value"])
    return counts


def cpu_seconds(pid: int) -> dict[str, float]:
    """Of a process and all that it has begun and that still run."""
    found: dict[str, float] = {}
    for name, seconds in _family(pid, "front"):
        key = f"cpu_seconds {name}"
        found[key] = found.get(key, 0.0) + seconds
    return found


def _family(pid: int, name: str | None = None) -> Iterator[tuple[str, float]]:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
        children = [
            c for task in Path(f"/proc/{pid}/task").iterdir() for c in (task / "children").read_text().split()
        ]
    except OSError:
        return  # it has ended
    command, _, rest = text.partition("(")[2].rpartition(")")
    fields = rest.split()
    yield name or command, (int(fields[11]) + int(fields[12])) / _CLOCK_TICKS
    for child in children:
        yield from _family(int(child))


def between(before: Counts, after: Counts) -> dict[str, float]:
    """What has grown."""
    grown = {key: value - before.get(key, 0.0) for key, value in after.items()}
    return {key: value for key, value in sorted(grown.items()) if value > 0}


def counted_lines(found: Counts) -> list[str]:
    """Seconds, the most first, and counts by what is counted."""
    seconds = {key: s for key, s in found.items() if "_seconds" in key and "_count" not in key}
    shown = sorted((s, key) for key, s in seconds.items() if s >= LEAST_SHOWN_S)[::-1]
    counts = {key: count for key, count in found.items() if key not in seconds}
    return [
        "counted by the server, s: " + ", ".join(f"{_plain(key)} {number(s)}" for s, key in shown),
        "counts: " + ", ".join(f"{_plain(key)} {count:.0f}" for key, count in counts.items()),
    ]


def _plain(key: str) -> str:
    name, _, stage = key.partition(" ")
    for end in ("_total", "_sum", "_seconds"):
        name = name.removesuffix(end)
    return f"{name} {stage}".rstrip()
