"""The CUDA IPC edge between two processes on real GPUs: exact, in order without waiting for a GPU, and anew
after a death."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import msgspec
import pytest
import torch

from connectors.cuda_ipc import CudaIpcEdge, CudaIpcReceiver, CudaIpcSender
from connectors.cuda_lanes import open_cuda_receiver, open_cuda_sender
from contracts.chunks import Chunk
from contracts.errors import PeerLost
from tests.connectors.edges import run

NUM_GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(NUM_GPUS == 0, reason="needs a CUDA device"),
]
DEVICES = ["cuda:0", pytest.param("cuda:1", marks=pytest.mark.skipif(NUM_GPUS < 2, reason="needs two GPUs"))]
POOL_BYTES = 8 << 20


@contextlib.contextmanager
def edges_to(device: str) -> Iterator[tuple[CudaIpcEdge, CudaIpcEdge]]:
    with contextlib.ExitStack() as stack:
        forth = CudaIpcEdge.create("forth", POOL_BYTES, 4, "cuda:0", device)
        stack.callback(forth.close)
        back = CudaIpcEdge.create("back", POOL_BYTES, 4, device, "cuda:0")
        stack.callback(back.close)
        yield forth, back


@contextlib.contextmanager
def child(forth: CudaIpcEdge, back: CudaIpcEdge) -> Iterator[subprocess.Popen[bytes]]:
    described = [msgspec.json.encode(edge.description()).decode() for edge in (forth, back)]
    command = [sys.executable, "-m", "tests.gpu.cuda_ipc_child", *described]
    process = subprocess.Popen(command, pass_fds=forth.fds + back.fds, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


async def exchange(
    sender: CudaIpcSender, receiver: CudaIpcReceiver, tensors: dict[str, torch.Tensor], name: str
) -> dict[str, torch.Tensor]:
    await sender.send(Chunk(name, "s", 0, True, tensors))
    got = await receiver.receive()
    assert got.request_id == name
    receiver.release(got)
    return got.tensors


def shared_files(*pids: int) -> set[str]:
    """In /dev/shm, of these processes: named by the server, or by torch. Others come and go."""
    ours = ("omnistage", *(f"torch_{pid}_" for pid in pids))
    return {name for name in os.listdir("/dev/shm") if name.startswith(ours)}


@pytest.mark.parametrize("device", DEVICES)
def test_tensors_cross_exactly_and_in_the_order_of_the_streams(device: str) -> None:
    async def main(forth: CudaIpcEdge, back: CudaIpcEdge) -> None:
        sender, receiver = open_cuda_sender(forth.description()), open_cuda_receiver(back.description())
        slow = torch.randn(2048, 2048, device="cuda:0")
        for round_ in range(60):
            grid = torch.randint(0, 1000, (700, 300 + round_), device="cuda:0", dtype=torch.int32)
            expected = {
                "x": grid + 1,
                "t": grid.t() + 1,
                "b": grid[:3].bfloat16() + 1,
                "h": grid[0].cpu() + 1,
            }
            late = torch.zeros(500_000, device="cuda:0")
            for _ in range(8):
                slow = (slow @ slow).clamp(-1, 1)  # the stream is behind the host when the chunk leaves
            late += round_ + slow[0, 0] * 0
            tensors = {"x": grid, "t": grid.t(), "b": grid[:3].bfloat16(), "h": grid[0].cpu(), "late": late}
            tensors["none"] = grid[:0]
            sending = asyncio.create_task(exchange(sender, receiver, tensors, f"r{round_}"))
            await asyncio.sleep(0)
            got = await sending
            for name, tensor in expected.items():
                assert got[name].device == tensor.device, name
                assert torch.equal(got[name], tensor), name
            assert (got["late"] == round_ + 1).all()
            assert got["none"].shape == (0, 300 + round_)
            late.fill_(-1)  # what was sent is a copy
        sender.check()
        await exchange(sender, receiver, {}, "stop")
        torch.cuda.synchronize()
        await sender.send(Chunk("end", "s", 0, True))
        sender.close()
        receiver.close()

    names = shared_files(os.getpid())
    with edges_to(device) as (forth, back), child(forth, back) as process:
        run(main(forth, back))
        assert process.wait(60) == 0
    assert shared_files(os.getpid(), process.pid) == names


@pytest.mark.parametrize("device", DEVICES)
def test_a_killed_peer_is_replaced(device: str) -> None:
    async def lose(sender: CudaIpcSender, forth: CudaIpcEdge) -> None:
        waiting = asyncio.create_task(flood(sender))
        await asyncio.sleep(0)
        forth.mark_dead("receiver")
        with pytest.raises(PeerLost):
            await waiting

    async def flood(sender: CudaIpcSender) -> None:
        for index in range(100):
            await sender.send(Chunk(f"f{index}", "s", 0, True, {"x": torch.ones(1 << 18, device="cuda:0")}))

    with edges_to(device) as (forth, back):
        sender, receiver = open_cuda_sender(forth.description()), open_cuda_receiver(back.description())

        async def both(name: str) -> None:
            got = await exchange(sender, receiver, {"x": torch.full((1 << 20,), 4.0, device="cuda:0")}, name)
            assert (got["x"] == 5).all()

        async def first(process: subprocess.Popen[bytes]) -> None:
            await both("first")
            process.kill()
            process.wait()
            await lose(sender, forth)
            back.mark_dead("sender")
            forth.reset()
            back.reset()

        async def main() -> None:
            with child(forth, back) as process:
                await first(process)
            with child(forth, back):
                for index in range(5):
                    await both(f"second{index}")

        run(main())
        sender.close()
        receiver.close()


def test_bandwidth(capsys: pytest.CaptureFixture[str]) -> None:
    """Prints what the edge reaches; the last GPU is the receiver's."""

    async def main(forth: CudaIpcEdge, back: CudaIpcEdge) -> float:
        sender, receiver = open_cuda_sender(forth.description()), open_cuda_receiver(back.description())
        tensor = torch.ones(1 << 20, device="cuda:0")
        for warm in range(5):
            await exchange(sender, receiver, {"x": tensor}, f"w{warm}")
        torch.cuda.synchronize()
        start = time.perf_counter()
        for index in range(50):
            await exchange(sender, receiver, {"x": tensor}, f"r{index}")
        torch.cuda.synchronize()
        seconds = (time.perf_counter() - start) / 50
        await exchange(sender, receiver, {}, "stop")
        await sender.send(Chunk("end", "s", 0, True))
        sender.close()
        receiver.close()
        return seconds

    device = f"cuda:{NUM_GPUS - 1}"
    with edges_to(device) as (forth, back), child(forth, back):
        seconds = run(main(forth, back))
    with capsys.disabled():
        rate = 2 * 4 / 1024 / seconds
        print(f"\ncuda:0 -> {device} -> cuda:0, 4 MiB: {seconds * 1e6:.0f} us a round trip, {rate:.1f} GiB/s")
