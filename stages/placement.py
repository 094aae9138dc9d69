"""Which stages share a process, and which connector carries each edge: the deployment made choices."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import msgspec
import torch

from stages.deployment import Connector, Deployment, DeploymentError, EdgeConfig, WorkerConfig
from stages.options import ServeOptions

GPU_TO_GPU: Connector = "cuda_ipc"  # what "auto" takes between GPUs that reach each other's memory


def group_stages(deployment: Deployment, options: ServeOptions) -> tuple[WorkerConfig, ...]:
    """Which stages share a process. None: all of them run in the front process. `options.workers` "file"
    without [[worker]] groups keeps the front process apart from stages on GPUs. Under Ray every worker is
    taken for a machine of its own."""
    workers = options.workers
    if options.ray is not None:
        groups = deployment.workers if workers == "file" else ()
        groups = groups or _one_each(deployment)
        return tuple(msgspec.structs.replace(group, host=group.name) for group in groups)
    if workers == "one":
        return _in_this_process(deployment)
    if workers == "per-stage":
        return _one_each(deployment)
    if deployment.workers:
        return deployment.workers
    return _one_per_gpu(deployment) or _in_this_process(deployment)


def _one_per_gpu(deployment: Deployment) -> tuple[WorkerConfig, ...]:
    """A worker for each GPU and one for the stages beside them on the CPU; none when no stage is on a GPU.

    Launching kernels and writing tokens to clients would share one interpreter. Two processes on one GPU
    would take turns at it, where the streams of one process run side by side.
    """
    on: dict[str, list[str]] = {}
    for stage, placed in deployment.placed.items():
        on.setdefault("+".join(dict.fromkeys(placed.device_list)), []).append(stage)
    if not any(devices.startswith("cuda") for devices in on):
        return ()
    return tuple(
        WorkerConfig(name=devices.replace(":", ""), stages=tuple(stages)) for devices, stages in on.items()
    )


def _one_each(deployment: Deployment) -> tuple[WorkerConfig, ...]:
    return tuple(WorkerConfig(name=stage, stages=(stage,)) for stage in deployment.placed)


def hosts_elsewhere(deployment: Deployment, options: ServeOptions) -> dict[str, str]:
    """Stages that do not run on the machine that the options are for, and the host of each."""
    if options.ray is None and not any(worker.host for worker in deployment.workers):
        return {}
    groups = group_stages(deployment, options)
    return {stage: group.host for group in groups if group.host != options.machine for stage in group.stages}


def _in_this_process(deployment: Deployment) -> tuple[WorkerConfig, ...]:
    """No groups; refused where the death of a rank would have to end the front process."""
    for name, lm in deployment.lms.items():
        if lm.tensor_parallel > 1:
            raise DeploymentError(
                f"stage.{name}.tensor_parallel: {lm.tensor_parallel} ranks need a worker process of their"
                " own; add [[worker]] groups or pass --workers per-stage"
            )
    return ()


def choose_connectors(
    deployment: Deployment, edges: Sequence[tuple[str, str]], groups: Sequence[WorkerConfig]
) -> dict[tuple[str, str], Connector]:
    """Raises DeploymentError naming the edge and the field."""
    worker_of = {stage: group.name for group in groups for stage in group.stages}
    host_of = {stage: group.host for group in groups for stage in group.stages}
    return {
        (source, target): choose_connector(
            deployment.edge(source, target),
            (_device_of(deployment, source), _device_of(deployment, target)),
            together=worker_of.get(source) == worker_of.get(target),
            hosts=(host_of.get(source, ""), host_of.get(target, "")),
        )
        for source, target in edges
    }


def reach_each_other(one: str, other: str) -> bool:
    """Whether either GPU reads the other's memory, as two processes on one GPU do. What is planned for
    another
    machine's GPUs supposes so."""
    first, second = (torch.device(name).index or 0 for name in (one, other))
    if first == second or max(first, second) >= torch.cuda.device_count():
        return True
    return torch.cuda.can_device_access_peer(first, second)


def choose_connector(
    edge: EdgeConfig, devices: tuple[str, str], *, together: bool, hosts: tuple[str, str] = ("", "")
) -> Connector:
    """auto: in a process by hand, between GPUs as `GPU_TO_GPU` says, by NIXL to another host, else by shared
    memory. Two ends in one process need no transport, whatever the file says for them apart."""
    if together:
        return "inproc"
    if any(hosts):
        edge = _across_hosts(edge, hosts)
    on_gpus = all(device.startswith("cuda") for device in devices)
    where = f"edge {edge.source}->{edge.target}.connector"
    match edge.connector:
        case "auto":
            return GPU_TO_GPU if on_gpus and GPU_TO_GPU != "shm" and reach_each_other(*devices) else "shm"
        case "inproc":
            raise DeploymentError(
                f"{where}: 'inproc' wants both stages in one worker; {edge.source} and {edge.target} are"
                " apart"
            )
        case "cuda_ipc" if not on_gpus:
            raise DeploymentError(
                f"{where}: 'cuda_ipc' wants both stages on GPUs; {edge.source} is on {devices[0]},"
                f" {edge.target} on {devices[1]}"
            )
        case "cuda_ipc" if not reach_each_other(*devices):
            raise DeploymentError(
                f"{where}: 'cuda_ipc' wants GPUs that reach each other's memory, which {devices[0]} and"
                f" {devices[1]} do not on this machine: take 'shm'"
            )
        case "nixl" if importlib.util.find_spec("nixl_cu13") is None:
            raise DeploymentError(
                f"{where}: 'nixl' needs the package nixl-cu13; pip install 'omnistage[nixl]'"
            )
        case chosen:
            return chosen


def _across_hosts(edge: EdgeConfig, hosts: tuple[str, str]) -> EdgeConfig:
    if edge.connector in ("auto", "nixl"):
        return msgspec.structs.replace(edge, connector="nixl")
    source, target = (f"on {host!r}" if host else "here" for host in hosts)
    raise DeploymentError(
        f"edge {edge.source}->{edge.target}.connector: {edge.connector!r} wants both workers on this machine;"
        f" {edge.source} is {source}, {edge.target} {target}: want 'nixl' or 'auto'"
    )


def _device_of(deployment: Deployment, stage: str) -> str:
    return deployment.placed[stage].device_list[0]
