"""The plugin's Prometheus counters, served on the engine's own `/metrics`."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client import Counter

_COUNTERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "headers_stripped": ("Session headers removed before tokenization", ("path",)),
    "headers_left": (
        "Header names seen in a body and left: not at the beginning of a system text",
        ("path",),
    ),
    "chains_left_out": ("Requests with too many segments to be told apart by them", ()),
    "event_lines": ("Lines of prefix events that the scheduler sent", ()),
    "event_lines_dropped": ("Lines that found no room; everything held was sent again", ()),
    "event_lines_unreadable": ("Lines that the HTTP process could not apply", ()),
    "events_forgotten": ("Branches no longer told of for want of room, though maybe held", ()),
    "event_subscribers_slow": ("Streams of events ended because the reader fell behind", ()),
    "breakpoints_not_found": ("Marked blocks whose end in the prompt was not found", ("path",)),
    "cache_hints_ignored": ("Marks of other vocabularies that say nothing we can do", ("path",)),
    "priority_hints_ignored": ("Hints of priority that say nothing known", ("path",)),
    "preempted": ("Requests whose memory a more important one took", ()),
    "preempted_tokens": ("Tokens that they had generated, and whose cache is computed again", ()),
    "pins_granted": ("Prefixes pinned", ()),
    "pins_renewed": ("Marks on prefixes that were pinned already", ()),
    "pins_read": ("Requests that read a pinned prefix, once for each pin", ()),
    "pins_refused": ("Marks that got no pin", ("why",)),
    "pins_ended": (
        "Pins gone: expired, displaced, given up under pressure, ended, deleted, flushed",
        ("why",),
    ),
    "event_sweeps_deferred": ("Iterations that left leaves to look at for the next one", ()),
}


@cache
def counter(name: str) -> Counter:
    """The counter `sgl_ext_<name>_total`. A KeyError: it is not in the table.

    Made at its first use: prometheus_client must be imported after SGLang has
    set its multiprocess folder, which is after plugins load.
    """
    from prometheus_client import Counter

    text, labels = _COUNTERS[name]
    return Counter(f"sgl_ext_{name}_total", text, labels)
