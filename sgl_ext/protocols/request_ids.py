"""An id for each request, returned in a header of its answer: clients show it, and logs name it.

A random prefix for the process and a counter are as unique as a random id, and cost less.
"""

import itertools
import os
import secrets

from sgl_ext.requests.protocol import ErrorShape

NAMES = frozenset({b"request-id", b"x-request-id"})
_process = secrets.token_hex(8)
_numbers = itertools.count(1)


def new_request_id() -> str:
    """An id that no other request has, in this process or another."""
    return f"req_{_process}{next(_numbers):08x}"


def id_line(shape: ErrorShape, request_id: str) -> bytes:
    """The header line in which a protocol's clients look for the id."""
    return f"{shape.request_id_header}: {request_id}\r\n".encode()


def _reset_prefix() -> None:
    global _process
    _process = secrets.token_hex(8)


os.register_at_fork(after_in_child=_reset_prefix)
