"""What /health says, whoever answers it: the gate while the server starts or ends, the routes meanwhile."""

from __future__ import annotations

from typing import Literal

import msgspec

from api.errors import ErrorFields


class StageReport(msgspec.Struct, frozen=True):
    stage: str
    state: str
    detail: str
    values: dict[str, float] | msgspec.UnsetType = msgspec.UNSET


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """Beside the stages, an unhealthy answer has the error body that every other 503 has."""

    status: Literal["ok", "unhealthy", "starting", "draining"]
    stages: list[StageReport]
    error: ErrorFields | msgspec.UnsetType = msgspec.UNSET
