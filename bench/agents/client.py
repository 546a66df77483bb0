"""An HTTP/1.1 client that knows, of an answer that fails, how much of it came.

Each request has a connection of its own, so that a failure belongs to one request.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import h11

_READ_BYTES = 1 << 16


@dataclass(eq=False)
class Reply:
    """One request as its client saw it. Times are `time.monotonic()`.

    port: the client's own. status: 0 if no head came. headers: with lower-case names.
    is_complete: it ended as HTTP says an answer ends. failure: why it did not.
    has_left: the client went before the end, on purpose.
    """

    sent_s: float = 0.0
    first_byte_s: float | None = None
    ended_s: float = 0.0
    port: int = 0
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    is_complete: bool = False
    failure: str = ""
    has_left: bool = False


async def send(
    reply: Reply,
    url: str,
    path: str,
    body: Mapping[str, Any],
    headers: Mapping[str, str],
    limit_s: float,
    leave_after_s: float | None = None,
) -> Reply:
    """Posts JSON and fills `reply` as its answer comes; never raises for what a server does.

    limit_s: for the whole answer. leave_after_s: when the client disconnects; None: never.
    """
    reply.sent_s = time.monotonic()
    ends_s = limit_s if leave_after_s is None else min(limit_s, leave_after_s)
    try:
        async with asyncio.timeout(ends_s):
            await _exchange(reply, url, path, json.dumps(body).encode(), headers)
    except TimeoutError:
        reply.has_left = leave_after_s is not None
        reply.failure = f"not answered within {limit_s:g} s"
    except OSError as error:
        reply.failure = repr(error)
    except h11.RemoteProtocolError as error:
        reply.failure = f"malformed or cut: {error}"
    reply.ended_s = time.monotonic()
    return reply


async def _exchange(
    reply: Reply, url: str, path: str, body: bytes, headers: Mapping[str, str]
) -> None:
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        reply.port = writer.get_extra_info("sockname")[1]
        parser = h11.Connection(h11.CLIENT)
        lines = {
            "host": address.netloc,
            "connection": "close",
            "content-type": "application/json",
            "content-length": str(len(body)),
            **headers,
        }
        request = h11.Request(method="POST", target=path, headers=list(lines.items()))
        events: list[h11.Event] = [request, h11.Data(data=body), h11.EndOfMessage()]
        writer.write(b"".join(parser.send(event) or b"" for event in events))
        while not reply.is_complete:
            event = parser.next_event()
            if event is h11.NEED_DATA:
                parser.receive_data(await reader.read(_READ_BYTES))
            else:
                _take(reply, event)
    finally:
        writer.transport.abort()


def _take(reply: Reply, event: object) -> None:
    if isinstance(event, h11.Response):
        reply.first_byte_s = time.monotonic()
        reply.status = event.status_code
        reply.headers = {name.decode(): value.decode() for name, value in event.headers}
    elif isinstance(event, h11.Data):
        reply.body += bytes(event.data)
    elif isinstance(event, h11.EndOfMessage):
        reply.is_complete = True
    elif isinstance(event, h11.ConnectionClosed):
        raise ConnectionResetError("closed before an answer")
