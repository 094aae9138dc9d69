"""The other ranks of a tensor-parallel stage: processes that its worker starts and that end with it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable

import msgspec
import torch

from lm_engine.parallel import RankGroup
from lm_engine.ranks import Followers
from stages.options import ServeOptions
from stages.planning import ROOT, Plan

STOP_GRACE_S = 10.0


class RankSetup(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a rank needs; descriptors named in it are inherited."""

    stage: str
    rank: int
    size: int
    parent_pid: int
    options: ServeOptions
    threads: int
    channel_fd: int
    meeting_fd: int
    num_kv_blocks: int  # as an earlier life of this stage has measured; 0: measure


class RankProcesses:
    """Rank 0's: starts ranks 1 to size - 1. `lost`: one of them is gone, or computes something else; by
    default this process ends too, and whoever supervises it starts all of them afresh."""

    def __init__(self, plan: Plan, stage: str, lost: Callable[[str], None] | None = None) -> None:
        self._size = plan.deployment.lms[stage].tensor_parallel
        self._meeting_fd = os.memfd_create("omnistage-ranks", os.MFD_CLOEXEC)
        threads = max(1, torch.get_num_threads() // self._size)
        torch.set_num_threads(threads)
        self.processes: list[subprocess.Popen[bytes]] = []
        channels = []
        for rank in range(1, self._size):
            ours, theirs = socket.socketpair()
            setup = RankSetup(
                stage=stage,
                rank=rank,
                size=self._size,
                parent_pid=os.getpid(),
                options=plan.options,
                threads=threads,
                channel_fd=theirs.fileno(),
                meeting_fd=self._meeting_fd,
                num_kv_blocks=plan.stage(stage).num_kv_blocks,
            )
            self.processes.append(_spawn(setup))
            theirs.close()
            channels.append(ours)
        self.followers = Followers(channels, lost or _end_process, self._reap)

    def join(self, device: torch.device) -> RankGroup:
        """Returns when all ranks are there."""
        group = RankGroup(0, self._size, self._meeting_fd, device)
        os.close(self._meeting_fd)
        return group

    def _reap(self) -> None:
        for process in self.processes:
            try:
                process.wait(STOP_GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _spawn(setup: RankSetup) -> subprocess.Popen[bytes]:
    argument = msgspec.json.encode(setup, enc_hook=str).decode()
    command = [sys.executable, "-m", "stages.rank_main", argument]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    return subprocess.Popen(command, pass_fds=(setup.channel_fd, setup.meeting_fd), env=environment)


def _end_process(_: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)
