"""The launcher's control socket: HTTP over a Unix socket that only this user can open.

GET  /children   {"children": [..]}: the node's engines, and how far each has started
POST /restart    an order, as JSON: 202 with the restart that begins
GET  /restart    the last restart, 404 if there was none
POST /reload     reads the settings again: what changed, and what did not; 400 if they are wrong,
                 409 if there is no file

Errors are {"error": text}. The node's balancer offers the same to administrators.
"""

import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from typing import Any

from aiohttp import web

from sgl_ext.node.child import READY, Child, stage_of
from sgl_ext.node.restarts import RestartRefused, Restarts, read_order
from sgl_ext.process import make_folder
from sgl_ext.settings.reloading import NothingToRead
from sgl_ext.settings.schema import SettingsError
from sgl_ext.wire.launcher import CHILDREN, RELOAD, RESTART, EngineRow, engines_document

SOCKET_FOLDERS = "sgl-ext-launcher-"
"""The prefix of the folders for sockets whose log directory has a long name."""
_SOCKET = "launcher.sock"
_LONGEST_PATH = 100  # in bytes; systems allow a few more


def socket_path(log_dir: Path) -> Path:
    """Where the launcher of this log directory listens: in it, unless that path is too long for a
    socket; then in a temporary folder."""
    path = log_dir / _SOCKET
    is_short = len(os.fsencode(path)) <= _LONGEST_PATH
    return path if is_short else make_folder(SOCKET_FOLDERS) / _SOCKET


class Control:
    """Answers on the socket from `start` to `stop`.

    restarts: set once the node has started, if its engines are its own.
    reload: reads the settings again, if that is offered.
    """

    def __init__(self, path: Path, engines: Sequence[Child], cannot_restart: str = "") -> None:
        """engines: on Ray, what keeps them. cannot_restart: why this launcher restarts no engines;
        "" if it does."""
        self._path = path
        self._engines = engines
        self._cannot_restart = cannot_restart
        self.restarts: Restarts | None = None
        self.reload: Callable[[], Awaitable[dict[str, Any]]] | None = None
        app = web.Application(middlewares=[_answer_refusals])
        app.router.add_get(CHILDREN, self._show_children)
        app.router.add_post(RESTART, self._restart)
        app.router.add_get(RESTART, self._show_restart)
        app.router.add_post(RELOAD, self._reload)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)

    async def start(self) -> None:
        """Listens. Call it with the lock of the log directory, so that a socket which is there is
        of a launcher that was killed. Raises SettingsError if the directory can hold none."""
        await self._runner.setup()
        listening = socket.socket(socket.AF_UNIX)
        try:
            self._path.unlink(missing_ok=True)
            os.fchmod(listening.fileno(), 0o600)  # before others can open it
            listening.bind(str(self._path))
        except OSError as error:
            listening.close()
            problem = f"no socket can be made there: {error.strerror}"
            raise SettingsError(f"log_dir={str(self._path.parent)!r}: {problem}") from None
        await web.SockSite(self._runner, listening).start()

    async def stop(self) -> None:
        """Ends a restart that runs, and removes the socket."""
        await self._runner.cleanup()
        if self.restarts is not None:
            await self.restarts.end()
        with suppress(OSError):
            self._path.unlink()

    async def _show_children(self, _: web.Request) -> web.Response:
        return web.json_response(engines_document([*map(self._row, self._engines)]))

    def _row(self, engine: Child) -> EngineRow:
        stage, progress = stage_of(engine)
        last = engine.last_exit
        state = "ready" if stage == READY else "starting"
        if engine.exit_code is not None:
            state = "ended"
        elif self.restarts is not None and self.restarts.drains(engine.name):
            state = "draining"
        return {
            "name": engine.name,
            "url": engine.url,
            "state": state,
            "stage": stage,
            "progress": progress,
            "restarts": engine.restarts,
            "crashes": engine.crashes,
            "last_exit": None if last is None else {"time_s": last.time_s, "cause": last.cause},
        }

    async def _restart(self, request: web.Request) -> web.Response:
        if self._cannot_restart:
            raise RestartRefused(HTTPStatus.NOT_IMPLEMENTED, self._cannot_restart)
        if self.restarts is None:
            raise RestartRefused(HTTPStatus.CONFLICT, "the node is still starting")
        begun = await self.restarts.begin(read_order(await request.read()))
        return web.json_response(begun.as_json(), status=HTTPStatus.ACCEPTED)

    async def _show_restart(self, _: web.Request) -> web.Response:
        if self._cannot_restart:
            raise RestartRefused(HTTPStatus.NOT_IMPLEMENTED, self._cannot_restart)
        if self.restarts is None or self.restarts.last is None:
            raise RestartRefused(HTTPStatus.NOT_FOUND, "there was no restart yet")
        return web.json_response(self.restarts.last.as_json())

    async def _reload(self, _: web.Request) -> web.Response:
        if self.reload is None:
            raise web.HTTPNotFound
        try:
            return web.json_response(await self.reload())
        except NothingToRead as error:
            return web.json_response({"error": str(error)}, status=HTTPStatus.CONFLICT)
        except SettingsError as error:
            return web.json_response({"error": str(error)}, status=HTTPStatus.BAD_REQUEST)


@web.middleware
async def _answer_refusals(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except RestartRefused as refused:
        return web.json_response({"error": str(refused)}, status=refused.status)
    except web.HTTPException as error:
        return web.json_response({"error": error.reason}, status=error.status)
