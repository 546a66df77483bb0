"""One error family, answered in the caller's own protocol.

Anthropic's shape: {"type": "error", "error": {"type", "message"}, "request_id"}; OpenAI's:
{"error": {"message", "type", "param", "code"}}. A stream that was cut ends in
the protocol's error event. An overload is told as each protocol's clients expect it, so that
they come again by themselves: 529 to Anthropic's, 503 to all others, with `Retry-After`.
"""

from __future__ import annotations

from enum import StrEnum
from http import HTTPStatus

import orjson

OVERLOADED = 529
"""Anthropic's status for an overload; HTTP itself knows none of this number."""


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
    """A request that the balancer itself answers. `status` is the HTTP status it deserves.

    code, param: what OpenAI's protocols call the error, and the field that it is about.
    """

    def __init__(
        self,
        status: HTTPStatus,
        message: str,
        retry_after_s: int | None = None,
        *,
        code: str | None = None,
        param: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.retry_after_s = retry_after_s
        self.code = code
        self.param = param


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
    comes_again = error.status == HTTPStatus.TOO_MANY_REQUESTS or error.status >= 500
    return {} if comes_again else {"x-should-retry": "false"}


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
    431: "invalid_request_error",
    503: "overloaded_error",
    504: "timeout_error",
    OVERLOADED: "overloaded_error",
}
# OpenAI names no type for 403, which its SDKs tell by the status alone.
_OPENAI_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
# Not `server_is_overloaded`: upon that Codex advises its user to try another model.
_OPENAI_CODES = {401: "invalid_api_key", 429: "rate_limit_exceeded", 503: "engine_overloaded"}


def wire_status(protocol: Protocol, status: int) -> tuple[int, bytes]:
    """The status that a protocol has for an error, and its phrase."""
    if protocol is Protocol.ANTHROPIC and status == HTTPStatus.SERVICE_UNAVAILABLE:
        return OVERLOADED, b"Overloaded"
    return int(status), HTTPStatus(status).phrase.encode()


def status_of(kind: str) -> int:
    """The HTTP status of an error that Anthropic calls so; 500 if it is none of a request's."""
    return next((status for status, named in _ANTHROPIC_TYPES.items() if named == kind), 500)


def error_body(
    protocol: Protocol,
    status: int,
    message: str,
    request_id: str = "",
    code: str | None = None,
    param: str | None = None,
) -> bytes:
    """The JSON body of an error answer. Anthropic's also names the request."""
    if protocol is Protocol.ANTHROPIC:
        kind = _ANTHROPIC_TYPES.get(status, "api_error")
        told: dict[str, object] = {"type": "error", "error": {"type": kind, "message": message}}
        return orjson.dumps(told | {"request_id": request_id} if request_id else told)
    return orjson.dumps({"error": _openai_error(status, message, code, param)})


def error_event(protocol: Protocol, message: str, events_sent: int, request_id: str = "") -> bytes:
    """The server-sent event that ends a stream which cannot go on."""
    if protocol is Protocol.ANTHROPIC:
        return b"event: error\ndata: %b\n\n" % error_body(protocol, 500, message, request_id)
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


def _openai_error(
    status: int, message: str, code: str | None = None, param: str | None = None
) -> dict[str, object]:
    default = "invalid_request_error" if status < 500 else "server_error"
    kind = _OPENAI_TYPES.get(status, default)
    if param is not None and status == HTTPStatus.NOT_FOUND:
        kind = default  # what a field names is not there, as opposed to the path
    code = code or _OPENAI_CODES.get(status)
    return {"message": message, "type": kind, "param": param, "code": code}
