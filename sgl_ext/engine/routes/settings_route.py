"""`POST /sgl_ext/settings`: the balancer's way to change settings while the engine runs.

A `Version` of `sgl_ext.settings.reloading`: {"number", "values"}. The answer is {"applied", "why"}.
An older version than the engine has changes nothing. The engine secret, or the address that the
engine listens on, decides who may call it (`engine.middleware.secret`). Web pages cannot send JSON,
so that they may not.
"""

from collections.abc import Sequence
from http import HTTPStatus

import msgspec
import zmq
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from sgl_ext.engine.core.folder import Outbox
from sgl_ext.engine.http.extension import HttpExtension
from sgl_ext.settings.reloading import SETTINGS_PATH, Version, engine_values, with_values
from sgl_ext.settings.schema import SettingsError


def settings_route(
    extension: HttpExtension, outboxes: Sequence[Outbox], unreached: str = ""
) -> Route:
    """The route, which applies settings in this process and has the schedulers apply them.
    unreached: which schedulers no order reaches."""

    async def change(request: Request) -> JSONResponse:
        if request.headers.get("content-type") != "application/json":
            return _error(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "the body must be application/json")
        try:
            version = msgspec.json.decode(await request.body(), type=Version)
            values = engine_values(version)
            settings = with_values(extension.settings, values)
        except (msgspec.MsgspecError, SettingsError) as error:
            return _error(HTTPStatus.BAD_REQUEST, str(error))
        if version.number > extension.settings_number:
            try:
                for outbox in outboxes:
                    outbox.change(values)
            except zmq.Again:
                return _error(HTTPStatus.SERVICE_UNAVAILABLE, "the scheduler reads no orders")
            extension.change(settings, version.number)
        return JSONResponse({"applied": not unreached, "why": unreached})

    return Route(SETTINGS_PATH, change, methods=["POST"])


def _error(status: HTTPStatus, message: str) -> JSONResponse:
    """An error; the error middleware gives it its protocol's shape."""
    return JSONResponse({"error": {"message": message}}, status)
