"""What the extension remembers of one request in the scheduler, as one attribute of SGLang's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from sgl_ext.engine.core.hints import Hints, decode_hints
from sgl_ext.engine.sglang_types import Req

_ATTRIBUTE = "sgl_ext"


class Admission(NamedTuple):
    """When a request was admitted, and the priority step that it had reached by waiting."""

    step: int
    at_s: float


@dataclass(slots=True)
class RequestState:
    """Times are those of the entry rank's clock (`sgl_ext.engine.scheduler.iteration`).

    hints: what the HTTP process sent with the request; None if it sent nothing.
    first_ordered_s: when the queue was first put in order with this request in it.
    matched_s: when its cached prefix was last looked up.
    not_fitting_since_s: when it first did not fit into memory.
    leaders: the requests that it waited for, as they computed a prefix that it needs.
    times_preempted, computed_tokens: preemptions of it, and the tokens it had in memory before
        the last one.
    marks_seen: how many of its marked prefixes were in the tree; None before its first one.
    is_slice_checked: whether a prefill slice was allowed or rejected.
    """

    hints: Hints | None
    first_ordered_s: float | None = None
    matched_s: float | None = None
    not_fitting_since_s: float | None = None
    admission: Admission | None = None
    leaders: tuple[str, ...] = ()
    times_preempted: int = 0
    computed_tokens: int = 0
    marks_seen: int | None = None
    is_slice_checked: bool = False

    def arrived_s(self, now_s: float) -> float:
        """When the request arrived at the balancer, so that its aging goes on in the engine.
        Without hints: when it was first put in order."""
        if self.hints is not None:
            return self.hints.sent_s - self.hints.queued_s
        if self.first_ordered_s is None:
            self.first_ordered_s = now_s
        return self.first_ordered_s


def state_of(req: Req) -> RequestState:
    """The state of a request, made when it is first needed."""
    found: RequestState | None = getattr(req, _ATTRIBUTE, None)
    if found is None:
        found = RequestState(decode_hints(req.kv_hints))
        setattr(req, _ATTRIBUTE, found)
    return found
