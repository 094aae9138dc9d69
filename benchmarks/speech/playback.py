"""A spoken answer as a listener has it: a 1× player that starts with the first packet, on exact arrival
times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

SILENCE = 0.01  # of full scale: quieter is not heard
_SCALE = 32768
_SAMPLE_BYTES = 2


@dataclass(frozen=True)
class Packet:
    """16-bit mono samples and when they were read from the socket."""

    at_s: float
    pcm: bytes


@dataclass(frozen=True)
class Playback:
    """Seconds since the request. `audible_s` None: nothing but silence came.

    `underrun_s`: how long the player stood still in all after it had begun.
    """

    first_packet_s: float
    audible_s: float | None
    last_packet_s: float
    duration_s: float
    underrun_s: float

    @property
    def rtf(self) -> float:
        """Seconds of waiting per second of speech: below 1 it is made faster than it is heard."""
        return self.last_packet_s / self.duration_s


def play(packets: Sequence[Packet], started_s: float, sample_rate: int) -> Playback | None:
    """None for an answer without a whole sample. A sample cut by a packet's end counts when it is whole."""
    packets = [packet for packet in packets if packet.pcm]
    pcm = b"".join(packet.pcm for packet in packets)
    num_samples = len(pcm) // _SAMPLE_BYTES
    if not num_samples:
        return None
    samples = np.frombuffer(pcm[: num_samples * _SAMPLE_BYTES], "<i2")
    loud = np.flatnonzero(np.abs(samples.astype(np.int32)) > SILENCE * _SCALE)
    first_loud = int(loud[0]) if len(loud) else None
    audible_s: float | None = None
    played_to_s = packets[0].at_s  # when the player has played what came before this packet
    underrun_s, num_bytes, first = 0.0, 0, packets[0].at_s
    for packet in packets:
        wait_s = max(0.0, packet.at_s - played_to_s)
        underrun_s += wait_s
        begins_s = played_to_s + wait_s
        first_sample = num_bytes // _SAMPLE_BYTES
        num_bytes += len(packet.pcm)
        end_sample = num_bytes // _SAMPLE_BYTES
        if audible_s is None and first_loud is not None and first_loud < end_sample:
            audible_s = begins_s + (first_loud - first_sample) / sample_rate
        played_to_s = begins_s + (end_sample - first_sample) / sample_rate
    return Playback(
        first_packet_s=first - started_s,
        audible_s=None if audible_s is None else audible_s - started_s,
        last_packet_s=packets[-1].at_s - started_s,
        duration_s=num_samples / sample_rate,
        underrun_s=underrun_s,
    )
