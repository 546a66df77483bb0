"""Serves the state document, once or as a stream of server-sent events.

GET /sgl_ext/state    the document of `state`
GET /sgl_ext/live     `event: state` with it as `data:`, about once a second

The document is made when a client requests it, and one serves all clients of about that time. A
stream has no queue: each event is the latest document, so a client that reads slowly gets fewer of
them, and one that reads nothing is dropped.
"""

import asyncio
import time
from http import HTTPStatus

import aiohttp
import orjson
from aiohttp import web

from sgl_ext.balancer.admin.state import document
from sgl_ext.balancer.admin.worker_routes import SERVICES
from sgl_ext.balancer.relay.services import Services
from sgl_ext.protocols import routes
from sgl_ext.protocols.errors import BalancerError
from sgl_ext.version import versions

MOST_STREAMS = 16
_SLOW_S = 10.0
_RETRY_AFTER_S = 10
_MODEL_S = 30.0
_MODEL_TIMEOUT = aiohttp.ClientTimeout(total=1)


class States:
    """The latest document as JSON.

    interval_s: how long it is the latest, and the time between two events of a stream.
    streams: how many streams are open.
    """

    def __init__(self, services: Services, interval_s: float) -> None:
        self.interval_s = interval_s
        self.streams = 0
        self._services = services
        self._json = b""
        self._making = asyncio.Lock()
        self._made_s = self._asked_s = float("-inf")
        self._model: str | None = None
        services.metrics.live_streams.set_function(lambda: self.streams)
        add_table = services.metrics.tables.add
        add_table("live_streams", lambda: self.streams, lambda: MOST_STREAMS)

    async def latest(self) -> bytes:
        """The document."""
        # Streams that wake together share one.
        async with self._making:
            if time.monotonic() - self._made_s >= self.interval_s / 2:
                self._json = await self._make()
                self._made_s = time.monotonic()
        return self._json

    async def _make(self) -> bytes:
        await asyncio.to_thread(versions)  # which may run git, the first time
        await self._find_model()
        children = await self._services.launcher.children()
        return orjson.dumps(document(self._services, children, self._model, time.time()))

    async def _find_model(self) -> None:
        """Asks an engine for the model's name now and then, if no source of workers has it."""
        workers, now_s = self._services.workers, time.monotonic()
        if workers.model or not workers.ready or now_s - self._asked_s < _MODEL_S:
            return
        self._asked_s = now_s
        try:
            async with self._services.session.get(
                f"{workers.ready[0].url}/v1/models", timeout=_MODEL_TIMEOUT
            ) as answer:
                self._model = str(orjson.loads(await answer.read())["data"][0]["id"])
        except (aiohttp.ClientError, TimeoutError, ValueError, LookupError, TypeError):
            pass  # it stays what it was


STATES = web.AppKey("states", States)


async def show(request: web.Request) -> web.Response:
    body = await request.app[STATES].latest()
    headers = {"cache-control": "no-store"}
    return web.Response(body=body, content_type="application/json", headers=headers)


async def stream(request: web.Request) -> web.StreamResponse:
    states, services = request.app[STATES], request.app[SERVICES]
    dropped = services.metrics.live_streams_dropped.counts
    if states.streams >= MOST_STREAMS:
        dropped[("many",)] += 1
        message = f"At most {MOST_STREAMS} live streams may be open."
        raise BalancerError(HTTPStatus.SERVICE_UNAVAILABLE, message, _RETRY_AFTER_S)
    response = web.StreamResponse(headers={"cache-control": "no-store"})
    response.content_type = "text/event-stream"
    states.streams += 1
    try:
        await response.prepare(request)
        while True:
            event = b"event: state\ndata: %b\n\n" % await states.latest()
            async with asyncio.timeout(_SLOW_S):
                await response.write(event)
            if services.draining:  # the last event says so, and the balancer need not wait
                return response
            await asyncio.sleep(states.interval_s)
    except TimeoutError:
        dropped[("slow",)] += 1
        return response
    finally:
        states.streams -= 1


ROUTES = (
    web.route("GET", routes.STATE, show),
    web.route("GET", routes.LIVE, stream),
)
