"""Which connector carries an edge, and the refusals that name it."""

from __future__ import annotations

import socket
from pathlib import Path

import msgspec
import pytest
import torch

from stages import placement
from stages.deployment import (
    ClusterConfig,
    Deployment,
    DeploymentError,
    EdgeConfig,
    EncoderConfig,
    LMConfig,
    WorkerConfig,
)
from stages.deployment_file import load_deployment
from stages.edges import EdgeEnd, make_edge, open_edge_ends
from stages.launch import make_rendezvous
from stages.options import ServeOptions
from stages.placement import choose_connectors, group_stages, hosts_elsewhere
from tests.stages.test_deployment import PIPELINE

EDGE = ("vision", "thinker")


def deployment_of(vision: str, thinker: str, connector: str = "auto") -> Deployment:
    return Deployment(
        encoders={"vision": EncoderConfig(devices=vision)},
        lms={"thinker": LMConfig(devices=thinker)},
        edges=(EdgeConfig(source="vision", target="thinker", connector=connector),),
    )


@pytest.mark.parametrize(
    ("devices", "connector", "workers", "chosen"),
    [
        (("cpu", "cpu"), "auto", "one", "inproc"),
        (("cuda:0", "cuda:1"), "nixl", "one", "inproc"),  # in one process there is nothing to cross
        (("cpu", "cpu"), "auto", "per-stage", "shm"),
        (("cuda:0", "cpu"), "auto", "per-stage", "shm"),
        (("cuda:0", "cuda:1"), "auto", "per-stage", "cuda_ipc"),
        (("cuda:0", "cuda:1"), "cuda_ipc", "per-stage", "cuda_ipc"),
        (("cuda:0", "cuda:1"), "shm", "per-stage", "shm"),
    ],
)
def test_the_connector_of_an_edge(
    devices: tuple[str, str], connector: str, workers: str, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: True)
    deployment = deployment_of(*devices, connector)
    groups = group_stages(deployment, ServeOptions(workers=workers))
    assert choose_connectors(deployment, [EDGE], groups) == {EDGE: chosen}


def test_gpus_that_do_not_reach_each_other_go_through_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: False)
    monkeypatch.setattr(placement, "GPU_TO_GPU", "cuda_ipc")
    apart, one = ("cuda:0", "cuda:1"), ("cuda:1", "cuda:1")
    for devices, chosen in ((apart, "shm"), (one, "cuda_ipc")):
        deployment = deployment_of(*devices)
        groups = group_stages(deployment, ServeOptions(workers="per-stage"))
        assert choose_connectors(deployment, [EDGE], groups) == {EDGE: chosen}
    deployment = deployment_of(*apart, "cuda_ipc")
    with pytest.raises(DeploymentError, match="take 'shm'"):
        choose_connectors(deployment, [EDGE], group_stages(deployment, ServeOptions(workers="per-stage")))


@pytest.mark.parametrize(
    ("devices", "groups"),
    [
        (("cpu", "cpu"), {}),
        (("cuda:0", "cuda:0"), {"cuda0": ("vision", "thinker")}),
        (("cuda:0", "cuda:1"), {"cuda0": ("vision",), "cuda1": ("thinker",)}),
        (("cpu", "cuda:0"), {"cpu": ("vision",), "cuda0": ("thinker",)}),
    ],
)
def test_stages_on_gpus_are_apart_from_the_front_process(
    devices: tuple[str, str], groups: dict[str, tuple[str, ...]]
) -> None:
    deployment = deployment_of(*devices)
    assert {group.name: group.stages for group in group_stages(deployment, ServeOptions())} == groups
    assert group_stages(deployment, ServeOptions(workers="one")) == ()


