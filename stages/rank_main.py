"""A rank process: holds one share of a decoder and runs the plans that rank 0 hands on."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys

import msgspec
import torch

from lm_engine.parallel import RankGroup
from stages.build import build_following_runner
from stages.planning import make_plan
from stages.prctl import die_with
from stages.rank_processes import RankSetup


def main() -> None:
    setup = msgspec.json.decode(sys.argv[1], type=RankSetup, dec_hook=lambda kind, value: kind(value))
    die_with(setup.parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ^C reaches the whole group; rank 0 decides
    name = f"{setup.stage} rank {setup.rank}"
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s %(levelname)s {name}: %(message)s")
    torch.set_num_threads(setup.threads)
    plan = make_plan(setup.options, check_memory=False, check_weights=False)  # the front process did
    plan = plan.with_kv_blocks({setup.stage: setup.num_kv_blocks})
    share = plan.stage(setup.stage, setup.rank)
    channel = socket.socket(fileno=setup.channel_fd)
    group = RankGroup(setup.rank, setup.size, setup.meeting_fd, torch.device(share.device))
    config = plan.deployment.lms[setup.stage]
    runner = build_following_runner(plan.family, config, share, plan.context_length, group, channel)
    runner.follow()
    logging.shutdown()
    # With all of it alive: the kernel takes everything back at once, where NCCL would wait for its graphs and
    # take leave of ranks that are gone.
    os._exit(0)


if __name__ == "__main__":
    main()
