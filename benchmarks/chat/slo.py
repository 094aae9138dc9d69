"""Service level objectives and floors as the user writes them: `ttft=200ms,tpot=20ms`."""

from __future__ import annotations

import re

import msgspec

METRICS = ("ttft", "tpot", "e2e")
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(us|ms|s)")
_UNIT_MS = {"us": 1e-3, "ms": 1.0, "s": 1e3}


class Slo(msgspec.Struct, frozen=True):
    """Upper limits in milliseconds; None sets no limit."""

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    @classmethod
    def parse(cls, text: str) -> Slo:
        limits: dict[str, float] = {}
        for part in text.split(","):
            name, _, value = part.partition("=")
            if name.strip() not in METRICS:
                raise ValueError(f"{part!r} must be one of {', '.join(METRICS)} = a duration such as 200ms")
            limits[name.strip()] = parse_duration_ms(value.strip())
        return cls(**limits)

    def met(self, *, ttft_ms: float, tpot_ms: float | None, e2e_ms: float) -> bool:
        """An answer of one token has no TPOT and cannot miss its limit."""
        return (
            (self.ttft is None or ttft_ms <= self.ttft)
            and (self.tpot is None or tpot_ms is None or tpot_ms <= self.tpot)
            and (self.e2e is None or e2e_ms <= self.e2e)
        )

    @property
    def text(self) -> str:
        limits = (("ttft", self.ttft), ("tpot", self.tpot), ("e2e", self.e2e))
        return ", ".join(f"{name} <= {value:g} ms" for name, value in limits if value is not None)


class Floor(msgspec.Struct, frozen=True):
    """The least a metric can be on this hardware, and why; shown beside what was measured."""

    metric: str
    value_ms: float
    why: str

    @classmethod
    def parse(cls, text: str) -> Floor:
        """`tpot=1.2ms:weights 269 MB at 224 GB/s`"""
        metric, _, rest = text.partition("=")
        value, _, why = rest.partition(":")
        return cls(metric.strip(), parse_duration_ms(value.strip()), why.strip())


def parse_duration_ms(text: str) -> float:
    match = _DURATION.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a duration such as 20ms or 2s")
    return float(match[1]) * _UNIT_MS[match[2]]
