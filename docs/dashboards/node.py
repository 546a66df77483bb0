"""The dashboard of a node: is it well, how fast is it, what does it lack?"""

from __future__ import annotations

from docs.dashboards.panels import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    RED,
    YELLOW,
    bars,
    dashboard,
    graph,
    heatmap,
    row,
    stat,
    states,
    thresholds,
)
from docs.dashboards.queries import (
    ENGINE,
    GENERATING,
    OURS,
    VARIABLES,
    WORKER,
    quantile,
    quantiles,
    rate,
    share,
)

_STATES = {
    0: ("gone", GREY),
    1: ("ready", GREEN),
    2: ("draining", BLUE),
    3: ("starting", YELLOW),
    4: ("breaker open", ORANGE),
    5: ("hung", RED),
    6: ("secret refused", RED),
    7: ("unreachable", RED),
    8: ("stalled", RED),
}
_STATE = " + ".join(
    f'{value} * max by (worker) (sgl_ext_worker_state{{{WORKER},state="{name}"}})'
    for value, (name, _) in _STATES.items()
    if value
)
_USED = f"sum by (worker) (sgl_ext_worker_used_tokens{{{WORKER}}})"
_CAPACITY = f"sum by (worker) (sgl_ext_worker_capacity_tokens{{{WORKER}}})"
_PINNED = f"max by (worker) (sgl_ext_worker_pinned_tokens{{{WORKER}}})"
_ERRORS = rate("sgl_ext_requests_total", OURS + ',status=~"5.."')
_CACHED = rate("sgl_ext_reported_cached_tokens_total", WORKER)
_PROMPT = rate("sgl_ext_prompt_tokens_total", WORKER)
# Other programs of the same job have these metrics, too, but no number of a process.
_PROCESS = OURS + ',process!=""'
_BAD = thresholds(GREEN, (1e-9, RED))

