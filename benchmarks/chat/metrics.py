"""From the results of a run to the figures of its report. Pure: the same results give the same figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from benchmarks.chat.load import LoadResult, TurnResult
from benchmarks.chat.result import CacheReport, Goodput, Latency, Row, Throughput, TokenReport
from benchmarks.chat.slo import Slo
from benchmarks.samples import Summary, summarize
from benchmarks.text_table import number
from benchmarks.wire.request import RequestShape, obeyed_length
from benchmarks.wire.server import CacheCount
from benchmarks.wire.timing import StreamTiming, timing_of

CLIENT_BUSY_SHARE = 0.5
LATE_LIMIT_MS = 5.0


@dataclass(frozen=True)
class Timed:
    """`pinned`: an answer of another length than asked counts as a failure."""

    turn: TurnResult
    timing: StreamTiming
    obeyed: bool | None
    pinned: bool

    @property
    def good(self) -> bool:
        """The answer came whole, so that its times mean something."""
        return self.turn.record.failure is None

    @property
    def failure(self) -> str | None:
        if self.turn.record.failure is not None:
            return self.turn.record.failure.label
        return "wrong_length" if self.pinned and self.obeyed is False else None


def time_turns(load: LoadResult, shape: RequestShape, *, pinned: bool) -> list[Timed]:
    return [
        Timed(turn, timing_of(turn.record), obeyed_length(turn.record, shape), pinned) for turn in load.turns
    ]


def latency_of(turns: Sequence[Timed]) -> Latency:
    good = [turn for turn in turns if turn.good]

    def ttft(keep: Callable[[TurnResult], bool]) -> Summary | None:
        return summarize(_known(turn.timing.ttft_ms for turn in good if keep(turn.turn)))

    late_ms = [turn.turn.late_s * 1e3 for turn in turns if turn.turn.turn == 0]
    return Latency(
        ttft=ttft(lambda turn: True),
        ttft_cold=ttft(lambda turn: turn.cold),
        ttft_warm=ttft(lambda turn: turn.has_images and not turn.cold),
        ttft_text=ttft(lambda turn: not turn.has_images),
        itl=summarize([itl for turn in good for itl in turn.timing.itls_ms]),
        chunk_gap=summarize([gap for turn in good for gap in turn.timing.chunk_gaps_ms]),
        tpot=summarize(_known(turn.timing.tpot_ms for turn in good)),
        e2e=summarize([turn.timing.e2e_ms for turn in good]),
        late=summarize(late_ms) if any(late_ms) else None,
    )


def ttft_by_turn(turns: Sequence[Timed]) -> tuple[Summary | None, ...]:
    num_turns = max((turn.turn.turn + 1 for turn in turns), default=0)
    groups: list[list[float]] = [[] for _ in range(num_turns)]
    for turn in turns:
        if turn.good and turn.timing.ttft_ms is not None:
            groups[turn.turn.turn].append(turn.timing.ttft_ms)
    return tuple(summarize(group) for group in groups)


def throughput_of(turns: Sequence[Timed], duration_s: float) -> Throughput:
    good = [turn.turn.record for turn in turns if turn.good]
    per_s = 1 / duration_s if duration_s > 0 else 0.0
    return Throughput(
        duration_s=duration_s,
        requests_per_s=len(good) * per_s,
        output_tokens_per_s=sum(record.num_output_tokens for record in good) * per_s,
        input_tokens_per_s=sum(record.usage.prompt_tokens for record in good if record.usage) * per_s,
    )


def goodput_of(turns: Sequence[Timed], slo: Slo, duration_s: float) -> Goodput:
    met = sum(
        turn.failure is None
        and turn.timing.ttft_ms is not None
        and slo.met(ttft_ms=turn.timing.ttft_ms, tpot_ms=turn.timing.tpot_ms, e2e_ms=turn.timing.e2e_ms)
        for turn in turns
    )
    per_s = 1 / duration_s if duration_s > 0 else 0.0
    return Goodput(slo=slo, requests_per_s=met * per_s, share=met / len(turns) if turns else 0.0)


def cache_of(turns: Sequence[Timed], counters: dict[str, CacheCount]) -> CacheReport:
    expected = [turn.turn.expected for turn in turns]
    num_images = sum(one.num_images for one in expected)
    usages = [turn.turn.record.usage for turn in turns if turn.good]
    told = [usage for usage in usages if usage is not None and usage.cached_tokens is not None]
    return CacheReport(
        expected_prefix=_share(
            sum(one.known_prefix_tokens for one in expected), sum(one.prompt_tokens for one in expected)
        )
        or 0.0,
        expected_images=_share(sum(one.num_known_images for one in expected), num_images),
        usage_share=_share(
            sum(usage.cached_tokens or 0 for usage in told), sum(usage.prompt_tokens for usage in told)
        ),
        counters=counters,
    )


def failures_of(turns: Sequence[Timed]) -> dict[str, int]:
    counts = Counter(turn.failure for turn in turns if turn.failure is not None)
    return dict(sorted(counts.items()))


def tokens_of(turns: Sequence[Timed], shape: RequestShape, *, pinned: bool) -> TokenReport:
    good = [turn for turn in turns if turn.good]
    num_chunks = sum(len(turn.turn.record.chunks) for turn in good)
    num_tokens = sum(turn.turn.record.num_output_tokens for turn in good)
    return TokenReport(
        asked=shape.output_tokens,
        pinned=pinned,
        obeyed=sum(turn.obeyed is True for turn in good),
        disobeyed=sum(turn.obeyed is False for turn in good),
        unknown=sum(turn.obeyed is None for turn in good),
        counted_by_chunks=sum(turn.turn.record.usage is None for turn in good),
        spread_requests=sum(turn.timing.spread for turn in good),
        tokens_per_chunk=_share(num_tokens, num_chunks),
    )


def row_of(turn: Timed, run_started_s: float) -> Row:
    record, expected = turn.turn.record, turn.turn.expected
    return Row(
        session=turn.turn.session,
        turn=turn.turn.turn,
        cold=turn.turn.cold,
        start_s=record.started_s - run_started_s,
        ttft_ms=turn.timing.ttft_ms,
        tpot_ms=turn.timing.tpot_ms,
        e2e_ms=turn.timing.e2e_ms,
        prompt_tokens=record.usage.prompt_tokens if record.usage else None,
        cached_tokens=record.usage.cached_tokens if record.usage else None,
        output_tokens=record.num_output_tokens,
        expected_prefix=_share(expected.known_prefix_tokens, expected.prompt_tokens) or 0.0,
        failure=turn.failure,
        detail=record.failure.detail if record.failure else None,
    )


def warnings_of(
    tokens: TokenReport, shape: RequestShape, latency: Latency, cpu_share: float, num_failed: int
) -> list[str]:
    found: list[str] = []
    if num_failed:
        found.append(f"{num_failed} requests failed; the figures are of the others")
    if tokens.pinned and not shape.pin_length:
        found.append("the server rejects ignore_eos/min_tokens: the output length is not pinned")
    if tokens.disobeyed:
        num_good = tokens.obeyed + tokens.disobeyed + tokens.unknown
        found.append(
            f"the server did not obey the asked {tokens.asked} tokens"
            f" in {tokens.disobeyed} of {num_good} answers"
        )
    if tokens.counted_by_chunks:
        found.append(
            f"{tokens.counted_by_chunks} answers have no usage: chunks are counted instead, a lower bound"
        )
    if tokens.spread_requests:
        found.append(
            f"{tokens.spread_requests} answers have chunks of several tokens"
            f" ({number(tokens.tokens_per_chunk)} a chunk):"
            " itl is spread evenly, see chunk_gap for what a reader sees"
        )
    if cpu_share > CLIENT_BUSY_SHARE:
        found.append(f"the client used {cpu_share:.0%} of a core: its own work is in the figures")
    if latency.late is not None and latency.late.p99 > LATE_LIMIT_MS:
        found.append(f"sessions started up to {latency.late.max:.1f} ms late: the client is too slow")
    return found


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None
