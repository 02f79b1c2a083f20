"""GET /v1/models and /v1/models/{id}: what is served here.

Owns the model object's wire type. Invariant: the list is there before the model has loaded; what
only a loaded model tells (max_model_len) comes with it.
"""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..engine.async_engine import AsyncEngine, EngineStatus
from ..errors import UnknownModelError
from .wire import engine_of, json_response


class Model(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    id: str
    object: str = msgspec.field(default_factory=lambda: "model")  # a default would be omitted
    created: int
    owned_by: str
    root: str  # what --model said
    max_model_len: int | None = None


class ModelList(msgspec.Struct, frozen=True):
    object: str
    data: list[Model]


def _models(engine: AsyncEngine) -> list[Model]:
    ready = engine.status is EngineStatus.READY
    return [
        Model(
            id=model_id,
            created=engine.created_s,
            owned_by="streamkv",
            root=engine.config.model,
            max_model_len=engine.info.max_model_len if ready else None,
        )
        for model_id in engine.model_ids
    ]


async def list_models(request: Request) -> Response:
    return json_response(ModelList("list", _models(engine_of(request))))


async def get_model(request: Request) -> Response:
    model_id: str = request.path_params["model_id"]
    for model in _models(engine_of(request)):
        if model.id == model_id:
            return json_response(model)
    served = ", ".join(engine_of(request).model_ids)
    raise UnknownModelError(f"model: {model_id!r} is not served here; expected {served}")


routes = [
    Route("/v1/models", list_models, methods=["GET"]),
    Route("/v1/models/{model_id:path}", get_model, methods=["GET"]),  # ids may contain slashes
]
