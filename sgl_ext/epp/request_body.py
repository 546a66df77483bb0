"""A request's body as a gateway brings it, in parts and within the bounds of all bodies."""

from functools import partial

from sgl_ext.balancer.http.request_reader import Request, check_body, take
from sgl_ext.protocols.errors import body_too_large


class RequestBody:
    """Collects the body of a request, and holds its bytes of the account.

    arrived_bytes: what has arrived, as it was sent.
    """

    def __init__(self, request: Request, max_bytes: int) -> None:
        """Raises BalancerError 413 or 415."""
        self._request = request
        self._limit, self._compressed = check_body(request.head, request.length, max_bytes)
        self._body = bytearray()
        self.arrived_bytes = 0

    def add(self, part: bytes) -> None:
        """Takes a part. Raises BalancerError 400, 413, or 503 without room for it."""
        self.arrived_bytes += len(part)
        if self._compressed is not None:
            self._compressed.take(part, partial(take, self._request.hold))
            return
        if self.arrived_bytes > self._limit:
            raise body_too_large(self._limit)
        take(self._request.hold, self.arrived_bytes)
        self._body += part

    def end(self) -> None:
        """Gives the request its body. Raises BalancerError 400 if a part is missing."""
        if self._compressed is None:
            self._request.body = self._body
        else:
            self._compressed.end()
            self._request.body = self._compressed.body
