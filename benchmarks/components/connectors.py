"""A connector between two processes: one-way latency, bandwidth beside memcpy, flat memory.

    python -m benchmarks.components.connectors [--connector shm|nixl] [--pings 3000] [--rounds 7]
        [--messages 1000000] [--cores 0,1] [--loop uvloop|asyncio]

Latency is from before `send` to after `receive` returns in the other process, one chunk under way at a
time; its floor is half a round trip of bare eventfds, what the kernel takes to wake the other process.
Bandwidth is that of a stream, each chunk released as it arrives, its bytes not read; the floor is one thread
copying the same tensor with the C library's memcpy into memory of its own, measured in turns with it.
Like benchmarks.preprocessing it imports the code it measures.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path

import msgspec
import torch

from benchmarks.environment import describe_environment
from benchmarks.text_table import render
from connectors.nixl import NixlDescription, NixlEdge, NixlReceiver, NixlSender
from connectors.shm import ShmDescription, ShmEdge, ShmReceiver, ShmSender
from contracts.chunks import Chunk
from stages.event_loops import loop_factory

KIB, MIB = 1 << 10, 1 << 20
PING_SIZES = (64, 4 * KIB, 64 * KIB)
STREAM_SIZES = (1 * MIB, 16 * MIB, 64 * MIB)
STREAM_BYTES = 256 * MIB  # of one round
POOL_BYTES = 192 * MIB
MAX_CHUNKS = 64
WARM_UP_PINGS = 200
MEMORY_STREAM = "memory"  # its answers say how much memory the child holds
STOP_BELL = 0xFFFF
WARM_UP_MESSAGES = 20_000  # before the resident memory is read for the first time


Description = ShmDescription | NixlDescription
Edge = ShmEdge | NixlEdge


class Ends(msgspec.Struct, frozen=True):
    """Both edges of the child."""

    forth: Description
    back: Description


def open_sender(description: Description) -> ShmSender | NixlSender:
    return ShmSender(description) if isinstance(description, ShmDescription) else NixlSender(description)


def open_receiver(description: Description) -> ShmReceiver | NixlReceiver:
    return ShmReceiver(description) if isinstance(description, ShmDescription) else NixlReceiver(description)


def resident_bytes() -> int:
    """Private memory alone: the edge's own pages are the same whatever passed through them."""
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) * KIB


async def answer(ends: Ends) -> None:
    """The child: releases what comes, and answers the last chunk of each request with the latency of it."""
    receiver, sender = open_receiver(ends.forth), open_sender(ends.back)
    while True:
        chunk = await receiver.receive()
        latency_ns = time.monotonic_ns() - int(chunk.meta.get("sent_ns", 0))
        request_id, last = chunk.request_id, chunk.last
        receiver.release(chunk)
        if request_id == "stop":
            receiver.close()
            sender.close()
            return
        if last:
            meta: dict[str, int | float | str] = {"latency_ns": latency_ns}
            meta |= {"resident": resident_bytes()} if chunk.stream == MEMORY_STREAM else {}
            await sender.send(Chunk(request_id, "answer", 0, True, {}, meta))


def answer_bells(fds: Sequence[int]) -> None:
    """The child of the latency's floor: blocks on the one bell, rings the other, until STOP_BELL."""
    while os.eventfd_read(fds[0]) < STOP_BELL:
        os.eventfd_write(fds[1], 1)


def bell_latencies_us(pings: int, core: int | None) -> list[float]:
    fds = os.eventfd(0), os.eventfd(0)
    command = [
        sys.executable,
        "-m",
        "benchmarks.components.connectors",
        "--answer-bells",
        f"{fds[0]},{fds[1]}",
    ]
    command += [] if core is None else ["--cores", str(core)]
    process = subprocess.Popen(command, pass_fds=fds)
    taken = []
    for _ in range(WARM_UP_PINGS + pings):
        start_ns = time.monotonic_ns()
        os.eventfd_write(fds[0], 1)
        os.eventfd_read(fds[1])
        taken.append((time.monotonic_ns() - start_ns) / 2e3)
    os.eventfd_write(fds[0], STOP_BELL)
    process.wait()
    for fd in fds:
        os.close(fd)
    return sorted(taken[WARM_UP_PINGS:])


class Peer:
    """The child process as the parent uses it."""

    def __init__(self, forth: Edge, back: Edge, core: int | None, loop: str) -> None:
        ends = Ends(forth.description(), back.description())
        command = [
            sys.executable,
            "-m",
            "benchmarks.components.connectors",
            "--answer",
            msgspec.json.encode(ends).decode(),
        ]
        command += ["--loop", loop] + ([] if core is None else ["--cores", str(core)])
        self.core = core
        self.process = subprocess.Popen(command, pass_fds=forth.fds + back.fds)
        self._sender = open_sender(forth.description())
        self._receiver = open_receiver(back.description())

    async def exchange(self, tensor: torch.Tensor, count: int = 1, stream: str = "s") -> Chunk:
        """A stream of `count` chunks; the answer to its last."""
        for seq in range(count):
            last = seq == count - 1
            meta: dict[str, int | float | str] = {"sent_ns": time.monotonic_ns()} if last else {}
            await self._sender.send(Chunk("r", stream, seq, last, {"x": tensor}, meta))
        chunk = await self._receiver.receive()
        self._receiver.release(chunk)
        return chunk

    async def stop(self) -> None:
        await self._sender.send(Chunk("stop", "s", 0, True))
        self.process.wait()
        self._sender.close()
        self._receiver.close()


