"""What operators look at: /health, /ready, /stages, /metrics, /cache/reset, and the page at /."""

from __future__ import annotations

from functools import partial
from importlib import resources
from typing import Literal

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import BaseRoute, Route

from api.errors import error_fields
from api.health import Health, StageReport
from api.routes.base import Api, json_response
from contracts.errors import ServiceUnavailable
from stages.service import StageHealth, WorkerInfo


class Ready(msgspec.Struct, frozen=True):
    ready: bool


class Done(msgspec.Struct, frozen=True):
    status: Literal["ok"] = "ok"


class Stages(msgspec.Struct, frozen=True):
    workers: list[WorkerInfo]
    stages: list[StageReport]


def routes(api: Api) -> list[BaseRoute]:
    page = resources.files("api").joinpath("static/index.html").read_text(encoding="utf-8")
    return [
        Route("/", partial(_page, page), methods=["GET"]),
        Route("/health", partial(_health, api), methods=["GET"]),
        Route("/ready", partial(_ready, api), methods=["GET"]),
        Route("/stages", partial(_stages, api), methods=["GET"]),
        Route("/metrics", partial(_metrics, api), methods=["GET"]),
        Route("/cache/reset", partial(_reset_cache, api), methods=["POST"]),
    ]


async def _page(page: str, request: Request) -> Response:
    return HTMLResponse(page)


async def _health(api: Api, request: Request) -> Response:
    """Live: asked of the service now. 503 as long as one stage is gone."""
    stages = api.service.health()
    reports = [StageReport(s.stage, s.state, s.detail) for s in stages]
    broken = [s for s in stages if s.state in ("failed", "stopped", "restarting")]
    if not broken:
        return json_response(Health(status="ok", stages=reports))
    return json_response(
        Health(status="unhealthy", stages=reports, error=error_fields(_unhealthy(broken))), 503
    )


def _unhealthy(broken: list[StageHealth]) -> ServiceUnavailable:
    states = "; ".join(
        f"{s.stage} {s.state}: {s.detail}" if s.detail else f"{s.stage} {s.state}" for s in broken
    )
    return ServiceUnavailable(states)


async def _ready(api: Api, request: Request) -> Response:
    if not api.service.ready():
        raise ServiceUnavailable("not ready: see /health for the stages", code="not_ready")
    return json_response(Ready(True))


async def _stages(api: Api, request: Request) -> Response:
    values = api.service.stats()
    reports = [StageReport(s.stage, s.state, s.detail, values.get(s.stage, {})) for s in api.service.health()]
    return json_response(Stages(list(api.service.workers()), reports))


async def _metrics(api: Api, request: Request) -> Response:
    return Response(api.metrics.expose(), headers={"content-type": CONTENT_TYPE_LATEST})


async def _reset_cache(api: Api, request: Request) -> Response:
    await api.service.reset_cache()
    return json_response(Done())
