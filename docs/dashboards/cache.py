"""The dashboard of the cache: how much of prompts is cached, why not more, and what holds it."""

from __future__ import annotations

from docs.dashboards.panels import (
    GREEN,
    RED,
    YELLOW,
    bars,
    dashboard,
    graph,
    row,
    stat,
    thresholds,
)
from docs.dashboards.queries import ENGINE, OURS, VARIABLES, WORKER, quantile, rate, share

_PROMPT = "sgl_ext_prompt_tokens_total"
_CHANGED = OURS + ',kind!="evicted"'
_CACHED = "sgl_ext_reported_cached_tokens_total"
_PREDICTED = "sgl_ext_predicted_cached_tokens_total"
_AHEAD = rate("sgl_ext_prefilled_ahead_tokens_total", ENGINE)
_RIGHT = rate("sgl_ext_next_turns_guessed_total", ENGINE + ',result="right"')
_GOOD = thresholds(RED, (0.5, YELLOW), (0.8, GREEN))

_SHARE = row(
    "Cached share",
    stat(
        "Cached prompt tokens",
        "Share of all prompt tokens that the engines read from their cache.",
        (share(rate(_CACHED, WORKER), rate(_PROMPT, WORKER)), ""),
        unit="percentunit",
        colors=_GOOD,
        width=4,
    ),
    stat(
        "Computed again",
        "Share of all prompt tokens that were computed again because prompts diverged. Needs "
        "--diagnose or --request-log.",
        (share(rate("sgl_ext_diverged_tokens_total", _CHANGED), rate(_PROMPT, WORKER)), ""),
        unit="percentunit",
        colors=thresholds(GREEN, (0.05, YELLOW), (0.1, RED)),
        width=4,
    ),
    stat(
        "Prediction error",
        "Difference between predicted and reported cached tokens, as a share of all prompt tokens.",
        (
            share(rate("sgl_ext_prediction_error_tokens_sum", WORKER), rate(_PROMPT, WORKER)),
            "",
        ),
        unit="percentunit",
        colors=thresholds(GREEN, (0.1, YELLOW), (0.2, RED)),
        width=4,
    ),
    stat(
        "Engines without events",
        "Ready engines that send no prefix events: their cache is not known.",
        (
            f"sum(sgl_ext_worker_ready{{{WORKER}}})"
            f" - sum(sgl_ext_worker_ready{{{WORKER}}} * sgl_ext_worker_subscribed{{{WORKER}}})",
            "",
        ),
        colors=thresholds(GREEN, (1, RED)),
        width=4,
    ),
    stat(
        "Segments",
        "Segments in the prefix index; --index-limit-bytes bounds it.",
        (f"max(sgl_ext_index_segments{{{OURS}}})", ""),
        width=4,
    ),
    stat(
        "Pins",
        "Prefixes that are pinned in the engines now.",
        (f"sum(max by (worker) (sgl_ext_worker_pins{{{WORKER}}}))", ""),
        width=4,
    ),
    graph(
        "Cached share by engine",
        "Share of each engine's prompt tokens that it read from its cache.",
        (
            share(rate(_CACHED, WORKER, by="worker"), rate(_PROMPT, WORKER, by="worker")),
            "{{worker}}",
        ),
        unit="percentunit",
        most=1,
    ),
    graph(
        "Predicted and reported",
        "Cached tokens in a second, as the balancer predicted and as the engines reported.",
        (rate(_PREDICTED, WORKER), "predicted"),
        (rate(_CACHED, WORKER), "reported"),
        (rate(_PROMPT, WORKER), "all prompt tokens"),
        unit="suffix: tok/s",
    ),
    graph(
        "Prediction error, p95",
        "Tokens by which the prediction of a request was wrong, by engine.",
        (quantile("sgl_ext_prediction_error_tokens", 0.95, WORKER, by="worker"), "{{worker}}"),
    ),
    graph(
        "Placements by reason",
        "home and new keep a session on one engine; moved and lost cost its cache.",
        (rate("sgl_ext_placements_total", by="reason"), "{{reason}}"),
        unit="reqps",
        stacked=True,
    ),
    graph(
        "Prefixes awaited",
        "Requests that waited for a prefix that another one computes, in balancer and engines.",
        (rate("sgl_ext_queue_seconds_count", OURS + ',reason="prefix"'), "balancer"),
        (rate("sgl_ext_prefixes_awaited_total", ENGINE), "engines"),
        unit="reqps",
    ),
    graph(
        "Standby prefills",
        "Prompts sent ahead to a second engine because their session's engine was busy.",
        (rate("sgl_ext_standby_prefills_total", by="result"), "{{result}}"),
        unit="reqps",
    ),
)
_DIVERGENCE = row(
    "Where prompts diverge (sgl-ext doctor says where and what to do)",
    graph(
        "Tokens computed again, by kind",
        "Prompt tokens lost in a second, by what differed, or evicted: docs/guide/doctor.md.",
        (rate("sgl_ext_diverged_tokens_total", by="kind"), "{{kind}}"),
        unit="suffix: tok/s",
        stacked=True,
    ),
    graph(
        "Tokens computed again, by harness",
        "The same by the agent that sent the prompts.",
        (rate("sgl_ext_diverged_tokens_total", by="harness"), "{{harness}}"),
        unit="suffix: tok/s",
        stacked=True,
    ),
    graph(
        "Diverged prompts",
        "Prompts in a second that did not begin like an earlier one, and those not compared.",
        (rate("sgl_ext_diverged_prompts_total", by="harness, kind"), "{{harness}}: {{kind}}"),
        (rate("sgl_ext_prompts_not_compared_total", by="reason"), "not compared: {{reason}}"),
        unit="reqps",
    ),
    graph(
        "Session headers stripped",
        "Leading lines of prompts that were removed because they change in each session.",
        (rate("sgl_ext_stripped_headers_total"), "balancer"),
        (rate("sgl_ext_headers_not_stripped_total", ENGINE), "left, in the engines"),
        unit="cps",
        width=12,
    ),
    graph(
        "Marks",
        "Marked blocks whose end was not found, and other vendors' cache hints that are unknown.",
        (rate("sgl_ext_breakpoints_not_found_total", ENGINE, by="path"), "not found: {{path}}"),
        (rate("sgl_ext_cache_hints_ignored_total", ENGINE, by="path"), "hints: {{path}}"),
        unit="cps",
        width=12,
    ),
)
_MEMORY = row(
    "KV cache and pins",
    graph(
        "KV cache by engine",
        "Tokens in each engine's KV cache: in use, evictable and free.",
        (f"sum by (engine) (sglang:kv_used_tokens{{{ENGINE}}})", "{{engine}} used"),
        (f"sum by (engine) (sglang:kv_evictable_tokens{{{ENGINE}}})", "{{engine}} evictable"),
        (f"sum by (engine) (sglang:kv_available_tokens{{{ENGINE}}})", "{{engine}} free"),
    ),
    bars(
        "Pinned",
        "Share of each engine's KV cache that pins hold; --pin-budget bounds it.",
        (
            share(
                f"max by (worker) (sgl_ext_worker_pinned_tokens{{{WORKER}}})",
                f"max by (worker) (sgl_ext_worker_capacity_tokens{{{WORKER}}})",
            ),
            "{{worker}}",
        ),
        unit="percentunit",
        colors=thresholds(GREEN, (0.8, YELLOW), (0.95, RED)),
    ),
    graph(
        "Pins",
        "Prefixes pinned in each engine.",
        (f"max by (worker) (sgl_ext_worker_pins{{{WORKER}}})", "{{worker}}"),
        stacked=True,
    ),
    graph(
        "Marks and pins",
        "Marks that made a pin or renewed one, and reads of pins.",
        (rate("sgl_ext_pins_granted_total", ENGINE), "granted"),
        (rate("sgl_ext_pins_renewed_total", ENGINE), "renewed"),
        (rate("sgl_ext_pins_read_total", ENGINE), "read"),
        unit="cps",
    ),
    graph(
        "Pins ended",
        "expired is as it should be; pressure and displaced end a pin before its time.",
        (rate("sgl_ext_pins_ended_total", ENGINE, by="reason"), "{{reason}}"),
        unit="cps",
    ),
    graph(
        "Pins moved",
        "Between device and host memory, with HiCache; rejected ones ended.",
        (rate("sgl_ext_pins_spilled_total", ENGINE), "spilled"),
        (rate("sgl_ext_pins_loaded_total", ENGINE), "loaded"),
        (rate("sgl_ext_spills_rejected_total", ENGINE, by="reason"), "rejected: {{reason}}"),
        unit="cps",
    ),
    graph(
        "Marks without a pin",
        "Marks that got no pin, by the reason.",
        (rate("sgl_ext_pins_rejected_total", ENGINE, by="reason"), "{{reason}}"),
        unit="cps",
    ),
)
_AHEAD_ROW = row(
    "Prefill ahead",
    graph(
        "Right guesses",
        "Share of the turns that came after a guess and were as guessed.",
        (share(_RIGHT, rate("sgl_ext_next_turns_guessed_total", ENGINE)), "right"),
        unit="percentunit",
        most=1,
    ),
    graph(
        "Tokens ahead",
        "Tokens prefilled while engines were idle: all, those that were used, those in vain.",
        (_AHEAD, "prefilled"),
        (rate("sgl_ext_prefilled_ahead_tokens_used_total", ENGINE), "used"),
        (rate("sgl_ext_prefilled_ahead_tokens_wasted_total", ENGINE), "wasted"),
        unit="suffix: tok/s",
    ),
    graph(
        "Time saved",
        "Seconds of prefill that right guesses saved, in a second.",
        (rate("sgl_ext_prefilled_ahead_saved_seconds_total", ENGINE, by="engine"), "{{engine}}"),
        unit="percentunit",
    ),
    graph(
        "Prompts ahead",
        "Prompts taken to be prefilled ahead, and those that were dropped, by the reason.",
        (rate("sgl_ext_prefills_ahead_total", ENGINE, by="kind"), "{{kind}}"),
        (rate("sgl_ext_prefills_ahead_dropped_total", ENGINE, by="reason"), "dropped: {{reason}}"),
        unit="cps",
        width=12,
    ),
    graph(
        "Turns not guessed",
        "Turns for which a guess was wanted, by why there was none.",
        (rate("sgl_ext_next_turns_not_guessed_total", ENGINE, by="reason"), "{{reason}}"),
        unit="cps",
        width=12,
    ),
    graph(
        "Sessions that return from tools",
        "Sessions that were expected back, by whether their prefix was ready on the device.",
        (rate("sgl_ext_returns_total", ENGINE, by="result"), "{{result}}"),
        unit="cps",
        width=12,
    ),
    graph(
        "Tokens loaded ahead",
        "Tokens loaded from the host ahead of requests, and those that the requests then read.",
        (rate("sgl_ext_loaded_ahead_tokens_total", ENGINE), "loaded"),
        (rate("sgl_ext_loaded_ahead_tokens_used_total", ENGINE), "used"),
        unit="suffix: tok/s",
        width=12,
    ),
    collapsed=True,
)
_EVENTS = row(
    "Prefix events",
    graph(
        "Events",
        "Prefix events received in a second, by engine, over all balancer processes.",
        (rate("sgl_ext_prefix_events_total", WORKER, by="worker"), "{{worker}}"),
        unit="cps",
    ),
    graph(
        "Bandwidth",
        "Bytes of prefix events in a second, by engine.",
        (rate("sgl_ext_prefix_event_bytes_total", WORKER, by="worker"), "{{worker}}"),
        unit="Bps",
    ),
    graph(
        "Faults",
        "Events that were lost or could not be applied; a snapshot corrects the index.",
        (
            rate("sgl_ext_prefix_event_faults_total", WORKER, by="worker, fault"),
            "{{worker}}: {{fault}}",
        ),
        (rate("sgl_ext_event_lines_dropped_total", ENGINE, by="engine"), "{{engine}}: dropped"),
        (rate("sgl_ext_event_lines_unreadable_total", ENGINE, by="engine"), "{{engine}}: wrong"),
        (rate("sgl_ext_slow_event_subscribers_total", ENGINE, by="engine"), "{{engine}}: slow"),
        unit="cps",
    ),
    graph(
        "Prefixes never confirmed",
        "Requests after which the engine never reported that it holds their prefix.",
        (rate("sgl_ext_unconfirmed_prefixes_total"), "unconfirmed"),
        (rate("sgl_ext_unlisted_segments_total"), "not in the shared index"),
        unit="cps",
    ),
    bars(
        "Tables of the engines",
        "Size of engines' bounded tables as a share of their bounds.",
        (
            f'topk(8, max by (table) (sgl_ext_table_size{{{ENGINE},engine!=""}}'
            f' / (sgl_ext_table_limit{{{ENGINE},engine!=""}} > 0)))',
            "{{table}}",
        ),
        unit="percentunit",
        colors=thresholds(GREEN, (0.9, YELLOW)),
    ),
    graph(
        "Tokenization",
        "Share of prompt tokens, and of messages, that the HTTP process had in its cache.",
        (
            share(
                rate("sgl_ext_prompt_tokens_encoded_total", ENGINE + ',source="known"'),
                rate("sgl_ext_prompt_tokens_encoded_total", ENGINE),
            ),
            "tokens",
        ),
        (
            share(
                rate("sgl_ext_messages_converted_total", ENGINE + ',source="known"'),
                rate("sgl_ext_messages_converted_total", ENGINE),
            ),
            "messages",
        ),
        unit="percentunit",
        most=1,
    ),
    collapsed=True,
)

DASHBOARD = dashboard(
    "sgl-ext-cache",
    "How much of prompts is cached, why not more, and what holds the cache.",
    VARIABLES,
    [_SHARE, _DIVERGENCE, _MEMORY, _AHEAD_ROW, _EVENTS],
)
