"""Which GPU a thread works on."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch


def enter_device(device: torch.device) -> None:
    """Makes it the current one of this thread: kernels, graphs and streams that name no device go there. A
    thread begins with the first GPU, whatever the one that started it was on. "cuda" means the current
    one."""
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)


def device_thread(device: torch.device, name: str, count: int = 1) -> ThreadPoolExecutor:
    """Threads that work on the device."""
    return ThreadPoolExecutor(count, thread_name_prefix=name, initializer=enter_device, initargs=(device,))
