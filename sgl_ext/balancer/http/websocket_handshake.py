"""The handshake that opens a WebSocket (RFC 6455, section 4.2). wsproto answers it."""

import re
from http import HTTPStatus

from wsproto import ConnectionType, WSConnection
from wsproto.events import AcceptConnection

from sgl_ext.balancer.http.request_head import RequestHead
from sgl_ext.protocols.errors import BalancerError, bad_field

_KEY = re.compile(rb"[A-Za-z0-9+/]{22}==")
_UPGRADE = ((b"host", b"-"), (b"connection", b"upgrade"), (b"upgrade", b"websocket"))
VERSION_LINE = b"sec-websocket-version: 13\r\n"
"""Of an answer that refuses a handshake."""


def handshake(head: RequestHead) -> tuple[WSConnection, bytes]:
    """The frames of a connection that begins with this head, and the answer that opens it.

    Raises BalancerError 400 for a malformed handshake, 426 for another version.
    """
    version = head.fields.get(b"sec-websocket-version", b"")
    if version != b"13":
        message = f"sec-websocket-version: must be 13, not {version.decode('latin-1')[:40]!r}"
        raise BalancerError(HTTPStatus.UPGRADE_REQUIRED, message, param="sec-websocket-version")
    key = head.fields.get(b"sec-websocket-key", b"")
    if not _KEY.fullmatch(key):
        raise bad_field("sec-websocket-key", "must be 16 bytes in base64")
    frames = WSConnection(ConnectionType.SERVER)
    checked = [(b"sec-websocket-key", key), (b"sec-websocket-version", version)]
    frames.initiate_upgrade_connection([*_UPGRADE, *checked], "/")
    list(frames.events())  # the request
    return frames, frames.send(AcceptConnection())
