"""What the stages of a request took, in all processes together.

Unlike `bench.lib.warm.stages`, which splits the time to the first token, this counts all work of a
request, also what comes after its first token and in processes that work side by side.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from bench.lib.warm.stages import OURS, SHARED, Span

_RADIX = "sgl_ext.engine.scheduler.radix_cache:ExtendedRadixCache"
_CACHE = "sglang.srt.mem_cache.unified_radix_cache:UnifiedRadixCache"
_HTTP = "sgl_ext.engine.http"

STOCK_SYMBOLS = SHARED | {
    f"{_CACHE}.checkpoint_into_tree": "cache",
}
OUR_SYMBOLS = (
    STOCK_SYMBOLS
    | OURS
    | {
        "radix.residency:Residency.add": "scheduler residency",
        "sgl_ext.engine.scheduler.pins:PinKeeper.prompt_stored": "scheduler pins",
        "sgl_ext.engine.scheduler.event_publisher:EventPublisher.publish": "scheduler events",
        "sgl_ext.engine.scheduler.admission:must_wait": "scheduler single flight",
        "sgl_ext.engine.host_cache.message_cache:MessageCache.recall": "engine message cache",
        "sgl_ext.engine.host_cache.message_cache:MessageCache.convert": "engine message cache",
        f"{_HTTP}.event_broadcaster:EventBroadcaster.apply": "engine events",
        "sgl_ext.balancer.routing.prefix_events:PrefixEventReader.apply": "balancer events",
        "sgl_ext.balancer.relay.bodies:LargeBodies.call": "balancer large body",
    }
)
OUR_STAGES = frozenset(OUR_SYMBOLS.values()) - frozenset(STOCK_SYMBOLS.values())
"""Those that an engine without our plugin does not have."""


def work_ms(spans: Iterable[Span], begin_ns: int, end_ns: int) -> dict[str, float]:
    """Milliseconds of each stage between two moments. Where spans overlap, time belongs to the one
    that began last."""
    near = sorted(span for span in spans if span.begin_ns < end_ns and span.end_ns > begin_ns)
    total: dict[str, float] = defaultdict(float)
    open_ones: list[Span] = []
    at_ns = begin_ns

    def go_to(moment_ns: int) -> None:
        nonlocal at_ns
        while open_ones and at_ns < moment_ns:
            last = open_ones[-1]
            until_ns = min(last.end_ns, moment_ns)
            total[last.stage] += max(until_ns - at_ns, 0) / 1e6
            at_ns = max(at_ns, until_ns)
            if last.end_ns <= moment_ns:
                open_ones.pop()
        at_ns = moment_ns

    for span in near:
        go_to(max(span.begin_ns, begin_ns))
        open_ones.append(span)
    go_to(end_ns)
    return dict(total)
