"""Errors that the balancer answers, and OpenAI's way to word errors.

{"error": {"message", "type", "param", "code"}} is also the shape for every path that belongs to
no protocol. Anthropic's shape is in `sgl_ext/protocols/anthropic.py`.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass, field
from http import HTTPStatus

import orjson

from sgl_ext.reading.protocol import ErrorShape, Json

_RETRY_AFTER_S = 5


@dataclass(eq=False)
class BalancerError(Exception):
    """A request that the balancer itself answers, with this HTTP status.

    code, param: OpenAI's name for the error, and the field that caused it.
    allow: the methods that the path has, for a 405.
    """

    status: HTTPStatus
    message: str
    retry_after_s: int | None = None
    code: str | None = field(default=None, kw_only=True)
    param: str | None = field(default=None, kw_only=True)
    allow: str = field(default="", kw_only=True)

    def __str__(self) -> str:
        return self.message


def no_engine() -> BalancerError:
    """No engine takes requests now; the client may retry in a moment."""
    return BalancerError(HTTPStatus.SERVICE_UNAVAILABLE, "No engine is ready.", _RETRY_AFTER_S)


def no_memory() -> BalancerError:
    """The byte budget of the process is used up; the client may retry in a moment."""
    message = "The server holds as many bytes of requests and answers as it may; retry later."
    return BalancerError(HTTPStatus.SERVICE_UNAVAILABLE, message, _RETRY_AFTER_S)


def plain_http() -> BalancerError:
    """Plain HTTP on a port that speaks TLS."""
    return BalancerError(HTTPStatus.BAD_REQUEST, "This port speaks HTTPS: use https:// in the URL.")


def too_many_connections() -> BalancerError:
    """The process has as many connections as it may; the client may retry in a moment."""
    message = "Too many connections; retry later."
    return BalancerError(HTTPStatus.SERVICE_UNAVAILABLE, message, _RETRY_AFTER_S)


def shutting_down() -> BalancerError:
    """The balancer drains or ends; another one, or the next, takes the request."""
    message = "The server is shutting down."
    return BalancerError(HTTPStatus.SERVICE_UNAVAILABLE, message, _RETRY_AFTER_S)


def internal_error() -> BalancerError:
    """A failure inside the balancer; its log has the reason."""
    return BalancerError(HTTPStatus.INTERNAL_SERVER_ERROR, "Internal error in the balancer.")


def bad_field(field: str, reason: str) -> BalancerError:
    """A field of a request, or a query parameter, that is invalid."""
    return BalancerError(HTTPStatus.BAD_REQUEST, f"{field}: {reason}", param=field)


def body_too_large(limit_bytes: int) -> BalancerError:
    """A body over the limit."""
    message = f"body: larger than {limit_bytes} bytes"
    return BalancerError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message)


def method_not_allowed(method: str, path: str, allowed: Collection[str]) -> BalancerError:
    """A method that the path does not have."""
    message = f"{method} {path}: Method Not Allowed"
    allow = ", ".join(sorted(allowed))
    return BalancerError(HTTPStatus.METHOD_NOT_ALLOWED, message, allow=allow)


def error_headers(error: BalancerError) -> dict[str, str]:
    """Headers that say whether to retry, and which methods there are. Without the first, some
    clients retry even a 401."""
    if error.retry_after_s is not None:
        return {"retry-after": str(error.retry_after_s)}
    is_temporary = error.status == HTTPStatus.TOO_MANY_REQUESTS or error.status >= 500
    headers = {} if is_temporary else {"x-should-retry": "false"}
    return headers | ({"allow": error.allow} if error.allow else {})


_TYPE = re.compile(r"[A-Za-z_]{1,64}")


def error_type(body: bytes) -> str | None:
    """The type in the body of an error, in any protocol's shape or SGLang's own; None if it states
    none that is a word."""
    try:
        document = orjson.loads(body)
        error = document.get("error")
        kind = (error if isinstance(error, dict) else document)["type"]
        return kind if _TYPE.fullmatch(kind) else None
    except (orjson.JSONDecodeError, LookupError, TypeError, AttributeError):
        return None


def wire_status(shape: ErrorShape, status: int) -> tuple[int, bytes]:
    """The status and reason phrase that a protocol has for an error."""
    if status == HTTPStatus.PAYMENT_REQUIRED:
        return shape.no_budget
    if status == HTTPStatus.SERVICE_UNAVAILABLE:
        return shape.overloaded
    return int(status), HTTPStatus(status).phrase.encode()


_NO_BUDGET = "insufficient_quota"
# OpenAI has no type for 403: its SDKs recognize it by the status.
_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
# Not `server_is_overloaded`: on that code Codex advises its user to change the model.
_CODES = {401: "invalid_api_key", 429: "rate_limit_exceeded", 503: "engine_overloaded"}


def openai_body(
    status: int,
    message: str,
    request_id: str = "",
    code: str | None = None,
    param: str | None = None,
) -> bytes:
    """The JSON body of an error in OpenAI's shape, which has no place for the request's id."""
    default = "invalid_request_error" if status < 500 else "server_error"
    kind = _TYPES.get(status, default)
    if code == _NO_BUDGET:
        kind = code  # OpenAI has the same word for both
    if param is not None and status == HTTPStatus.NOT_FOUND:
        kind = default  # a thing that a field names was not found, as opposed to the path
    code = code or _CODES.get(status)
    return orjson.dumps({"error": {"message": message, "type": kind, "param": param, "code": code}})


def _openai_event(message: str, events_sent: int, request_id: str) -> bytes:
    return b"data: %b\n\n" % openai_body(502, message)


def _openai_late(document: Json, events_sent: int) -> bytes:
    return b"data: %b\n\n" % orjson.dumps(document)


OPENAI_ERRORS = ErrorShape(openai_body, _openai_event, _openai_late)
