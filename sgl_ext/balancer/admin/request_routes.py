"""What became of a past request.

GET /sgl_ext/requests/ID    the request log's line of the latest request with this id; without a
                            request log, of the latest requests. 404 if there is none
"""

from http import HTTPStatus

from aiohttp import web

from sgl_ext.balancer.admin.worker_routes import SERVICES
from sgl_ext.balancer.reporting.request_log import SearchTooLong
from sgl_ext.protocols.errors import BalancerError
from sgl_ext.protocols.request_ids import is_valid_id


async def show_request(request: web.Request) -> web.Response:
    request_id, line = request.match_info["id"], None
    try:
        if is_valid_id(request_id):
            line = await request.app[SERVICES].request_log.find(request_id)
    except SearchTooLong:
        message = "The request log is too large to be searched in time. Search its files with grep."
        raise BalancerError(HTTPStatus.SERVICE_UNAVAILABLE, message) from None
    except OSError as error:
        message = f"The request log cannot be read: {error.strerror}."
        raise BalancerError(HTTPStatus.SERVICE_UNAVAILABLE, message) from None
    if line is None:
        raise BalancerError(HTTPStatus.NOT_FOUND, "no request has this id")
    return web.Response(body=line, content_type="application/json")


ROUTES = (web.get("/sgl_ext/requests/{id:.+}", show_request, allow_head=False),)
