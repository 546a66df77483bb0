"""One error family, answered in the caller's own protocol.

Anthropic's shape: {"type": "error", "error": {"type", "message"}}; OpenAI's:
{"error": {"message", "type", "param", "code"}}. A stream that was cut ends in
the protocol's error event.
"""

from __future__ import annotations

from enum import StrEnum
from http import HTTPStatus

import orjson


class Protocol(StrEnum):
    """The dialect of a caller, told by the path it called."""

    ANTHROPIC = "anthropic"
    OPENAI = "openai"
    RESPONSES = "responses"

    @classmethod
    def of(cls, path: str) -> Protocol:
        if path.startswith("/v1/messages"):
            return cls.ANTHROPIC
        return cls.RESPONSES if path.startswith("/v1/responses") else cls.OPENAI


class BalancerError(Exception):
    """A request that the balancer itself answers. `status` is the HTTP status it deserves."""

    def __init__(self, status: HTTPStatus, message: str, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.retry_after_s = retry_after_s


def no_engine() -> BalancerError:
    """No engine takes requests now; one may in a moment."""
    return BalancerError(
        HTTPStatus.SERVICE_UNAVAILABLE, "No engine is ready.", retry_after_s=_RETRY_AFTER_S
    )


def body_too_large(limit: int) -> BalancerError:
    """A body over the limit."""
    return BalancerError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"body: larger than {limit} bytes")


def retry_headers(error: BalancerError) -> dict[str, str]:
    """What tells a client whether to come again. Some clients repeat even a 401 without it."""
    if error.retry_after_s is not None:
        return {"retry-after": str(error.retry_after_s)}
    return {"x-should-retry": "false"} if error.status < 500 else {}


_RETRY_AFTER_S = 5
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_OPENAI_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


def error_body(protocol: Protocol, status: int, message: str) -> bytes:
    """The JSON body of an error answer."""
    if protocol is Protocol.ANTHROPIC:
        kind = _ANTHROPIC_TYPES.get(status, "api_error")
        return orjson.dumps({"type": "error", "error": {"type": kind, "message": message}})
    return orjson.dumps({"error": _openai_error(status, message)})


def error_event(protocol: Protocol, message: str, events_sent: int) -> bytes:
    """The server-sent event that ends a stream which cannot go on."""
    if protocol is Protocol.ANTHROPIC:
        return b"event: error\ndata: %b\n\n" % error_body(protocol, 500, message)
    if protocol is Protocol.RESPONSES:
        event = {
            "type": "error",
            "code": "server_error",
            "message": message,
            "param": None,
            "sequence_number": events_sent,
        }
        return b"event: error\ndata: %b\n\n" % orjson.dumps(event)
    return b"data: %b\n\n" % error_body(protocol, 502, message)


def _openai_error(status: int, message: str) -> dict[str, object]:
    default = "invalid_request_error" if status < 500 else "server_error"
    kind = _OPENAI_TYPES.get(status, default)
    return {"message": message, "type": kind, "param": None, "code": status}
