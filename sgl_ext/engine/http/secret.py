"""Decides for each request whether it is from the engine's balancer, and so can be believed.

    the engine listens             the request            what happens
    anywhere, with a secret        has it                 it is believed
                                   is a health probe      it is answered, without a generation
                                   any other              401
    on loopback, without a secret  any                    it is believed: there is no middleware
    elsewhere, without a secret    any                    its internal headers are removed;
                                                          what is for balancers alone is 401

The last is `sglang serve` with the plugin installed, and no balancer. `sgl_ext.engine.serve` does
not start so.
"""

import hmac
import logging
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from sgl_ext.compat.errors import EngineError, send_error
from sgl_ext.engine.arguments import in_effect
from sgl_ext.engine.core.counters import counter
from sgl_ext.engine.core.request_context import current_dry_run
from sgl_ext.engine.core.workers import SENT_HEADERS
from sgl_ext.protocols.request_ids import HEADER as REQUEST_ID_HEADER
from sgl_ext.settings.schema import SettingsError
from sgl_ext.settings.secrets import EngineSecret, is_reachable
from sgl_ext.wire.headers import INTERNAL_HEADERS, REFUSED, SECRET_HEADER
from sgl_ext.wire.probes import READY_PATH

log = logging.getLogger(__name__)

_NAME = SECRET_HEADER.encode()
_INTERNAL = frozenset(name.encode() for name in INTERNAL_HEADERS)
_PROBES = ("/health", READY_PATH)
_FOR_BALANCERS = "/sgl_ext/"
_RELOAD_S = 1.0
_FREEZE = "freeze_gc"
_LISTENING_TIMEOUT_S = 60.0
WARM_UP = "sglang-warmup"
"""The id of the requests with which SGLang warms its own server up."""
_MARK = (_NAME, REFUSED)
_MESSAGE = "This engine answers its balancer alone: the engine secret is missing or wrong."


class SecretMiddleware:
    """An ASGI application around that of an engine with a secret."""

    def __init__(
        self, app: Any, secret: EngineSecret, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.app = app
        self._secret = secret
        self._clock = clock
        self._looked_s = clock()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        # A dry run comes from this process, and its request came through here.
        if scope["type"] not in ("http", "websocket") or current_dry_run() is not None:
            await self.app(scope, receive, send)
            return
        sent = scope["headers"]
        given = [value for name, value in sent if name == _NAME]
        scope["headers"] = [header for header in sent if header[0] != _NAME]
        self._reload()
        if len(given) == 1 and self._accepts(given[0]):
            scope[SENT_HEADERS] = sent
            await self.app(scope, receive, send)
        elif not given and scope.get("method") in ("GET", "HEAD") and scope["path"] in _PROBES:
            # SGLang's /health generates a token, which is not for strangers to spend.
            await self.app(
                {**scope, "path": READY_PATH, "raw_path": READY_PATH.encode()}, receive, send
            )
        else:
            await _refuse(scope, receive, send, "wrong" if given else "missing")

    def _accepts(self, given: bytes) -> bool:
        """Takes equally long for each wrong value."""
        lines = self._secret.accepted
        equal = [hmac.compare_digest(given, line.encode()) for line in lines]
        return any(equal)

    def _reload(self) -> None:
        """Reads the secret again if its file has changed, and looks for that once a second."""
        now_s = self._clock()
        if now_s - self._looked_s < _RELOAD_S:
            return
        self._looked_s = now_s
        try:
            if self._secret.reload_if_changed():
                log.info("engine_secret: read again")
        except SettingsError as error:
            log.error("%s; the earlier secret stays valid", error)
            counter("secret_reload_failures").inc()


class StrangersMiddleware:
    """An ASGI application around that of an engine that believes no client."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] in ("http", "websocket") and current_dry_run() is None:
            kept = [header for header in scope["headers"] if header[0] not in _INTERNAL]
            scope["headers"] = kept
            if scope["path"].startswith(_FOR_BALANCERS):
                await _refuse(scope, receive, send, "missing")
                return
        await self.app(scope, receive, send)


async def _refuse(scope: Any, receive: Any, send: Any, reason: str) -> None:
    counter("requests_refused").labels(reason).inc()
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.close", "code": 1008})
    else:
        # By this header the balancer knows that it is refused, and not its client.
        await send_error(scope, EngineError(401, _MESSAGE), send, _MARK)


_own: tuple[str, EngineSecret] | None = None


def install(app: Any, url: str, secret: EngineSecret) -> None:
    """Puts the middleware that an engine needs around its application, before it serves.

    url: where SGLang reaches its own server.
    """
    global _own
    _own = f"{url}/", secret
    if secret.accepted:
        app.add_middleware(SecretMiddleware, secret=secret)
    elif is_reachable(in_effect().host):
        log.warning("without engine-secret this engine believes no header of a balancer")
        app.add_middleware(StrangersMiddleware)


def _await_listening(url: str) -> None:
    """Waits until SGLang's server listens. Without a warm-up, SGLang would send it the request that
    freezes the garbage collector before, and log a traceback."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    deadline = time.monotonic() + _LISTENING_TIMEOUT_S
    while time.monotonic() < deadline:
        with suppress(OSError), socket.create_connection((parts.hostname, parts.port), timeout=1):
            return
        time.sleep(0.05)


def send_secret(
    original: Callable[..., Any], session: Any, method: str, url: str, *args: Any, **options: Any
) -> Any:
    """Around `requests.Session.request`, with which SGLang warms its own server up: log lines show
    that it does."""
    if _own is not None and not args and str(url).startswith(_own[0]):
        if url == f"{_own[0]}{_FREEZE}":
            _await_listening(url)
        ours = {REQUEST_ID_HEADER: WARM_UP}
        if _own[1].accepted:
            ours[SECRET_HEADER] = _own[1].sent
        options["headers"] = {**(options.get("headers") or {}), **ours}
    return original(session, method, url, *args, **options)
