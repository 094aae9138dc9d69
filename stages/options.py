"""What `omnistage serve` and `omnistage plan` are told on the command line."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from lm_engine.gpu_target import GpuTarget

# Between two kernels the runner's thread needs the interpreter for microseconds; at Python's own 5 ms a busy
# event loop would keep it waiting for longer than the kernels take.
SWITCH_INTERVAL_S = 2e-4
GPU_CONTROL = Path("/dev/nvidiactl")  # there with NVIDIA's driver, and in containers that were given a GPU


Connector = Literal["inproc", "shm", "cuda_ipc", "nixl"]


class DeploymentError(ValueError):
    """The deployment is wrong; the message names the stage or section and the field."""


@dataclass(frozen=True)
class ServeOptions:
    """`model`: a checkpoint folder, None for the default model. `overrides`: PATH=VALUE for the deployment.

    `kv_memory`: bytes of KV cache as text ("2GiB"), None for the deployment's own.
    """

    model: Path | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    dtype: str = "auto"
    served_model_name: tuple[str, ...] = ()  # the first is the canonical one
    deployment: Path | None = None
    overrides: tuple[str, ...] = ()
    media_root: Path | None = None
    kv_memory: str | None = None
    allow_private_addresses: bool = False
    api_key: str | None = None
    workers: Literal["file", "one", "per-stage"] = "file"  # "file": as the deployment's [[worker]] groups say
    ray: str | None = (
        None  # place the workers as actors of the Ray cluster there; "auto": the one of this machine
    )
    worker_token: str | None = None  # what workers on other machines prove themselves by
    machine: str = ""  # the `host` of the worker that these options are for
    deployment_text: str | None = None  # the deployment's content, for a machine that does not have the file
    gpu_memory: tuple[tuple[str, int], ...] = ()  # (GPU, bytes free before any stage loaded); (): ask them
    gpu_targets: tuple[tuple[str, GpuTarget], ...] = ()  # what kernels are to be compiled for, by GPU
    # Of each edge (source, target), as the front process chose: who asks whether GPUs reach each other has
    # touched them, and cannot be forked for compilers any more. (): choose.
    connectors: tuple[tuple[str, str, Connector], ...] = ()
    assumed_gpu_memory: str | None = None  # of every GPU that is named, on another machine than this one


def expects_workers(options: ServeOptions) -> bool:
    """Whether stages are likely to run in processes of their own, told before anything large is imported. A
    wrong guess costs the imports of one process, which then ends."""
    if options.workers != "file" or GPU_CONTROL.exists():
        return options.workers != "one"
    return options.deployment is not None and "[[worker]]" in _text_of(options.deployment)


def _text_of(deployment: Path) -> str:
    """What is wrong with the file is said by whoever reads it in earnest."""
    try:
        return deployment.read_text()
    except (OSError, UnicodeDecodeError):
        return ""


def for_machine(options: ServeOptions, machine: str) -> ServeOptions:
    """What a worker on another machine goes by: that one has neither the deployment's file nor this one's
    GPUs."""
    if not machine:
        return options
    text = options.deployment.read_text() if options.deployment is not None else None
    return replace(
        options,
        machine=machine,
        deployment=None,
        deployment_text=text,
        gpu_memory=(),
        gpu_targets=(),
        connectors=(),  # chosen there again: what they need may be missing there
        worker_token=None,
    )
