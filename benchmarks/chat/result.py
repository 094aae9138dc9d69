"""The JSON that `bench chat --json` writes, version `omnistage.bench.chat/1`; times are milliseconds.

schema        "omnistage.bench.chat/1"; the number grows when a field changes its meaning or goes
environment   command, date, hardware and versions of the machine the client ran on
server        address, model, version if it tells
workload      every option that shapes what is sent, and the SHA-256 over all bytes it may send
latency       summaries (count, mean, p50, p90, p99, max, 101 percentiles); null where nothing was measured
    ttft        request written -> first chunk with output; of all good requests
    ttft_cold   … of requests that carry an image never sent before in the run
    ttft_warm   … of requests all of whose images were sent before
    ttft_text   … of requests without images
    itl         gap between chunks divided by the tokens of the later one, one sample a token
    chunk_gap   gap between chunks as it came
    tpot        (last chunk - first chunk) / (tokens - tokens of the first chunk), one sample a request
    e2e         request written -> last byte of the stream
    late        scheduled arrival -> session started (open loop; the client's own fault)
ttft_by_turn  summary of TTFT for turn 0, 1, …
throughput    per second of the whole run, good requests only; input tokens are those the server counts
goodput       requests that are good, of the asked length and inside the objectives
cache         expected from the workload, and as the server reports it (usage; counters of /metrics)
failures      count by kind: connect, timeout, http_<status>, truncated_stream, error_event, bad_event,
              missing_finish_reason; wrong_length is counted too, but such a request stays in the latencies
tokens        where counts come from and whether the asked length was obeyed
client        what the client itself cost: CPU, and delays measured against a trivial server in this process
floors        the least each metric can be on the hardware, where the user gave it
warnings      what makes these numbers less than they look
rows          one per request
"""

from __future__ import annotations

import msgspec

from benchmarks.chat.slo import Floor, Slo
from benchmarks.environment import Environment
from benchmarks.samples import Summary
from benchmarks.wire.server import CacheCount, ServerInfo

SCHEMA = "omnistage.bench.chat/1"


class WorkloadInfo(msgspec.Struct, frozen=True):
    sha256: str
    source: str
    """`synthetic`, or the file name of the conversations."""
    sessions: int
    warmup_sessions: int
    planned_requests: int
    load: str
    """`closed, 8 sessions at once` or `open, 2 sessions/s`."""
    turns: str
    images: str
    image_size: str
    image_format: str
    reuse: str
    prompt_words: str
    output_tokens: int
    history: str
    seed: int


class Latency(msgspec.Struct, frozen=True):
    ttft: Summary | None
    ttft_cold: Summary | None
    ttft_warm: Summary | None
    ttft_text: Summary | None
    itl: Summary | None
    chunk_gap: Summary | None
    tpot: Summary | None
    e2e: Summary | None
    late: Summary | None

    def named(self) -> dict[str, Summary]:
        """Those that were measured, in the order above."""
        summaries: dict[str, Summary | None] = msgspec.structs.asdict(self)
        return {name: summary for name, summary in summaries.items() if summary is not None}


class Throughput(msgspec.Struct, frozen=True):
    duration_s: float
    requests_per_s: float
    output_tokens_per_s: float
    input_tokens_per_s: float


class Goodput(msgspec.Struct, frozen=True):
    slo: Slo
    requests_per_s: float
    share: float
    """Of all requests sent."""


class CacheReport(msgspec.Struct, frozen=True):
    """`expected_prefix` is a share of estimated prompt tokens, `expected_images` of images sent."""

    expected_prefix: float
    expected_images: float | None
    usage_share: float | None
    """cached_tokens over prompt_tokens, of the requests whose usage tells."""
    counters: dict[str, CacheCount]


class TokenReport(msgspec.Struct, frozen=True):
    """`spread_requests`: chunks carried several tokens and their gaps were divided evenly over them."""

    asked: int
    pinned: bool
    obeyed: int
    disobeyed: int
    unknown: int
    counted_by_chunks: int
    spread_requests: int
    tokens_per_chunk: float | None


class Overhead(msgspec.Struct, frozen=True):
    """A trivial server in this process sends `streams` streams in step; its own work is included."""

    streams: int
    chunks: int
    cpu_us_per_chunk: float
    delay: Summary


class ClientReport(msgspec.Struct, frozen=True):
    cpu_s: float
    cpu_share: float
    """Of one core, over the run."""
    overhead: Overhead | None


class Row(msgspec.Struct, frozen=True):
    """`start_s` counts from the start of the run."""

    session: int
    turn: int
    cold: bool
    start_s: float
    ttft_ms: float | None
    tpot_ms: float | None
    e2e_ms: float
    prompt_tokens: int | None
    cached_tokens: int | None
    output_tokens: int
    expected_prefix: float
    failure: str | None
    detail: str | None


class ChatReport(msgspec.Struct, frozen=True):
    environment: Environment
    server: ServerInfo
    workload: WorkloadInfo
    sent: int
    good: int
    skipped: int
    latency: Latency
    ttft_by_turn: tuple[Summary | None, ...]
    throughput: Throughput
    goodput: Goodput | None
    cache: CacheReport
    failures: dict[str, int]
    tokens: TokenReport
    client: ClientReport
    floors: tuple[Floor, ...]
    warnings: tuple[str, ...]
    rows: tuple[Row, ...]
    schema: str = SCHEMA


class UnreadableReport(Exception):
    """A file is no report of this version. The message is for the user."""


def encode_report(report: ChatReport) -> bytes:
    return msgspec.json.format(msgspec.json.encode(report), indent=1)


def decode_report(data: bytes, name: str) -> ChatReport:
    try:
        report = msgspec.json.decode(data, type=ChatReport)
    except msgspec.DecodeError as error:
        raise UnreadableReport(f"{name} is not a report of `bench chat --json`: {error}") from error
    if report.schema != SCHEMA:
        raise UnreadableReport(f"{name} has schema {report.schema}; this version reads {SCHEMA}")
    return report
