"""What a request's body may be: its size, its encoding, and the bytes that it may hold."""

from http import HTTPStatus

from sgl_ext.balancer.http.compressed import ENCODINGS, CompressedBody
from sgl_ext.balancer.http.request_head import RequestHead
from sgl_ext.limits.bounds import MAX_BODILESS_BYTES
from sgl_ext.limits.byte_account import Hold
from sgl_ext.protocols.errors import BalancerError, body_too_large, no_memory

_WITH_BODY = ("POST", "PUT", "PATCH")


def check_body(
    head: RequestHead, size_bytes: int, max_bytes: int
) -> tuple[int, CompressedBody | None]:
    """The most bytes that the body of this head may have, and what inflates it if it is compressed.

    size_bytes: the length that the head states. Raises BalancerError 413 or 415.
    """
    limit = max_bytes
    if head.method not in _WITH_BODY:
        limit = min(limit, MAX_BODILESS_BYTES)
    if size_bytes > limit:
        raise body_too_large(limit)
    encoding = head.fields.get(b"content-encoding")
    if encoding is None:
        return limit, None
    if encoding.lower() not in ENCODINGS:
        given = encoding.decode("latin-1")
        message = f"content-encoding: must be gzip or deflate, not {given!r}"
        raise BalancerError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, message)
    return limit, CompressedBody(encoding.lower(), limit)


def take(hold: Hold, size: int) -> None:
    """Holds this many bytes. Raises BalancerError 503 if the account has no room."""
    if not hold.take_up_to(size):
        raise no_memory()
