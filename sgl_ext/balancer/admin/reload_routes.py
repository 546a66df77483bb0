"""POST /sgl_ext/reload: reads the file of settings again, and applies what can change.

{"changed": [KEY, ..], "unchanged_until_restart": [{"key", "why"}, ..],
 "engines": [{"id", "applied", "why"}, ..]}

400 if the file is wrong, naming the table, the key and the value, and 409 if there is no file;
nothing changes then. SIGHUP does the same.
"""

from http import HTTPStatus

from aiohttp import web

from sgl_ext.balancer.admin.worker_routes import SERVICES, json_response
from sgl_ext.balancer.cluster.launcher import LauncherUnreachable
from sgl_ext.protocols.errors import BalancerError
from sgl_ext.settings.reloading import NothingToRead
from sgl_ext.settings.schema import SettingsError

PATH = "/sgl_ext/reload"


async def reload(request: web.Request) -> web.Response:
    try:
        return json_response(await request.app[SERVICES].reload())
    except NothingToRead as error:
        raise BalancerError(HTTPStatus.CONFLICT, str(error)) from None
    except SettingsError as error:
        raise BalancerError(HTTPStatus.BAD_REQUEST, str(error)) from None
    except LauncherUnreachable as error:
        raise BalancerError(HTTPStatus.BAD_GATEWAY, str(error)) from None


ROUTES = (web.route("POST", PATH, reload),)
