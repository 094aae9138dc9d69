"""The servers of the runs on two GPUs."""

from __future__ import annotations

from benchmarks.components.run_loads import SPOKEN_S
from benchmarks.components.run_servers import CHAT_MODEL, SPEECH_MODEL, Server

# So that all servers of a group fit beside each other; a deployment alone takes what its file says.
CHAT_MEMORY = (
    *("vision.memory=7GiB", "vision.embedding_cache=1GiB", "vision.embedding_cache_host=1GiB"),
    *("thinker.memory=16GiB", "thinker.max_context=16384", "preprocess.workers=12"),
)
SPEECH_MEMORY = (
    *("vision.memory=4GiB", "vision.embedding_cache=512MiB", "vision.embedding_cache_host=512MiB"),
    *("audio.memory=3GiB", "audio.embedding_cache=256MiB", "audio.embedding_cache_host=256MiB"),
    *("thinker.memory=66GiB", "thinker.max_context=8192", "talker.memory=16GiB", "talker.max_sequences=64"),
    *("vocoder.memory=4GiB", "preprocess.workers=4", SPOKEN_S),
    "vocoder.max_streams=72",  # one that comes as another leaves finds a place beside 63 others
)


def _chat(
    name: str, file: str, gpus: str, half: int | None = None, replace: tuple[str, str] | None = None
) -> Server:
    return Server(name, CHAT_MODEL, file, gpus, half, replace, CHAT_MEMORY)


CHAT = (
    _chat("one GPU, one worker", "one-gpu.toml", "0", 0),
    _chat("one GPU, two processes", "one-gpu-two-processes.toml", "1", 1),
    _chat("apart on two GPUs", "two-gpus.toml", "0,1"),
    _chat(
        "apart, shared memory",
        "two-gpus.toml",
        "0,1",
        replace=('connector = "auto"', 'connector = "shm"'),
    ),
    _chat("two replicas", "two-gpus-replicas.toml", "0,1"),
    _chat("tensor parallel 2", "two-gpus-tensor-parallel.toml", "0,1"),
)
SPEECH = (
    Server("speech on one GPU", SPEECH_MODEL, "omni-one-gpu.toml", "0", sets=SPEECH_MEMORY),
    Server("speech on two GPUs", SPEECH_MODEL, "omni-two-gpus.toml", "0,1", sets=SPEECH_MEMORY),
)
# Kernels of two processes take turns on a GPU: what that costs talker and vocoder.
TOGETHER = Server(
    "talker with vocoder",
    SPEECH_MODEL,
    "omni-two-gpus.toml",
    "0,1",
    replace=(
        'stages = ["talker"]\n\n[[worker]]\nname = "vocoder"\nstages = ["vocoder"]',
        'stages = ["talker", "vocoder"]',
    ),
    sets=SPEECH_MEMORY,
)
