"""The copy of a request that a prefill engine computes, while a decode engine answers.

SGLang's engines hand the KV over between themselves. The prefill engine's answer is a token that
the decode engine's answer has too, so it is dropped; only a failure counts.
"""

import asyncio
import secrets
from functools import partial
from http import HTTPStatus
from typing import Protocol

from sgl_ext.balancer.http.upstream import ConnectionPool, ResponseHead, Upstream
from sgl_ext.balancer.routing.worker import Worker
from sgl_ext.wire.headers import bootstrap_line

# How long the decode engine has to answer what its prefill engine rejects, as it rejects it, too.
_ANSWER_S = 2.0


_ROOMS = 10**17


def hand_over_line(prefill: Worker) -> bytes:
    """The header line by which two engines find each other for a request."""
    return bootstrap_line(prefill.bootstrap, secrets.randbelow(_ROOMS))


class Failed(Protocol):
    def __call__(self, reason: str, /, *, answered: bool) -> None: ...


class PrefillLeg:
    """One copy. failed: called with the reason, and whether the engine answered an error."""

    def __init__(
        self,
        pool: ConnectionPool,
        lines: bytes,
        body: bytes | bytearray,
        failed: Failed,
    ) -> None:
        """lines: the whole head. It is sent at once."""
        self._pool = pool
        self._lines = lines
        self._body = body
        self._failed = failed
        self._status = 0
        self._connection: Upstream | None = None
        self._connecting = pool.lease(self)

    def abort(self) -> None:
        """The answer is complete, or will not come: the engine need not go on."""
        if self._connection is not None:
            self._connection.abort()
        if self._connecting is not None:
            self._connecting.cancel()
        self._connection = self._connecting = None

    def connected(self, connection: Upstream) -> None:
        self._connecting, self._connection = None, connection
        connection.send(self, self._lines, self._body, "POST")

    def connect_failed(self, reason: str) -> None:
        self._connecting = None
        self._failed(reason, answered=False)

    def response_head(self, head: ResponseHead) -> None:
        self._status = head.status

    def response_data(self, data: bytes) -> None:
        pass

    def response_end(self, last: bytes) -> None:
        self._connection = None
        failed = partial(self._failed, f"status {self._status}", answered=True)
        if self._status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            failed()
        elif self._status != HTTPStatus.OK:
            asyncio.get_running_loop().call_later(_ANSWER_S, failed)

    def upstream_lost(self, reason: str) -> None:
        connection, self._connection = self._connection, None
        if connection is not None and connection.reused and not connection.heard:
            self._connecting = self._pool.connect(self)
        else:
            self._failed(reason, answered=False)
