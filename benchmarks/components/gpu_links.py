"""Edges between two processes on GPUs: one-way latency and bandwidth by size, beside the link's own copy.

    python -m benchmarks.components.gpu_links [--devices cuda:0,cuda:1] [--connectors cuda_ipc,shm,nixl]
        [--pings 200] [--rounds 3] [--json FILE]

Latency: from before `send` of a tensor that is ready on the sender's device until it is complete on the
receiver's, one chunk under way at a time. Bandwidth: of a stream, each chunk released once it is there.
What a
connector hands out in host memory is copied to the device by the receiver. The floor is torch's copy of the
same
tensor from one device to the other in one process: one copy waited for, and a stream of them.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from benchmarks.environment import describe_environment
from benchmarks.samples import median
from benchmarks.text_table import number, render
from connectors.cuda_ipc import CudaIpcDescription, CudaIpcEdge
from connectors.nixl import NixlDescription, NixlEdge
from connectors.shm import ShmDescription, ShmEdge
from contracts.chunks import Chunk
from contracts.errors import OmnistageError
from stages.edges import open_receiver, open_sender

KIB, MIB = 1 << 10, 1 << 20
SIZES = (4 * KIB, 64 * KIB, 1 * MIB, 16 * MIB, 64 * MIB)
STREAM_BYTES = 512 * MIB  # of one round of the large sizes
MAX_STREAM_CHUNKS = 512
POOL_BYTES = 256 * MIB
MAX_CHUNKS = 16
WARM_UP_PINGS = 20
ANSWER_LIMIT_S = 20.0
CONNECTOR_LIMIT_S = 45.0
PING_BYTES = 1 << 30  # of all pings of a size, at most
MIN_PINGS = 20
NAME = "benchmarks.components.gpu_links"

Description = ShmDescription | NixlDescription | CudaIpcDescription
Edge = ShmEdge | NixlEdge | CudaIpcEdge


class Ends(msgspec.Struct, frozen=True):
    """Both edges of the child, and its device."""

    forth: Description
    back: Description
    device: str


class Figure(msgspec.Struct, frozen=True):
    """`floor_*`: of torch's own copy."""

    connector: str
    nbytes: int
    latency_us: float
    latency_p99_us: float
    gib_per_s: float
    floor_us: float
    floor_gib_per_s: float


def make_edge(connector: str, name: str, devices: tuple[str, str]) -> Edge:
    match connector:
        case "shm":
            return ShmEdge.create(name, POOL_BYTES, MAX_CHUNKS)
        case "nixl":
            return NixlEdge.create(name, POOL_BYTES, MAX_CHUNKS)
        case "cuda_ipc":
            return CudaIpcEdge.create(name, POOL_BYTES, MAX_CHUNKS, *devices)
    raise SystemExit(f"no connector {connector!r}; there are cuda_ipc, shm, nixl")


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


