"""The trace that a request belongs to: W3C's headers `traceparent` and `tracestate`.

    traceparent: 00-<trace id>-<id of the span that called>-<flags>

A client's trace goes on if its header is valid, and a new one begins if not. The flags of a new
trace say that it is recorded, unless the balancer has decided otherwise.
"""

import random
import re
from typing import NamedTuple

HEADERS = ("traceparent", "tracestate")
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
