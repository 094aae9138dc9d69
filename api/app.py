"""The FastAPI application: routes, error bodies and middleware around one service."""

from __future__ import annotations

from fastapi import FastAPI

from api.errors import install_error_handlers
from api.metrics import Metrics
from api.middleware import ApiKey, Outermost
from api.routes import chat, completions, models, operations, speech, transcriptions
from api.routes.base import Api
from api.settings import ApiSettings
from stages.service import Service


def create_app(service: Service, settings: ApiSettings) -> FastAPI:
    """The service is started and stopped by the caller; the application only talks to it."""
    api = Api(service, settings, Metrics(service))
    app = FastAPI(
        title="omnistage",
        routes=[
            *chat.routes(api),
            *completions.routes(api),
            *models.routes(api),
            *operations.routes(api),
            *speech.routes(api),
            *transcriptions.routes(api),
        ],
        redirect_slashes=False,
        # Bodies are parsed by msgspec, so FastAPI has no schema to show.
        openapi_url=None,
    )
    install_error_handlers(app)
    if settings.api_key is not None:
        app.add_middleware(ApiKey, key=settings.api_key)
    app.add_middleware(Outermost)
    return app
