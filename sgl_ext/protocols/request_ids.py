"""The names of a request: its id, and the trace that it belongs to."""

import itertools
import os
import random
import re
import secrets
from typing import NamedTuple

from sgl_ext.reading.protocol import ErrorShape

# The id of each request: the client's own or one made here, in its answer, the log and the engine.
#
# A random prefix for the process and a counter are as unique as a random id, and cost less.

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


# The trace that a request belongs to: W3C's headers `traceparent` and `tracestate`.
#
#     traceparent: 00-<trace id>-<id of the span that called>-<flags>
#
# A client's trace goes on if its header is valid, and a new one begins if not. The flags of a new
# trace say that it is recorded, unless the balancer has decided otherwise.

TRACE_HEADERS = ("traceparent", "tracestate")
_PARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-[!-~]*)?")
# W3C: at least 512 characters must be passed on. A list of `key=value`, in visible ASCII.
_STATE = re.compile(r"[ -~]{1,512}")
_SAMPLED = 1
_NO_TRACE, _NO_SPAN = "0" * 32, "0" * 16


class TraceContext(NamedTuple):
    """A position in a trace. Ids are lower-case hexadecimal digits.

    span_id: of the span that calls.
    state: what tracing systems add, "" for nothing.
    """

    trace_id: str
    span_id: str
    is_sampled: bool
    state: str = ""

    @property
    def lines(self) -> str:
        """The header lines that hand it on."""
        flags = "01" if self.is_sampled else "00"
        line = f"traceparent: 00-{self.trace_id}-{self.span_id}-{flags}\r\n"
        return f"{line}tracestate: {self.state}\r\n" if self.state else line


def new_trace_id() -> str:
    """The id of a trace that begins here."""
    return "%032x" % (random.getrandbits(128) | 1)


def lines_of_new(trace_id: str, *, is_sampled: bool) -> str:
    """The header lines that hand on a trace that begins here, without a span. They are made for
    every request, so they take no `TraceContext`."""
    return f"traceparent: 00-{trace_id}-{trace_id[16:]}-{'01' if is_sampled else '00'}\r\n"


def new_span_id() -> str:
    """The id of a new span."""
    return f"{random.getrandbits(64) | 1:016x}"


class RequestName:
    """What a request is found by: its id and its trace, and the header lines that state them.

    is_stated: the client sent the id. answer_line: for the client. trace_lines: for the engine.
    """

    __slots__ = ("answer_line", "is_stated", "request_id", "trace_id", "trace_lines")

    def __init__(
        self, shape: ErrorShape, stated_id: str, trace: TraceContext | None, *, is_sampled: bool
    ) -> None:
        """shape: of the protocol's errors. stated_id: "" if the client sent none. trace: the
        client's. is_sampled: whether a trace that begins here is recorded."""
        self.is_stated = bool(stated_id)
        self.request_id = stated_id or new_request_id()
        self.answer_line = id_line(shape, self.request_id, is_stated=self.is_stated)
        if trace is None:
            self.trace_id = new_trace_id()
            self.trace_lines = lines_of_new(self.trace_id, is_sampled=is_sampled)
        else:
            self.trace_id, self.trace_lines = trace.trace_id, trace.lines


def read_trace(parent: str, state: str) -> TraceContext | None:
    """The trace of a client's headers; None if the first is invalid. An invalid second is left
    out."""
    match = _PARENT.fullmatch(parent)
    if match is None or len(parent) > 512:
        return None
    version, trace_id, span_id, flags, rest = match.groups()
    if version == "ff" or (version == "00" and rest) or trace_id == _NO_TRACE:
        return None
    if span_id == _NO_SPAN:
        return None
    is_sampled = bool(int(flags, 16) & _SAMPLED)
    return TraceContext(trace_id, span_id, is_sampled, state if is_valid_state(state) else "")


def is_valid_state(state: str) -> bool:
    """Whether a `tracestate` can be handed on."""
    return _STATE.fullmatch(state) is not None