async def answer(ends: Ends) -> None:
    """The child: brings what comes to its device, and answers the last chunk of each request."""
    device = torch.device(ends.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    receiver, sender = open_receiver(ends.forth), open_sender(ends.back)
    while True:
        chunk = await receiver.receive()
        for tensor in chunk.tensors.values():
            there = tensor.to(device, non_blocking=True, copy=not receiver.hands_over)
            assert there.device == device
        if not receiver.hands_over:
            wait_for(device)  # the view ends with its release
        latency_ns = time.monotonic_ns() - int(chunk.meta.get("sent_ns", 0))
        request_id, last = chunk.request_id, chunk.last
        receiver.release(chunk)
        if request_id == "stop":
            break
        if last:
            await sender.send(Chunk(request_id, "answer", 0, True, {}, {"latency_ns": latency_ns}))
    sender.close()
    receiver.close()


class Peer:
    """The child process as the parent uses it."""

    def __init__(self, connector: str, devices: tuple[str, str]) -> None:
        self._edges = make_edge(connector, "forth", devices), make_edge(connector, "back", devices[::-1])
        forth, back = self._edges
        ends = msgspec.json.encode(Ends(forth.description(), back.description(), devices[1])).decode()
        command = [sys.executable, "-m", NAME, "--answer", ends]
        self.process = subprocess.Popen(command, pass_fds=forth.fds + back.fds)
        self._sender, self._receiver = open_sender(forth.description()), open_receiver(back.description())

    async def exchange(self, tensor: Tensor, count: int = 1) -> float:
        """A stream of `count` chunks; the latency of the last, in µs."""
        for seq in range(count):
            meta: dict[str, int | float | str] = {"sent_ns": time.monotonic_ns()}
            await self._sender.send(Chunk("r", "s", seq, seq == count - 1, {"x": tensor}, meta))
        async with asyncio.timeout(ANSWER_LIMIT_S):
            chunk = await self._receiver.receive()
        self._receiver.release(chunk)
        return int(chunk.meta["latency_ns"]) / 1e3

    async def stop(self) -> None:
        await self._sender.send(Chunk("stop", "s", 0, True))
        await asyncio.to_thread(self.process.wait, ANSWER_LIMIT_S)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._sender.close()
        self._receiver.close()
        for edge in self._edges:
            edge.close()


def floor_of(tensor: Tensor, target: Tensor, pings: int, count: int) -> tuple[float, float]:
    """(µs of one copy, GiB/s of a stream of them)"""
    taken = []
    for _ in range(WARM_UP_PINGS + pings):
        start = time.perf_counter()
        target.copy_(tensor, non_blocking=True)
        wait_for(target.device)
        taken.append((time.perf_counter() - start) * 1e6)
    start = time.perf_counter()
    for _ in range(count):
        target.copy_(tensor, non_blocking=True)
    wait_for(target.device)
    return sorted(taken[WARM_UP_PINGS:])[pings // 2], rate(tensor.nbytes * count, time.perf_counter() - start)


def rate(nbytes: int, seconds: float) -> float:
    return nbytes / 2**30 / seconds


async def figures(
    connector: str,
    devices: tuple[str, str],
    pings: int,
    rounds: int,
    sizes: Sequence[int],
    found: list[Figure],
) -> None:
    """Appends to `found` what it has, also when it fails later."""
    peer = Peer(connector, devices)
    try:
        async with asyncio.timeout(CONNECTOR_LIMIT_S):
            for nbytes in sizes:
                found.append(await figure_of(peer, connector, nbytes, devices, pings, rounds))
            await peer.stop()
    finally:
        peer.end()


async def figure_of(
    peer: Peer, connector: str, nbytes: int, devices: tuple[str, str], pings: int, rounds: int
) -> Figure:
    tensor = torch.ones(nbytes, dtype=torch.uint8, device=devices[0])
    target = torch.empty_like(tensor, device=devices[1])
    wait_for(tensor.device)
    count = min(MAX_STREAM_CHUNKS, max(4, STREAM_BYTES // nbytes))
    num_pings = min(pings, max(MIN_PINGS, PING_BYTES // nbytes))
    floor_us, floor_rate = floor_of(tensor, target, num_pings, count)
    taken = [await peer.exchange(tensor) for _ in range(WARM_UP_PINGS + num_pings)]
    taken = sorted(taken[WARM_UP_PINGS:])
    rates = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        await peer.exchange(tensor, count)
        rates.append(rate(nbytes * count, time.perf_counter() - start))
    middle = median(rates[1:])
    assert middle is not None
    p50, p99 = taken[num_pings // 2], taken[num_pings * 99 // 100]
    return Figure(connector, nbytes, p50, p99, middle, floor_us, floor_rate)


def size_text(nbytes: int) -> str:
    return f"{nbytes // MIB} MiB" if nbytes >= MIB else f"{nbytes // KIB} KiB"


def table(found: Sequence[Figure]) -> str:
    header = ["connector", "size", "one way p50, µs", "p99, µs", "copy, µs", "GiB/s", "copy, GiB/s", "share"]
    rows = []
    for one in found:
        times = [number(v) for v in (one.latency_us, one.latency_p99_us, one.floor_us)]
        share = f"{one.gib_per_s / one.floor_gib_per_s:.0%}"
        rates = [number(v) for v in (one.gib_per_s, one.floor_gib_per_s)]
        rows.append([one.connector, size_text(one.nbytes), *times, *rates, share])
    return render(header, rows)


def describe_link(devices: tuple[str, str]) -> str:
    indices = [torch.device(name).index for name in devices if name.startswith("cuda")]
    if len(indices) < 2:
        return "no GPUs"
    one, other = (index or 0 for index in indices)
    reach = one == other or torch.cuda.can_device_access_peer(one, other)
    return f"{torch.cuda.get_device_name(one)}; {devices[0]} and {devices[1]} reach each other: {reach}"


def main(argv: Sequence[str]) -> int:
    """0; 1 when a connector could not be measured."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", default="cuda:0,cuda:1", help="SENDER,RECEIVER")
    parser.add_argument("--connectors", default="cuda_ipc,shm")
    parser.add_argument("--pings", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-size", type=int, default=SIZES[-1], metavar="BYTES")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--answer", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    if options.answer:
        asyncio.run(answer(msgspec.json.decode(options.answer, type=Ends)))
        return 0
    first, second = options.devices.split(",")
    print("\n".join(describe_environment(["python", "-m", NAME, *argv]).lines()))
    print(describe_link((first, second)))
    found: list[Figure] = []
    failed = 0
    sizes = [size for size in SIZES if size <= options.max_size]
    for connector in options.connectors.split(","):
        measuring = figures(connector, (first, second), options.pings, options.rounds, sizes, found)
        try:
            asyncio.run(measuring)
        except (OmnistageError, RuntimeError, OSError, subprocess.TimeoutExpired) as error:
            failed = 1  # the others are still worth measuring
            print(f"{connector}: {type(error).__name__}: {error}", file=sys.stderr)
    print(table(found))
    print(f"load average at the end: {os.getloadavg()[0]:.1f}")
    if options.json is not None:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1))
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