async def latencies_us(peer: Peer, nbytes: int, pings: int) -> list[float]:
    tensor = torch.zeros(nbytes, dtype=torch.uint8)
    taken = [await peer.exchange(tensor) for _ in range(WARM_UP_PINGS + pings)]
    return sorted(int(chunk.meta["latency_ns"]) / 1e3 for chunk in taken[WARM_UP_PINGS:])


def memcpy_seconds(source: torch.Tensor, target: torch.Tensor, count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)
    return time.perf_counter() - start


async def bandwidths(peer: Peer, nbytes: int, rounds: int) -> tuple[list[float], list[float]]:
    """GiB/s of the edge and of memcpy, round by round; the first, which touches new pages, is left out."""
    source = torch.ones(nbytes, dtype=torch.uint8)
    target = torch.zeros_like(source)
    count = STREAM_BYTES // nbytes
    edge, floor = [], []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        await peer.exchange(source, count)
        edge.append(STREAM_BYTES / 2**30 / (time.perf_counter() - start))
        floor.append(STREAM_BYTES / 2**30 / memcpy_seconds(source, target, count))
    return edge[1:], floor[1:]


async def report(peer: Peer, options: argparse.Namespace) -> None:
    latencies = {f"{n} B": await latencies_us(peer, n, options.pings) for n in PING_SIZES}
    latencies["bare eventfd"] = bell_latencies_us(options.pings, peer.core)
    rows = []
    for name, taken in latencies.items():
        p50, p99 = taken[len(taken) // 2], taken[len(taken) * 99 // 100]
        rows.append([name, f"{p50:.1f}", f"{p99:.1f}", f"{taken[0]:.1f}"])
    print("\n" + render(["one way, µs", "p50", "p99", "least"], rows))
    rows.clear()
    for nbytes in STREAM_SIZES:
        edge, floor = await bandwidths(peer, nbytes, options.rounds)
        share = statistics.median(a / b for a, b in zip(edge, floor, strict=True))
        medians = [f"{statistics.median(values):.2f}" for values in (edge, floor)]
        rows.append(
            [f"{nbytes // MIB} MiB", *medians, f"{max(edge):.2f}", f"{max(floor):.2f}", f"{share:.0%}"]
        )
    header = ["GiB/s", "edge", "memcpy", "edge, best", "memcpy, best", "edge/memcpy"]
    print("\n" + render(header, rows))
    if options.messages:
        await report_memory(peer, options.messages)


async def report_memory(peer: Peer, messages: int) -> None:
    tensor = torch.zeros(64, dtype=torch.uint8)
    before = await peer.exchange(tensor, WARM_UP_MESSAGES, MEMORY_STREAM), resident_bytes()
    start = time.perf_counter()
    after = await peer.exchange(tensor, messages, MEMORY_STREAM), resident_bytes()
    rate = messages / (time.perf_counter() - start)
    receiver = (int(after[0].meta["resident"]) - int(before[0].meta["resident"])) / KIB
    sender = (after[1] - before[1]) / KIB
    print(f"\n{messages} messages of 64 B: {rate:.0f}/s; private memory grew by {sender:+.0f} KiB in the")
    print(f"sender, {receiver:+.0f} KiB in the receiver")


async def measure(options: argparse.Namespace, cores: Sequence[int]) -> None:
    kind: type[ShmEdge] | type[NixlEdge] = ShmEdge if options.connector == "shm" else NixlEdge
    forth: Edge = kind.create("forth", POOL_BYTES, MAX_CHUNKS)
    back: Edge = kind.create("back", MIB, MAX_CHUNKS)
    peer = Peer(forth, back, cores[1] if len(cores) > 1 else None, options.loop)
    try:
        await report(peer, options)
        await peer.stop()
    finally:
        if peer.process.poll() is None:
            peer.process.kill()
            peer.process.wait()
        forth.close()
        back.close()


def run(measurement: Coroutine[None, None, None], loop: str) -> None:
    with asyncio.Runner(loop_factory=loop_factory() if loop == "uvloop" else None) as runner:
        runner.run(measurement)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--connector", choices=("shm", "nixl"), default="shm")
    parser.add_argument("--pings", type=int, default=3000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--messages", type=int, default=1_000_000, help="0 leaves the memory check out")
    parser.add_argument("--cores", default="", help="SENDER,RECEIVER: pin the two processes")
    parser.add_argument(
        "--loop", choices=("uvloop", "asyncio"), default="uvloop", help="stages run on uvloop"
    )
    parser.add_argument("--answer", help=argparse.SUPPRESS)
    parser.add_argument("--answer-bells", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    cores = [int(core) for core in options.cores.split(",") if core]
    if cores:
        os.sched_setaffinity(0, {cores[0]})
    if options.answer:
        run(answer(msgspec.json.decode(options.answer, type=Ends)), options.loop)
        return 0
    if options.answer_bells:
        answer_bells([int(fd) for fd in options.answer_bells.split(",")])
        return 0
    environment = describe_environment(["python", "-m", "benchmarks.components.connectors", *argv])
    print("\n".join(environment.lines()))
    run(measure(options, cores), options.loop)
    print(f"load average at the end: {os.getloadavg()[0]:.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
