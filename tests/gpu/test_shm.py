"""The shared-memory edge with tensors on a CUDA device: pinned by itself, exact, and let go."""

from __future__ import annotations

import pytest
import torch

from contracts.chunks import Chunk
from tests.connectors.edges import edge_of, ends_of, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_tensors_of_a_device_cross_exactly_and_pin_the_edge() -> None:
    async def main() -> None:
        with edge_of(8 << 20) as edge:
            for _ in range(2):  # the second life pins the same edge again
                with ends_of(edge) as (sender, receiver):
                    receiver.pin()
                    for seq in range(20):
                        grid = torch.randn(700, 300 + seq, device="cuda")
                        tensors = {
                            "plain": grid,
                            "turned": grid.t(),
                            "bf16": grid[:3].bfloat16(),
                            "host": grid[0].cpu(),
                            "empty": grid[:0],
                        }
                        await sender.send(Chunk("r", "s", seq, False, tensors))
                        expected = {name: tensor.cpu() for name, tensor in tensors.items()}
                        grid.zero_()  # the copy was complete
                        got = await receiver.receive()
                        assert got.tensors["plain"].is_pinned()
                        for name, tensor in expected.items():
                            back = got.tensors[name].to("cuda", non_blocking=True)
                            assert torch.equal(back.cpu(), tensor), name
                        receiver.release(got)
                    assert sender._ring.memory.pinned
                edge.reset()

    run(main())
