"""Results of a step on their way from the device to the host, beside the next step's kernels."""

from __future__ import annotations

import torch
from torch import Tensor


class HostCopies:
    """Copies on a stream of its own. Used by one thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def start(self, *tensors: Tensor) -> tuple[tuple[Tensor, ...], torch.cuda.Event | None]:
        """Copies of the tensors, complete once the event is done; without an event they are complete."""
        if self._stream is None:
            return tensors, None
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            copies = tuple(_to_pinned(tensor) for tensor in tensors)
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(self._stream)
        return copies, done


def _to_pinned(tensor: Tensor) -> Tensor:
    tensor.record_stream(torch.cuda.current_stream(tensor.device))
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)
