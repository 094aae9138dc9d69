"""The other process of the tests of the CUDA IPC edge: sends back what comes, plus one, computed on its
GPU."""

from __future__ import annotations

import asyncio
import sys

import msgspec

from connectors.cuda_ipc import CudaIpcDescription
from connectors.cuda_lanes import open_cuda_receiver, open_cuda_sender
from contracts.chunks import Chunk


async def answer(forth: CudaIpcDescription, back: CudaIpcDescription) -> None:
    receiver, sender = open_cuda_receiver(forth), open_cuda_sender(back)
    print("ready", flush=True)
    while True:
        got = await receiver.receive()
        receiver.release(got)  # before anything was computed from it: the tensors are ours
        tensors = {name: tensor + 1 for name, tensor in got.tensors.items()}
        await sender.send(Chunk(got.request_id, got.stream, got.seq, got.last, tensors, got.meta))
        if got.request_id == "stop":
            receiver.release(await receiver.receive())  # the end of the test, when all was read
            break
    sender.close()
    receiver.close()


if __name__ == "__main__":
    edges = [msgspec.json.decode(argument, type=CudaIpcDescription) for argument in sys.argv[1:]]
    asyncio.run(answer(edges[0], edges[1]))
