"""The extension's state of each request in a scheduler, as one attribute of SGLang's; and the rank
that the scheduler has."""

import sys
from dataclasses import dataclass
from typing import Any, NamedTuple

from sgl_ext.engine import sglang_api
from sgl_ext.engine.core.hints import decode_hints
from sgl_ext.engine.sglang_types import Req, TreeCache
from sgl_ext.wire.hints import Hints

_ATTRIBUTE = "sgl_ext"


def is_entry_rank() -> bool:
    """Whether this process counts and publishes for its scheduler: the first of those that have one
    queue and one tree between them. With replicas or data-parallel attention an engine has several
    such groups, each a data-parallel rank."""
    parallel = sglang_api.get_parallel()
    return not (parallel.attn_tp_rank or parallel.attn_cp_rank or parallel.pp_rank)


def data_parallel_rank() -> int:
    """The number of this scheduler among those of its engine."""
    return sglang_api.get_parallel().dp_rank or 0


def compare(decision: str, *values: object) -> None:
    """Has SGLang compare a decision between all ranks, if its checker is on: each rank must take
    the same ones in the same order. `values` are formatted with %."""
    if "sglang" in sys.modules:
        sglang_api.assert_same(decision, *values)


def is_plain(cache: TreeCache) -> bool:
    """Whether a prefix of the cached tokens is usable by itself. With a sliding window or a state
    it is not."""
    return not (cache.supports_swa() or cache.supports_mamba())


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
    drafting: what drafts from context know of it (`sgl_ext.engine.drafts`).
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
    drafting: Any = None

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
