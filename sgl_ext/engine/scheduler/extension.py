"""The extension's state in one scheduler process, as one attribute of its radix cache.

SGLang passes hooks a scheduler, its queue policy, an adder of requests or a streamer of output.
All of them have the scheduler's `tree_cache`, so hooks find the state there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from scheduler.order import Served
from scheduler.preemption import PreemptionHistory
from sgl_ext.engine.core import ranks
from sgl_ext.engine.core.channels import Inbox
from sgl_ext.engine.core.counters import counter
from sgl_ext.engine.scheduler.event_publisher import EventPublisher
from sgl_ext.engine.sglang_types import Req, TreeCache
from sgl_ext.settings.schema import EngineSettings
from sgl_ext.tenants import Tenants

if TYPE_CHECKING:
    from sgl_ext.engine.scheduler.radix_cache import ExtendedRadixCache

_ATTRIBUTE = "sgl_ext"


class SchedulerExtension:
    """The state of one scheduler.

    cache: None where SGLang's own cache serves, which pins nothing; then there is no clock, and
        the extension leaves priorities to SGLang.
    after_output: actions that wait until a batch's output is sent; None while none may wait.
    served: the tokens that each tenant was given lately.
    first_waiting: the first request of the queue that was ordered last.
    passed: how many requests that did not fit were passed in this scheduling pass.
    last_try: what the last attempt to admit requests depended on.
    is_prefix_awaited: whether a request has waited for a prefix since the last attempt.
    are_slices_expected: whether slices that are prefilled ahead may be in the queue.
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
        self.last_try: tuple[object, ...] | None = None
        self.is_prefix_awaited = False
        self.are_slices_expected = False

    @cached_property
    def is_entry_rank(self) -> bool:
        return ranks.is_entry_rank()

    @cached_property
    def orders(self) -> Inbox:
        return Inbox()

    @cached_property
    def weights(self) -> Mapping[str, float]:
        return Tenants(self.settings.tenants).weights

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


def is_plain(cache: TreeCache) -> bool:
    """Whether a prefix of the cached tokens is usable by itself. With a sliding window or a state
    it is not."""
    return not (cache.supports_swa() or cache.supports_mamba())
