"""Ray as the one that finds places for workers: an actor for each, in a placement group, that runs its agent.
Everything else is as with any worker on another machine."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from typing import Protocol
from urllib.parse import urlsplit

from contracts.errors import EngineError
from stages.worker_agent import AgentOptions, run_agent

logger = logging.getLogger(__name__)


class _Ref(Protocol):
    """Of a result in Ray, which is not typed."""

    def future(self) -> Future[object]: ...


class _Group(Protocol):
    def ready(self) -> _Ref: ...


class _Agent:
    """The actor. Ray starts it again, elsewhere if need be, when its process or its node dies; its worker
    dies
    with it."""

    def run(self, endpoint: str, name: str, token: str) -> None:
        logging.basicConfig(
            level=logging.INFO, format=f"%(asctime)s %(levelname)s agent of {name}: %(message)s"
        )
        with contextlib.suppress(PermissionError):  # Ray's own are the last to get a core; who serves is not
            os.setpriority(os.PRIO_PROCESS, 0, 0)
        front = urlsplit(endpoint)
        assert front.hostname is not None
        assert front.port is not None
        asyncio.run(run_agent(AgentOptions(front.hostname, front.port, name, token)))


class RayCluster:
    """This process's part in a cluster. One a process."""

    def __init__(self, address: str) -> None:
        self.address = address  # of this machine, as the other nodes reach it
        self._agents: list[object] = []
        self._group: _Group | None = None
        self._watch: asyncio.Task[None] | None = None

    @classmethod
    def join(cls, cluster: str) -> RayCluster:
        """`cluster`: HOST:PORT of its head, or "auto" for the one that this machine is a node of."""
        # Ray warns on import and at its start of what it will do otherwise one day, which is nobody's error.
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        with _its_warnings():
            import ray

            try:
                ray.init(address=cluster, log_to_driver=False, logging_level=logging.WARNING)
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise EngineError(f"--ray {cluster}: no cluster to be joined there: {error}") from error
            return cls(str(ray.util.get_node_ip_address()))

    async def start(self, endpoint: str, token: str, needs: Mapping[str, tuple[str, ...]]) -> None:
        """An agent for each worker, placed together where there is room; `needs`: its devices. A core
        each."""
        with _its_warnings():
            import ray
            from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

            gpus = {name: sum(d.startswith("cuda") for d in devices) for name, devices in needs.items()}
            bundles = [{"CPU": 1.0} | ({"GPU": float(n)} if n else {}) for n in gpus.values()]
            group: _Group = ray.util.placement_group(bundles, strategy="PACK")
            self._group = group
            logger.info("waiting for Ray to find room for %s", ", ".join(needs))
            await _result(group.ready())
            actor, runs = ray.remote(_Agent), []
            for index, name in enumerate(needs):
                place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
                agent = actor.options(
                    num_cpus=1,
                    num_gpus=gpus[name],
                    max_restarts=-1,
                    max_task_retries=-1,
                    scheduling_strategy=place,
                ).remote()
                self._agents.append(agent)
                runs.append(agent.run.remote(endpoint, name, token))
        self._watch = asyncio.create_task(_watch(runs))

    async def leave(self) -> None:
        """Ends the agents, and with them what they run."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        with _its_warnings():
            import ray

            for agent in self._agents:
                ray.kill(agent)
            if self._group is not None:
                ray.util.remove_placement_group(self._group)
            ray.shutdown()


async def _watch(runs: list[_Ref]) -> None:
    for outcome in await asyncio.gather(*(_result(run) for run in runs), return_exceptions=True):
        logger.error("an agent in Ray has ended: %s", outcome)


async def _result(ref: _Ref) -> object:
    return await asyncio.wrap_future(ref.future())


@contextlib.contextmanager
def _its_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
