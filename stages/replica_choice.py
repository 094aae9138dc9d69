"""ReplicaChoice: gives requests and items to the replicas of the stages that may have several, and keeps
their
books."""

from __future__ import annotations

from stages.deployment import RoutingConfig
from stages.inflight import Attempt, InFlight
from stages.routes import Routes
from stages.routing import Choice, ItemRouter, PrefixRouter
from stages.stage_board import StageBoard


class ReplicaChoice:
    def __init__(self, routes: Routes, board: StageBoard, routing: RoutingConfig) -> None:
        self._routes = routes
        self._board = board
        self.router = PrefixRouter(routes.replicas(routes.entry), routing)
        self._item_routers = {stage: ItemRouter(routes.replicas(stage), routing) for stage in routes.encoders}

    def of_entry(self, request: InFlight) -> Choice | None:
        """Charged until `attempt_over`. None: no replica of the entry stage is ready."""
        ready = self._ready(self._routes.entry)
        if not ready:
            return None
        message = request.message
        sampling = message.sampling
        return self.router.choose(message.prompt, sampling.max_tokens, sampling.n, message.cache_salt, ready)

    def of_encoder(self, attempt: Attempt, index: int) -> Choice | None:
        """For an item of the attempt, which remembers it. None: no replica that encodes it is ready."""
        stage = self._encoder_of(attempt, index)
        ready = self._ready(stage)
        if not ready:
            return None
        self._return(attempt, index)
        message = attempt.request.message
        choice = self._item_routers[stage].choose(message.prompt.items[index], message.cache_salt, ready)
        attempt.encoders[index] = choice
        return choice

    def encoders_done(self, attempt: Attempt) -> None:
        """Nothing is being encoded for it any more; where its features may still be read stays known."""
        for index, choice in attempt.encoders.items():
            self._item_routers[self._encoder_of(attempt, index)].finished(choice)
            attempt.encoders[index] = Choice(choice.replica, 0, 0)

    def attempt_over(self, attempt: Attempt) -> None:
        self.router.finished(attempt.entry)
        self.encoders_done(attempt)

    def lost(self, name: str) -> None:
        self.router.lost(name)
        for router in self._item_routers.values():
            router.lost(name)

    def take_back(self, attempt: Attempt, encoder: str) -> list[int]:
        """The items that a lost replica had been asked for: they have none now."""
        indices = [index for index, choice in attempt.encoders.items() if choice.replica == encoder]
        for index in indices:
            self._return(attempt, index)
        return indices

    def has_others(self, name: str) -> bool:
        """Whether another replica of the same stage works, or will."""
        for stage in (self._routes.entry, *self._routes.encoders):
            if name in (names := self._routes.replicas(stage)):
                return any(self._board.state(other) in ("ready", "restarting") for other in names)
        return False

    def _ready(self, stage: str) -> list[str]:
        return [name for name in self._routes.replicas(stage) if self._board.is_ready(name)]

    def _encoder_of(self, attempt: Attempt, index: int) -> str:
        return self._routes.encoder_of(attempt.request.message.prompt.items[index])

    def _return(self, attempt: Attempt, index: int) -> None:
        choice = attempt.encoders.pop(index, None)
        if choice is not None:
            self._item_routers[self._encoder_of(attempt, index)].finished(choice)
