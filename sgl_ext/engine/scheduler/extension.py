"""The extension's state of one scheduler, as one attribute of its radix cache.

SGLang passes hooks a scheduler, its queue policy, an adder of requests or a streamer of output.
All of them have the scheduler's `tree_cache`, so hooks find the state there.
"""

from array import array
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any, Protocol

from radix.computed_ahead import Unread
from scheduler.load_cost import PRIOR
from scheduler.order import Served
from scheduler.preemption import PreemptionHistory
from sgl_ext.engine.core.counters import counter
from sgl_ext.engine.core.folder import Inbox
from sgl_ext.engine.scheduler import state
from sgl_ext.engine.scheduler.event_publisher import EventPublisher, PublishedCache
from sgl_ext.engine.scheduler.pins import PinPressure
from sgl_ext.engine.sglang_types import PrefillAdder, Req, TreeCache
from sgl_ext.engine.tiers.leaving import Leaving
from sgl_ext.settings.reloading import with_values
from sgl_ext.settings.schema import EngineSettings
from sgl_ext.tenants import Tenants
from sgl_ext.wire.orders import Orders

_ATTRIBUTE = "sgl_ext"


class ExtendedCache(PublishedCache, Protocol):
    """What hooks use of the extension's radix cache."""

    pressure: PinPressure
    pool_tokens: int

    def limit_pins(self, settings: EngineSettings) -> None: ...
    def unread_tokens(self) -> Unread: ...
    def worth_storing(self) -> list[Any]: ...
    def leave(self, nodes: Iterable[Any]) -> Leaving: ...


class SchedulerExtension:
    """The state of one scheduler.

    cache: None where SGLang's own cache serves, which pins nothing; then there is no clock, and
        the extension leaves priorities to SGLang.
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
    leaving: what stores the cache in the shared tier, while the engine ends.
    wanted: on the entry rank, the orders of the HTTP process that are not carried out yet.
    """

    def __init__(self, cache: TreeCache) -> None:
        self.settings = EngineSettings.from_environment()
        extended: Any = cache if hasattr(cache, "pins") else None
        self.cache: ExtendedCache | None = extended
        self.pins = None if self.cache is None else self.cache.pins
        self.publisher: EventPublisher | None = None
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
        self.leaving: Leaving | None = None

    @property
    def pressure(self) -> PinPressure | None:
        """What live requests take of the pins."""
        return None if self.cache is None else self.cache.pressure

    @cached_property
    def is_entry_rank(self) -> bool:
        return state.is_entry_rank()

    @cached_property
    def orders(self) -> Inbox:
        return Inbox(state.data_parallel_rank())

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


def extension_of(cache: TreeCache) -> SchedulerExtension:
    """The state of the scheduler that has this cache, made when it is first needed."""
    found: SchedulerExtension | None = getattr(cache, _ATTRIBUTE, None)
    if found is None:
        found = SchedulerExtension(cache)
        setattr(cache, _ATTRIBUTE, found)
    return found