@pytest.mark.parametrize(
    ("connector", "message"),
    [
        ("inproc", r"edge vision->thinker.connector: 'inproc' wants both stages in one worker"),
        ("cuda_ipc", r"edge vision->thinker.connector: 'cuda_ipc' .* thinker on cpu"),
        ("nixl", r"edge vision->thinker.connector: 'nixl' needs the package"),
    ],
)
def test_refusals_name_the_edge_and_the_field(
    connector: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    deployment = deployment_of("cuda:0", "cpu", connector)
    with pytest.raises(DeploymentError, match=message):
        choose_connectors(deployment, [EDGE], group_stages(deployment, ServeOptions(workers="per-stage")))


def test_edges_between_hosts_go_by_nixl_and_by_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = (
        WorkerConfig(name="encoder", stages=("vision",)),
        WorkerConfig(name="lm", stages=("thinker",), host="second"),
    )
    monkeypatch.setattr("importlib.util.find_spec", lambda _: True)
    for connector in ("auto", "nixl"):
        chosen = choose_connectors(deployment_of("cuda:0", "cuda:0", connector), [EDGE], groups)
        assert chosen == {EDGE: "nixl"}
    for connector in ("shm", "cuda_ipc"):
        message = rf"edge vision->thinker.connector: '{connector}' .* vision is here, thinker on 'second'"
        with pytest.raises(DeploymentError, match=message):
            choose_connectors(deployment_of("cuda:0", "cuda:0", connector), [EDGE], groups)


@pytest.mark.parametrize("address", ["", "0.0.0.0"])
def test_a_worker_elsewhere_needs_an_address_to_come_to(tmp_path: Path, address: str) -> None:
    file = tmp_path / "d.toml"
    workers = '[[worker]]\nname = "w"\nstages = ["vision", "thinker"]\nhost = "second"\n'
    file.write_text(f'[cluster]\naddress = "{address}"\n{workers}')
    with pytest.raises(DeploymentError, match=r"cluster.address: worker 'w' is on host 'second'"):
        load_deployment(PIPELINE, file)


@pytest.mark.parametrize(
    ("address", "port", "field"),
    [("203.0.113.7", 0, "address"), ("no such name", 0, "address"), ("127.0.0.1", None, "port")],
)
def test_an_address_that_is_not_this_machines_is_refused_by_name(
    address: str, port: int | None, field: str
) -> None:
    """`port` None: one that is taken."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1] if port is None else port
        deployment = Deployment(cluster=ClusterConfig(address=address, port=port))
        group = WorkerConfig(name="far", stages=("thinker",), host="b")
        with pytest.raises(DeploymentError, match=rf"^cluster\.{field}: .*{address}:{port}"):
            make_rendezvous(deployment, ServeOptions(worker_token="t"), (group,), None)


def test_the_stages_of_other_hosts_are_not_this_machines() -> None:
    workers = (
        WorkerConfig(name="encoder", stages=("vision",)),
        WorkerConfig(name="lm", stages=("thinker",), host="second"),
    )
    deployment = msgspec.structs.replace(deployment_of("cpu", "cpu"), workers=workers)
    assert hosts_elsewhere(deployment, ServeOptions()) == {"thinker": "second"}
    assert hosts_elsewhere(deployment, ServeOptions(machine="second")) == {"vision": ""}
    assert hosts_elsewhere(deployment, ServeOptions(workers="one")) == {}
    assert hosts_elsewhere(deployment, ServeOptions(ray="auto", machine="lm")) == {"vision": "encoder"}
    assert set(deployment.without({"thinker"}).placed) == {"vision"}


def test_features_have_a_way_of_their_own(tmp_path) -> None:
    file = tmp_path / "d.toml"
    file.write_text('[[edge]]\nsource = "preprocess"\ntarget = "vision"\nconnector = "nixl"\n')
    with pytest.raises(DeploymentError, match=r"edge preprocess->vision.connector: features"):
        load_deployment(PIPELINE, file)
    file.write_text('[[edge]]\nsource = "vision"\ntarget = "thinker"\nconnector = "pigeon"\n')
    with pytest.raises(DeploymentError, match=r"edge\[0\]"):
        load_deployment(PIPELINE, file)


def test_two_ends_in_one_worker_are_a_pair() -> None:
    edge = make_edge(deployment_of("cpu", "cpu"), *EDGE, "inproc")
    ends = [EdgeEnd(*EDGE, end, edge.description()) for end in ("sender", "receiver")]
    senders, receivers = open_edge_ends(ends)
    assert receivers[EDGE].hands_over
    senders[EDGE].close()
    receivers[EDGE].close()
