"""The extension's Prometheus metrics, on the engine's own `/metrics`.

SGLang collects that page in prometheus_client's multiprocess mode, which exports no `_created`
samples, so none has to be turned off.
"""

from functools import cache
from typing import TYPE_CHECKING

from sgl_ext import supervision

if TYPE_CHECKING:
    from prometheus_client import Counter, Gauge

COUNTERS: dict[str, tuple[str, ...]] = {
    "headers_stripped": ("Session headers removed from system texts before tokenization.", "path"),
    "headers_not_stripped": ("Session headers that do not begin a system text; they stay.", "path"),
    "volatile_lines": (
        "Volatile lines found in system texts: moved to the first user message, or kept.",
        *("path", "kind"),
    ),
    "long_chains_ignored": ("Requests with more segments than are published.",),
    "event_lines": ("Lines of prefix events and load received from the scheduler.",),
    "event_lines_dropped": ("Lines dropped because the socket was full; a snapshot followed.",),
    "event_lines_unreadable": ("Lines that the HTTP process could not apply.",),
    "event_branches_dropped": ("Branches dropped from the published residency, for its size.",),
    "event_sweeps_deferred": ("Iterations that left evicted segments to find for the next one.",),
    "slow_event_subscribers": ("Event streams ended because the subscriber read too slowly.",),
    "breakpoints_not_found": ("Marked blocks whose end in the prompt was not found.", "path"),
    "prompt_features_off": (
        "Features that do not work with what writes this model's prompts: pins, tokens.",
        "feature",
    ),
    "cache_hints_ignored": ("Other vendors' cache hints with unknown values.", "path"),
    "cache_ttls_clamped": ("Requests that stated a longer TTL than pins may have.", "path"),
    "kv_hints": ("Actions in the kv_hints of requests; of type other, they had no effect.", "type"),
    "translated_parts": ("Parts of requests translated for SGLang, or left out.", "path", "part"),
    "choices_without_grammar": (
        "Requests whose choice of tools changed the prompt, or whose answer's schema forbade calls,"
        " because no grammar describes the calls.",
        *("path", "what"),
    ),
    "forbidden_calls_left_out": ("Calls in answers to requests that do not allow the tool.",),
    "parallel_calls_left_out": ("Further calls of answers whose clients take one at most.",),
    "priority_hints_ignored": ("Other vendors' priority hints with unknown values.", "path"),
    "priority_clamped": ("Requests that asked for more priority than their tenant has.", "path"),
    "queued_headers_malformed": ("Malformed times of the balancer's queue.", "path"),
    "default_hints_malformed": ("Requests with default hints that could not be read.", "path"),
    "preempted_requests": ("Requests preempted for their slot or their memory.",),
    "preempted_tokens": ("Tokens that preempted requests had generated.",),
    "recomputed_tokens": ("Tokens computed again after a preemption.",),
    "prefills_interrupted": ("Chunked prefills queued again for a more important request.",),
    "promotions": ("Requests admitted after they had waited for aging-s or longer.",),
    "prefixes_awaited": ("Requests that waited for a prefix that another one computed.",),
    "host_tokens_computed": (
        "Prompt tokens that the host had, and that were computed as SGLang did not load them.",
    ),
    "prefills_ahead": ("Prompts taken to be prefilled ahead.", "kind"),
    "prefills_ahead_dropped": ("Prompts dropped before they were prefilled completely.", "reason"),
    "prefill_ahead_slices_rejected": ("Slices of prompts that could not run at once.", "reason"),
    "prefill_ahead_taken_tokens": (
        "Tokens that prefills ahead took from cached prefixes which a request might have read.",
    ),
    "prefilled_ahead_tokens": ("Tokens prefilled ahead.",),
    "loaded_ahead_tokens": ("Tokens loaded ahead from the host.",),
    "loaded_ahead_tokens_used": (
        "Tokens loaded ahead from the host that the next turn found on the device.",
    ),
    "returns_expected": ("Turns that ended with tool calls and whose session is expected back.",),
    "returns": ("Sessions that were expected back, by what the wait came to.", "result"),
    "prefilled_ahead_tokens_used": ("Tokens of right guesses of a next turn.",),
    "prefilled_ahead_tokens_wasted": ("Tokens of guesses whose turn differed or never came.",),
    "prefilled_ahead_saved_seconds": ("Time that prefilling right guesses took.",),
    "next_turns_guessed": ("Turns that came after a guess, by whether it was right.", "result"),
    "next_turns_not_guessed": ("Turns that were not guessed though a guess was wanted.", "reason"),
    "shared_prefix_requests": ("Requests of cache groups that begin with a shared prefix.",),
    "shared_prefix_tokens": ("Tokens of shared prefixes in requests of cache groups.",),
    "cached_tokens": ("Prompt tokens that requests found cached: device, host, shared.", "tier"),
    "shared_tier_pages": (
        "Pages of the tier that engines share: written, known, refused, failed, skipped, read, "
        "missed, corrupt, evicted.",
        "result",
    ),
    "shared_tier_tokens": ("Tokens of these pages that were read, written.", "operation"),
    "shared_tier_bytes": ("Bytes of these pages that were read, written, evicted.", "operation"),
    "shared_tier_seconds": ("Time that threads took to read and write them.", "operation"),
    "shared_tier_notes_dropped": (
        "Segments of prompts that are not published as shared: too many waited, or had no room.",
    ),
    "shared_tier_leases_dropped": ("Leases of pins that the tier does not keep: too many waited.",),
    "draft_steps": (
        "Steps of decoding of requests while drafts from context are on.",
        *("client", "turn"),
    ),
    "drafted_tokens": ("Tokens drafted from context and verified.", "client", "turn"),
    "accepted_drafts": ("Drafted tokens that the model wrote as well.", "client", "turn"),
    "draft_memory_dropped": ("Sessions or groups whose tokens drafts lost, for their size.",),
    "pins_granted": ("Prefixes pinned.",),
    "pins_renewed": ("Marks on prefixes that were pinned already.",),
    "pins_read": ("Pins read by requests.",),
    "pins_rejected": ("Marks that got no pin.", "reason"),
    "pins_ended": (
        "Ended pins: expired, displaced, pressure, ended, deleted, demoted, compacted, flushed,"
        " reduced.",
        "reason",
    ),
    "pins_spilled": ("Pins moved from the device to a locked copy in host memory.",),
    "pins_loaded": ("Pins moved back to the device after a request loaded their prefix.",),
    "spills_rejected": ("Pins that ended because they could not move to the host.", "reason"),
    "prompt_tokens_encoded": ("Prompt tokens, by whether they were tokenized or cached.", "source"),
    "token_cache_checks": ("Prompts tokenized whole as well, to check the token cache.",),
    "token_cache_disabled": ("Times that the token cache was disabled.", "reason"),
    "host_caches_turned_off": (
        "Times that requests took longer with a cache of the HTTP process, so that it turned off.",
        "cache",
    ),
    "requests_refused": ("Requests without the engine secret, or with a wrong one.", "reason"),
    "secret_reload_failures": ("Changes of the engine secret's file that could not be used.",),
    "event_loop_stall_seconds": ("Time that the HTTP process's event loop stood still.", "clock"),
    "background_failures": (supervision.HELP, "task"),
    "messages_converted": ("Messages, by whether they were converted or cached.", "source"),
}
"""Each counter's help text, and its labels."""

