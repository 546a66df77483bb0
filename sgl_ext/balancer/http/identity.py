"""What a request's head says of its identity: the client's id of it, and its trace."""

from typing import NamedTuple

from sgl_ext.protocols import request_ids, trace_context
from sgl_ext.protocols.trace_context import TraceContext, read_trace

_ID = request_ids.HEADER.encode()
_PARENT, _STATE = (name.encode() for name in trace_context.HEADERS)
HEADERS = frozenset({_ID, _PARENT, _STATE})
"""The headers that an engine gets from the balancer alone, after they were checked."""


class Identity(NamedTuple):
    """request_id: the client's, "" if it has none. trace: the client's.

    replaced: the headers that were invalid, so that the balancer's own values take their place.
    """

    request_id: str = ""
    trace: TraceContext | None = None
    replaced: tuple[str, ...] = ()


NO_IDENTITY = Identity()


def read_identity(headers: list[tuple[bytes, bytes]], fields: dict[bytes, bytes]) -> Identity:
    """The identity that a head states. Headers whose names may not be repeated are invalid if they
    are."""
    if HEADERS.isdisjoint(fields):
        return NO_IDENTITY
    replaced: list[str] = []
    request_id, trace = _one(headers, _ID), None
    if _ID in fields and not request_ids.is_valid_id(request_id):
        request_id = ""
        replaced.append(request_ids.HEADER)
    if _PARENT in fields:
        state = ",".join([v.decode("latin-1") for name, v in headers if name == _STATE])
        trace = read_trace(_one(headers, _PARENT), state)
        if trace is None:
            replaced.append(trace_context.HEADERS[0])
        elif state and not trace.state:
            replaced.append(trace_context.HEADERS[1])
    return Identity(request_id, trace, tuple(replaced))


def _one(headers: list[tuple[bytes, bytes]], name: bytes) -> str:
    values = [value for n, value in headers if n == name]
    return values[0].decode("latin-1") if len(values) == 1 else ""
