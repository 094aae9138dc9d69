"""What the kernel does for a process of ours: it ends it with its parent, and shows its name."""

from __future__ import annotations

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
MAX_NAME_BYTES = 15


def die_with(parent_pid: int) -> None:
    """The kernel ends this process when its parent ends, however that happens."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)  # it ended before the line above


def set_process_name(name: str) -> None:
    """As `ps` and `top` show it; cut where the kernel's room ends."""
    _prctl(PR_SET_NAME, ctypes.create_string_buffer(name.encode()[:MAX_NAME_BYTES]))


def _prctl(option: int, argument: int | ctypes.Array[ctypes.c_char]) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, argument, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")
