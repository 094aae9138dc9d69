"""Which GPU a thread works on, and on which stream."""

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


def companion_threads(device: torch.device, name: str, count: int) -> ThreadPoolExecutor:
    """Threads that launch on this thread's stream, so that what they share on the device is used in turns."""
    if device.type != "cuda":
        return ThreadPoolExecutor(count, thread_name_prefix=name)
    stream = torch.cuda.current_stream(device)
    return ThreadPoolExecutor(
        count, thread_name_prefix=name, initializer=torch.cuda.set_stream, initargs=(stream,)
    )