GAUGES: dict[str, tuple[str, ...]] = {
    "build_info": (
        "Versions of sgl-ext and SGLang, and the commit that runs. The value is 1.",
        *("version", "commit", "sglang"),
    ),
    "degraded": (
        "Features of SGLang with which the extension does less: docs/guide/models.md. "
        "The value is 1.",
        "feature",
    ),
    "table_size": ("Entries or bytes in a bounded table.", "table", "unit"),
    "table_limit": (
        "Bound of a table, in entries or bytes; beyond it entries are dropped or rejected.",
        *("table", "unit"),
    ),
    "host_cache_seconds": (
        "Time that requests spent in a cache of the HTTP process (taken), and that the same work"
        " would have taken without it (replaced).",
        *("cache", "work"),
    ),
    "host_cache_off": ("Whether a cache is off, because requests took longer with it.", "cache"),
    "load_share": (
        "What a token costs that is loaded from the host, as a share of one that is computed.",
    ),
    "shared_share": (
        "What a token costs that is read from the shared tier, as a share of one that is computed.",
    ),
    "shared_tier_off": ("Whether the shared tier is off, and why.", "why"),
    "event_subscribers": ("Balancers that read the engine's prefix events.",),
    "engine_memory_bytes": ("Resident memory of the engine's processes, by kind.", "process"),
}
"""Each gauge's help text, and its labels. Of several HTTP processes the largest value counts."""


@cache
def counter(name: str) -> "Counter":
    """The counter `sgl_ext_<name>_total`. Raises KeyError if the table does not have it.

    It is made at its first use, because prometheus_client may be imported only after SGLang has
    set its multiprocess folder, and plugins load before that.
    """
    from prometheus_client import Counter

    text, *labels = COUNTERS[name]
    return Counter(f"sgl_ext_{name}_total", text, labels)


@cache
def gauge(name: str) -> "Gauge":
    """The gauge `sgl_ext_<name>`. Raises KeyError if the table does not have it."""
    from prometheus_client import Gauge

    text, *labels = GAUGES[name]
    return Gauge(f"sgl_ext_{name}", text, labels, multiprocess_mode="max")


def show_counters() -> None:
    """Puts every counter without labels on the page: Prometheus does not see the first increase of
    a series that did not exist before."""
    for name, (_, *labels) in COUNTERS.items():
        if not labels:
            counter(name)


def background_failed(task: str) -> None:
    """Counts an exception of a background task."""
    counter("background_failures").labels(task).inc()
