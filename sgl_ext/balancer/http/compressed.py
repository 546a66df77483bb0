"""A compressed body, inflated as it arrives: gzip, zstd, deflate with and without its zlib header.

A few KB can inflate to many MB. So beyond a first MB a body may only be MAX_RATIO times as large
as what has arrived of it.
"""

import zlib
from collections.abc import Callable
from http import HTTPStatus

from sgl_ext.balancer.http import zstd
from sgl_ext.limits.bounds import FREE_INFLATED_BYTES, INFLATED_STEP_BYTES, MAX_RATIO
from sgl_ext.protocols.errors import BalancerError, body_too_large

_WINDOW = {b"gzip": 31, b"x-gzip": 31, b"deflate": zlib.MAX_WBITS}
_ZSTD = b"zstd"
ENCODINGS = frozenset((*_WINDOW, _ZSTD))


class CompressedBody:
    """Takes compressed bytes; `body` is what they inflate to."""

    def __init__(self, encoding: bytes, max_bytes: int) -> None:
        self.body = bytearray()
        self._encoding = encoding
        self._max_bytes = max_bytes
        self._arrived = 0
        self._decoder: zlib._Decompress | zstd.ZstdDecoder | None = None

    def take(self, data: bytes | bytearray, reserve: Callable[[int], None]) -> None:
        """Inflates the next bytes.

        reserve: called with the size of `body` each time that it has grown by
        INFLATED_STEP_BYTES or less. Raises BalancerError 400 if they are not compressed so, 413 if
        they inflate too far, and what `reserve` raises.
        """
        if not data:
            return
        if self._decoder is None:
            self._decoder = self._decoder_of(data[0])
        self._arrived += len(data)
        allowed = max(FREE_INFLATED_BYTES, MAX_RATIO * self._arrived)
        left: bytes | bytearray | memoryview = data
        is_full = True
        while left or is_full:
            room = min(allowed, self._max_bytes) - len(self.body)
            step = min(room + 1, INFLATED_STEP_BYTES)
            try:
                inflated = self._decoder.decompress(left, step)
            except (zlib.error, zstd.Error):
                message = "body: does not have the form of its content-encoding"
                raise BalancerError(HTTPStatus.BAD_REQUEST, message) from None
            self.body += inflated
            if len(self.body) > self._max_bytes:
                raise body_too_large(self._max_bytes)
            if len(self.body) > allowed:
                message = f"body: inflates to more than {MAX_RATIO} times its compressed size"
                raise BalancerError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message)
            reserve(len(self.body))
            left, is_full = self._decoder.unconsumed_tail, len(inflated) == step
        if self._decoder.unused_data:
            raise _incomplete()

    def _decoder_of(self, first: int) -> "zlib._Decompress | zstd.ZstdDecoder":
        """The decoder of a body that begins with this byte."""
        if self._encoding == _ZSTD:
            return zstd.ZstdDecoder()
        window = _WINDOW[self._encoding]
        if self._encoding == b"deflate" and first & 0x0F != zlib.DEFLATED:
            # Some clients send it without the zlib header.
            window = -window
        return zlib.decompressobj(wbits=window)

    def end(self) -> None:
        """All bytes were given. Raises BalancerError 400 if some are missing."""
        if self._decoder is not None and not self._decoder.eof:
            raise _incomplete()


def _incomplete() -> BalancerError:
    message = "body: its compressed data is incomplete, or other bytes follow it"
    return BalancerError(HTTPStatus.BAD_REQUEST, message)
