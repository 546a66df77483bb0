"""The extension's state in one scheduler process: of the scheduler, as one attribute of its radix
cache, and of each request, as one attribute of SGLang's.

SGLang passes hooks a scheduler, its queue policy, an adder of requests or a streamer of output.
All of them have the scheduler's `tree_cache`, so hooks find the state there.
"""

import sys
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from scheduler.load_cost import PRIOR
from scheduler.order import Served
from scheduler.preemption import PreemptionHistory
from sgl_ext.engine import sglang_api
from sgl_ext.engine.core.counters import counter
from sgl_ext.engine.core.folder import Inbox, Orders
from sgl_ext.engine.core.hints import Hints, decode_hints
from sgl_ext.engine.sglang_types import PrefillAdder, Req, TreeCache
from sgl_ext.settings.reloading import with_values
from sgl_ext.settings.schema import EngineSettings
from sgl_ext.tenants import Tenants

if TYPE_CHECKING:
    from sgl_ext.engine.scheduler.event_publisher import EventPublisher
    from sgl_ext.engine.scheduler.pin_pressure import PinPressure
    from sgl_ext.engine.scheduler.radix_cache import ExtendedRadixCache

_ATTRIBUTE = "sgl_ext"


class SchedulerExtension:
    """The state of one scheduler.

    cache: None where SGLang's own cache serves, which pins nothing; then there is no clock, and
        the extension leaves priorities to SGLang.
    after_output: actions that wait until a batch's output is sent; None while none may wait.
    served: the tokens that each tenant was given lately.
    first_waiting: the first request of the queue that was ordered last.
    adder: what admits requests in this pass, once one was tried.
    passed: how many requests that did not fit were passed in this scheduling pass.
    last_try: what the last attempt to admit requests depended on.
    is_prefix_awaited: whether a request has waited for a prefix since the last attempt.
    prefilled_prompt: the prompt of the last slice that was sent whole, by its name.
    are_slices_expected: whether slices that are prefilled ahead may be in the queue.
    load_share: what a token costs that the host loads, as a share of a computed one.
    token_s: how long a token is computed; 0.0 if unknown. Both are measured, and the same on all
        ranks.
    wanted: on the entry rank, the orders of the HTTP process that are not carried out yet.
    """

    def __init__(self, cache: TreeCache) -> None:
        self.settings = EngineSettings.from_environment()
        extended: Any = cache if hasattr(cache, "pins") else None
        self.cache: ExtendedRadixCache | None = extended
        self.pins = None if self.cache is None else self.cache.pins
        self.publisher: EventPublisher | None = None
        self.after_output: list[Callable[[], object]] | None = None
        self.served = Served()
        self.preemptions = PreemptionHistory()
        self.first_waiting: Req | None = None
        self.passed = 0
        self.adder: PrefillAdder | None = None
        self.last_try: tuple[object, ...] | None = None
        self.is_prefix_awaited = False
        self.prefilled_prompt: tuple[str, array[int]] | None = None
        self.are_slices_expected = False
        self.load_share, self.token_s = PRIOR, 0.0
        self.wanted = Orders()

    @property
    def pressure(self) -> "PinPressure | None":
        """What live requests take of the pins."""
        return None if self.cache is None else self.cache.pressure

    @cached_property
    def is_entry_rank(self) -> bool:
        return is_entry_rank()

    @cached_property
    def orders(self) -> Inbox:
        return Inbox(data_parallel_rank())

    @cached_property
    def weights(self) -> Mapping[str, float]:
        return Tenants(self.settings.tenants).weights

    def change(self, values: Mapping[str, Any]) -> None:
        """Puts changed settings into effect, on every rank alike."""
        if not values:
            return
        self.settings = with_values(self.settings, values)
        self.__dict__.pop("weights", None)  # made again when it is needed
        self.last_try = None
        if self.cache is not None:
            self.cache.limit_pins(self.settings)

    def count(self, name: str, amount: float = 1) -> None:
        """Counts, once for an engine, what every rank of it does."""
        if amount and self.is_entry_rank:
            counter(name).inc(amount)


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


def extension_of(cache: TreeCache) -> SchedulerExtension:
    """The state of the scheduler that has this cache, made when it is first needed."""
    found: SchedulerExtension | None = getattr(cache, _ATTRIBUTE, None)
    if found is None:
        found = SchedulerExtension(cache)
        setattr(cache, _ATTRIBUTE, found)
    return found


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
