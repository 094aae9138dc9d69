"""What every route needs: the service, the settings, the metrics, and how bodies are read and answered."""

from __future__ import annotations

import uuid
from dataclasses import dataclass

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from api.errors import CLIENT_LEFT_STATUS
from api.generation import Generation, GenerationGroup
from api.metrics import Metrics
from api.sample_text import TextOptions
from api.schemas import RequestT, parse, read_body
from api.settings import ApiSettings
from stages.service import GenerationRequest, Service


@dataclass(frozen=True)
class Api:
    service: Service
    settings: ApiSettings
    metrics: Metrics

    async def read(self, request: Request, decoder: msgspec.json.Decoder[RequestT]) -> RequestT:
        declared = request.headers.get("content-length")
        body = await read_body(request.stream(), declared, self.settings.max_body_bytes)
        return parse(decoder, body)

    def group(self, requests: tuple[GenerationRequest, ...], text: TextOptions) -> GenerationGroup:
        n = requests[0].sampling.n
        return GenerationGroup(
            [Generation(self.service, r, text, self.metrics, i * n) for i, r in enumerate(requests)]
        )


def json_response(payload: msgspec.Struct, status: int = 200) -> Response:
    return Response(msgspec.json.encode(payload), status, media_type="application/json")


def client_left() -> Response:
    return Response(status_code=CLIENT_LEFT_STATUS)


def new_id(prefix: str) -> str:
    """Ours alone: a client's X-Request-Id is only echoed, so it can collide with nothing."""
    return f"{prefix}-{uuid.uuid4().hex}"
