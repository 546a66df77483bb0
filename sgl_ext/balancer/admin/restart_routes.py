"""Restarts engines through the launcher of this node, one after another.

POST /sgl_ext/restart {"engine": NAME or null, "model_path": PATH or null, "engine_args": [..] or
                      null}    202 with the restart that begins; `null` keeps what there is
GET  /sgl_ext/restart          the last restart

{"id", "state": "running" | "done" | "failed", "error": null or text, "engines": [{"name", "state":
"waiting" | "draining" | "stopping" | "starting" | "ready" | "failed", "reason"}]}
"""

from collections.abc import Awaitable
from http import HTTPStatus

from aiohttp import web

from sgl_ext.balancer.admin.worker_routes import SERVICES, json_response
from sgl_ext.balancer.cluster.launcher import Answer, Launcher, LauncherUnreachable
from sgl_ext.protocols.errors import BalancerError

PATH = "/sgl_ext/restart"


async def restart(request: web.Request) -> web.Response:
    launcher = request.app[SERVICES].launcher
    return await _passed_on(launcher, launcher.restart(await request.read()))


async def show_restart(request: web.Request) -> web.Response:
    launcher = request.app[SERVICES].launcher
    return await _passed_on(launcher, launcher.last_restart())


async def _passed_on(launcher: Launcher, asked: Awaitable[Answer]) -> web.Response:
    """The launcher's answer. Raises BalancerError for an error, in the shape of this server."""
    try:
        answer = await asked
    except LauncherUnreachable as error:
        is_there = launcher.is_there
        status = HTTPStatus.BAD_GATEWAY if is_there else HTTPStatus.NOT_IMPLEMENTED
        raise BalancerError(status, str(error)) from None
    if answer.status >= HTTPStatus.BAD_REQUEST:
        raise BalancerError(HTTPStatus(answer.status), answer.document["error"])
    return json_response(answer.document, answer.status)


ROUTES = (
    web.route("POST", PATH, restart),
    web.route("GET", PATH, show_restart),
)
