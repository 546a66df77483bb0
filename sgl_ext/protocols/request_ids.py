"""A name for each request, which its answer tells: clients show it, and a log can be asked for it.

Anthropic's clients read it from `request-id`, OpenAI's from `x-request-id`. It is random once a
process and then counted, which costs less than a random one each time and is as unique.
"""

from __future__ import annotations

import itertools
import os
import secrets

from sgl_ext.protocols.errors import Protocol

NAMES = frozenset({b"request-id", b"x-request-id"})
_process = secrets.token_hex(8)
_numbers = itertools.count(1)


def new_request_id() -> str:
    """A name that no other request has, of this process or another."""
    return f"req_{_process}{next(_numbers):08x}"


def id_line(path: str, request_id: str) -> bytes:
    """The header line that tells it to whoever called `path`."""
    name = "request-id" if Protocol.of(path) is Protocol.ANTHROPIC else "x-request-id"
    return f"{name}: {request_id}\r\n".encode()


def _begin_anew() -> None:
    global _process
    _process = secrets.token_hex(8)


os.register_at_fork(after_in_child=_begin_anew)
