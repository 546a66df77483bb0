"""What a request's body may be: its size, its encoding, and the bytes that it may hold."""

from http import HTTPStatus

from sgl_ext.balancer.http.compressed import ENCODINGS, CompressedBody
from sgl_ext.balancer.http.request_head import RequestHead
from sgl_ext.limits.bounds import MAX_BODILESS_BYTES
from sgl_ext.limits.byte_account import Hold
from sgl_ext.protocols.errors import BalancerError, body_too_large, no_memory

_NO_CODING = b"identity"
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
    encoding = _encoding(head.fields.get(b"content-encoding", b""))
    return limit, CompressedBody(encoding, limit) if encoding else None


def _encoding(stated: bytes) -> bytes:
    """The one coding of a body; b"" if it has none. Raises BalancerError 415."""
    words = (word.strip().lower() for word in stated.split(b","))
    codings = [word for word in words if word not in (b"", _NO_CODING)]
    unknown = next((word for word in codings if word not in ENCODINGS), None)
    if unknown is not None:
        message = f"must be gzip, deflate, zstd or identity, not {unknown.decode('latin-1')!r}"
    elif len(codings) > 1:
        message = f"must be one coding, not {stated.decode('latin-1')!r}"
    else:
        return codings[0] if codings else b""
    raise BalancerError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"content-encoding: {message}")


def take(hold: Hold, size: int) -> None:
    """Holds this many bytes. Raises BalancerError 503 if the account has no room."""
    if not hold.take_up_to(size):
        raise no_memory()