_OVERVIEW = row(
    "Overview",
    stat(
        "Engines ready",
        "Engines that take requests, of all that the balancer knows.",
        (f"sum(sgl_ext_worker_ready{{{WORKER}}})", "ready"),
        (f"count(sgl_ext_worker_ready{{{WORKER}}})", "known"),
        colors=thresholds(RED, (1, GREEN)),
    ),
    stat(
        "Requests",
        "Requests answered in a second, without health checks.",
        (rate("sgl_ext_requests_total"), ""),
        unit="reqps",
    ),
    stat(
        "Errors",
        "Share of the answers with a status of 500 or more.",
        (f"{share(_ERRORS, rate('sgl_ext_requests_total'))} or vector(0)", ""),
        unit="percentunit",
        colors=thresholds(GREEN, (0.001, YELLOW), (0.01, RED)),
    ),
    stat(
        "TTFT p95",
        "95% of the generating requests got their first byte within this time.",
        (quantile("sgl_ext_ttft_seconds", 0.95, GENERATING), ""),
        unit="s",
        colors=thresholds(GREEN, (1, YELLOW), (5, RED)),
    ),
    stat(
        "Waiting",
        "Requests in the admission queue now.",
        (f"sum(sgl_ext_queued_requests{{{OURS}}})", ""),
        colors=thresholds(GREEN, (1, YELLOW), (100, RED)),
    ),
    stat(
        "Cached prompt tokens",
        "Share of all prompt tokens that the engines read from their cache.",
        (share(_CACHED, _PROMPT), ""),
        unit="percentunit",
        colors=thresholds(RED, (0.5, YELLOW), (0.8, GREEN)),
    ),
    stat(
        "Output",
        "Output tokens in a second.",
        (rate("sgl_ext_output_tokens_total", WORKER), ""),
        unit="suffix: tok/s",
    ),
    stat(
        "Version",
        "sgl-ext and the commit that runs.",
        (
            f"count by (version, commit) (sgl_ext_build_info{{{OURS}}})",
            "{{version}} {{commit}}",
        ),
        shows_name=True,
    ),
    states(
        "Engines",
        "The state of each engine. It gets new requests while it is ready.",
        (_STATE, "{{worker}}"),
        _STATES,
    ),
)
_TRAFFIC = row(
    "Traffic",
    graph(
        "Requests by path",
        "Requests answered in a second.",
        (rate("sgl_ext_requests_total", by="path"), "{{path}}"),
        unit="reqps",
        stacked=True,
    ),
    graph(
        "Answers by status",
        "A 503 or 529 is an overload, a 502 an engine that failed.",
        (rate("sgl_ext_requests_total", by="status"), "{{status}}"),
        unit="reqps",
        stacked=True,
    ),
    graph(
        "Output by engine",
        "Output tokens in a second, of the answers that stated their usage.",
        (rate("sgl_ext_output_tokens_total", WORKER, by="worker"), "{{worker}}"),
        unit="suffix: tok/s",
        stacked=True,
    ),
    graph(
        "Prompt tokens",
        "Prompt tokens in a second: those that were computed, and those read from the cache.",
        (_CACHED, "cached"),
        (f"{_PROMPT} - {_CACHED}", "computed"),
        unit="suffix: tok/s",
        stacked=True,
    ),
    graph(
        "Requests in flight by engine",
        "Requests that each engine is answering.",
        (f"sum by (worker) (sgl_ext_worker_in_flight{{{WORKER}}})", "{{worker}}"),
        stacked=True,
    ),
    graph(
        "Placements by reason",
        "Why requests went where they went: docs/how/routing.md.",
        (rate("sgl_ext_placements_total", by="reason"), "{{reason}}"),
        unit="reqps",
        stacked=True,
    ),
)
_LATENCY = row(
    "Latency",
    graph(
        "Time to first token",
        "From a request's arrival to the first byte of its answer, with the time in the queue.",
        *quantiles("sgl_ext_ttft_seconds", GENERATING),
        unit="s",
    ),
    graph(
        "Time between tokens",
        "Mean over each stream: its time after the first byte by its tokens after the first.",
        *quantiles("sgl_ext_inter_token_seconds"),
        unit="s",
    ),
    graph(
        "Whole answers",
        "From a request's arrival to the end of its answer. Long answers take long.",
        *quantiles("sgl_ext_request_seconds", GENERATING),
        unit="s",
    ),
    heatmap(
        "Time to first token",
        "How the times to the first token spread.",
        rate("sgl_ext_ttft_seconds_bucket", GENERATING, by="le"),
        unit="s",
    ),
    graph(
        "Waiting before an engine, p95",
        "Only requests that waited count: for capacity, or for a prefix that another one computes.",
        (quantile("sgl_ext_queue_seconds", 0.95, by="reason"), "{{reason}}"),
        unit="s",
        width=12,
    ),
)
_LOAD = row(
    "Load",
    graph(
        "Admission queue",
        "Requests that wait in the balancer because no engine has capacity.",
        (f"sum by (instance) (sgl_ext_queued_requests{{{OURS}}})", "{{instance}}"),
    ),
    graph(
        "KV cache in use",
        "Share of each engine's KV cache that cannot be evicted: running requests and pins.",
        (share(_USED, _CAPACITY), "{{worker}}"),
        unit="percentunit",
        most=1,
        marks=thresholds(GREEN, (0.9, RED)),
    ),
    graph(
        "KV cache pinned",
        "Share of each engine's KV cache that pins hold; --pin-budget bounds it.",
        (share(_PINNED, _CAPACITY), "{{worker}}"),
        unit="percentunit",
        most=1,
    ),
    graph(
        "Prompt tokens to compute",
        "Estimate of what each engine still has to prefill.",
        (f"sum by (worker) (sgl_ext_worker_pending_tokens{{{WORKER}}})", "{{worker}}"),
    ),
    graph(
        "Running in the engines",
        "Requests that each engine's scheduler runs; queued are those that wait inside it.",
        (f"max by (worker) (sgl_ext_worker_running_requests{{{WORKER}}})", "{{worker}} running"),
        (f"max by (worker) (sgl_ext_worker_queued_requests{{{WORKER}}})", "{{worker}} queued"),
    ),
    bars(
        "Fullest tables",
        "Size of bounded tables as a share of their bounds. "
        "docs/reference/limits.md says what each drops.",
        (
            f"topk(8, max by (table) (sgl_ext_table_size{{{OURS}}}"
            f" / (sgl_ext_table_limit{{{OURS}}} > 0)))",
            "{{table}}",
        ),
        unit="percentunit",
        colors=thresholds(GREEN, (0.8, YELLOW), (0.95, RED)),
    ),
)
_FAILURES = row(
    "Failures",
    graph(
        "Rejected requests",
        "Requests rejected in a second, by cause. A 429 of a tenant is on its own dashboard.",
        (rate("sgl_ext_requests_rejected_total"), "queue full or waited too long"),
        (rate("sgl_ext_bodies_rejected_total"), "byte budget"),
        (rate("sgl_ext_connections_rejected_total"), "connections"),
        unit="reqps",
        marks=_BAD,
    ),
    graph(
        "Engines' failures",
        "What engines did to requests: a retry costs time, a cut stream an answer.",
        (rate("sgl_ext_retries_total"), "retried elsewhere"),
        (rate("sgl_ext_cut_streams_total"), "streams cut"),
        (rate("sgl_ext_retries_rejected_total"), "over the retry budget"),
        (rate("sgl_ext_worker_outages_total"), "engine became unready"),
        unit="cps",
    ),
    graph(
        "Clients that left",
        "Requests whose client disconnected before the answer ended.",
        (rate("sgl_ext_client_disconnects_total"), "disconnects"),
        unit="reqps",
    ),
    graph(
        "Background failures",
        "Tasks that failed and go on, of the balancer and the engines; their logs say why.",
        (rate("sgl_ext_background_failures_total", by="task"), "{{task}}"),
        (rate("sgl_ext_background_failures_total", ENGINE, by="task"), "engine: {{task}}"),
        unit="cps",
    ),
    graph(
        "Store",
        "Reads, writes, evictions and failures of stored responses and contexts.",
        (rate("sgl_ext_store_events_total", by="event"), "{{event}}"),
        unit="cps",
    ),
    graph(
        "Lost records",
        "What was dropped so that no answer waits: lines of the request log, peers' messages, "
        "engines' metrics.",
        (rate("sgl_ext_request_log_dropped_lines_total"), "request log"),
        (rate("sgl_ext_peer_message_faults_total", by="fault"), "peers: {{fault}}"),
        (rate("sgl_ext_engine_scrape_failures_total", by="reason"), "engines: {{reason}}"),
        unit="cps",
    ),
)
_BALANCER = row(
    "Balancer",
    graph(
        "CPU",
        "Cores that each balancer process uses; one process uses one at most.",
        (
            rate("process_cpu_seconds_total", _PROCESS, by="instance, process"),
            "{{instance}} {{process}}",
        ),
        marks=thresholds(GREEN, (0.9, RED)),
    ),
    graph(
        "Memory",
        "Resident memory of each balancer process.",
        (f'process_resident_memory_bytes{{{OURS},process!=""}}', "{{instance}} {{process}}"),
        unit="bytes",
    ),
    graph(
        "Event loop stalls",
        "Share of the time that the loop stood still. wall without cpu: the machine is busy.",
        (rate("sgl_ext_event_loop_stall_seconds_sum", by="clock"), "{{clock}}"),
        unit="percentunit",
    ),
    graph(
        "Connections",
        "Connections of clients, and live streams of the page.",
        (f"sum(sgl_ext_connections{{{OURS}}})", "connections"),
        (f"sum(sgl_ext_live_streams{{{OURS}}})", "live streams"),
    ),
    graph(
        "Bytes held",
        "Bodies and answers that the byte budget counts.",
        (f"sum(sgl_ext_held_bytes{{{OURS}}})", "held"),
        unit="bytes",
    ),
    graph(
        "Prefix events received",
        "Bandwidth of prefix events by engine, over all balancer processes.",
        (rate("sgl_ext_prefix_event_bytes_total", WORKER, by="worker"), "{{worker}}"),
        unit="Bps",
    ),
    graph(
        "Uptime",
        "How long each balancer process has run. A fall is a restart.",
        (f'time() - process_start_time_seconds{{{OURS},process!=""}}', "{{instance}} {{process}}"),
        unit="s",
    ),
    graph(
        "Open files",
        "Open file descriptors of each balancer process, as a share of its limit.",
        (
            f"process_open_fds{{{_PROCESS}}} / process_max_fds{{{_PROCESS}}}",
            "{{instance}} {{process}}",
        ),
        unit="percentunit",
        most=1,
        marks=thresholds(GREEN, (0.8, RED)),
    ),
    graph(
        "Engines that come and go",
        "Engines that joined or left in an hour, and how often the launcher started each again.",
        (f"sum(increase(sgl_ext_workers_joined_total{{{OURS}}}[1h]))", "joined"),
        (f"sum(increase(sgl_ext_workers_left_total{{{OURS}}}[1h]))", "left"),
        (
            'sum by (child) (increase(sgl_ext_child_restarts_total{instance=~"$instance"}[1h]))',
            "{{child}} started again",
        ),
    ),
    collapsed=True,
)
_ENGINES = row(
    "Engines, from /metrics/engines",
    states(
        "Metrics read",
        "Whether the balancer can read each engine's metrics.",
        (f"max by (engine) (sgl_ext_engine_up{{{ENGINE}}})", "{{engine}}"),
        {0: ("no", RED), 1: ("yes", GREEN)},
    ),
    graph(
        "Generation",
        "Tokens that each engine generates in a second, as SGLang measures it.",
        (f"sum by (engine) (sglang:gen_throughput{{{ENGINE}}})", "{{engine}}"),
        unit="suffix: tok/s",
    ),
    graph(
        "Memory by process",
        "Resident memory of an engine's processes on the host, without GPU memory.",
        (
            f"sum by (engine, process) (sgl_ext_engine_memory_bytes{{{ENGINE}}} > 0)",
            "{{engine}} {{process}}",
        ),
        unit="bytes",
        stacked=True,
    ),
    graph(
        "HTTP process's loop stalls",
        "Share of the time that the event loop of an engine's HTTP process stood still.",
        (
            rate("sgl_ext_event_loop_stall_seconds_total", ENGINE + ',clock="wall"', by="engine"),
            "{{engine}}",
        ),
        unit="percentunit",
    ),
    graph(
        "Preemptions",
        "Requests that gave way to more important ones, and tokens computed again for them.",
        (rate("sgl_ext_preempted_requests_total", ENGINE, by="engine"), "{{engine}} requests"),
        (rate("sgl_ext_recomputed_tokens_total", ENGINE, by="engine"), "{{engine}} tokens"),
        unit="cps",
    ),
    graph(
        "Requests refused",
        "Requests without the engine secret, or with a wrong one.",
        (rate("sgl_ext_requests_refused_total", ENGINE, by="reason"), "{{reason}}"),
        unit="reqps",
    ),
    graph(
        "Subscribers",
        "Balancer processes that read each engine's prefix events.",
        (f"sum by (engine) (sgl_ext_event_subscribers{{{ENGINE}}})", "{{engine}}"),
    ),
    collapsed=True,
)

DASHBOARD = dashboard(
    "sgl-ext-node",
    "The health, the speed and the load of nodes: balancers and their engines.",
    VARIABLES,
    [_OVERVIEW, _TRAFFIC, _LATENCY, _LOAD, _FAILURES, _BALANCER, _ENGINES],
)
