"""The id of each request: the client's own or one made here, in its answer, the log and the engine.

A random prefix for the process and a counter are as unique as a random id, and cost less.
"""

import itertools
import os
import re
import secrets

from sgl_ext.requests.protocol import ErrorShape

HEADER = "x-request-id"
"""The header in which clients send an id of their own, and the balancer to an engine."""
NAMES = frozenset({b"request-id", b"x-request-id"})
# No blank and no quote, which could forge a part of a log line, and no "~", which ends an id in the
# engine's name of the request.
_VALID = re.compile(r"[A-Za-z0-9._+/=@#-]{1,128}")
_process = secrets.token_hex(8)
_numbers = itertools.count(1)


def new_request_id() -> str:
    """An id that no other request has, in this process or another."""
    return f"req_{_process}{next(_numbers):08x}"


def unique_digits() -> str:
    """24 hexadecimal digits that no other call returns, in this process or another."""
    return f"{_process}{next(_numbers) & 0xFFFFFFFF:08x}"


def is_valid_id(stated: str) -> bool:
    """Whether a client's id is short and can be written to a log as it is."""
    return _VALID.fullmatch(stated) is not None


def id_line(shape: ErrorShape, request_id: str, *, is_stated: bool = False) -> bytes:
    """The header line in which a protocol's clients look for the id.

    is_stated: the client sent the id. It then finds it in the header that it used, too.
    """
    name = shape.request_id_header
    line = f"{name}: {request_id}\r\n"
    if is_stated and name != HEADER:
        line += f"{HEADER}: {request_id}\r\n"
    return line.encode()


def _reset_prefix() -> None:
    global _process
    _process = secrets.token_hex(8)


os.register_at_fork(after_in_child=_reset_prefix)
