"""The balancer's metrics: names, labels and HELP texts. docs/reference/metrics.md lists them."""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from typing import Any, Protocol

from prometheus_client.core import GaugeMetricFamily, Metric

from scheduler.breaker import Breaker, State
from scheduler.speeds import Weights
from sgl_ext import supervision
from sgl_ext.balancer.metrics.instruments import Counter, Histogram, Page
from sgl_ext.prompts.heads import NEW_VERSION
from sgl_ext.reading.client import HARNESSES, ClientFacts
from sgl_ext.reading.usage import Usage
from sgl_ext.version import versions

_TOKENS = (0, 16, 64, 256, 1024, 4096, 16384, 65536)
_ANSWERS_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120, 300, 600, 1800)
_BETWEEN_TOKENS_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1)
STALLS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
# A band of priorities begins at each of these and ends before the next one.
_BANDS = (0, 1, 10)
BANDS = tuple(map(str, (-1, *_BANDS)))
"""The labels of all bands."""


def band(priority: int) -> str:
    """The band of a priority: the lowest priority in it, or "-1" for all below 0."""
    return BANDS[bisect_right(_BANDS, priority)]


class Metrics(Page):
    """One balancer process's metrics."""

    def __init__(self, process: int = 0) -> None:
        """process: the number of this process among those of its balancer."""
        super().__init__(process)
        counter, histogram, gauge = self._counter, self._histogram, self._gauge
        build = gauge(
            "build_info{version,commit,sglang}",
            "Versions of sgl-ext and SGLang, and the commit that runs. The value is 1.",
        )
        build.labels(*(found or "" for found in versions())).set(1)
        self.draining = gauge(
            "draining", "Whether the balancer drains: it rejects new requests and then ends."
        )
        self.requests = counter(
            "requests{path,status}",
            "Requests answered, by path and HTTP status. Health checks are not counted.",
        )
        self.ttft_s = histogram(
            "ttft_seconds{path}",
            "Time from a request's arrival to the first byte of its answer, by path.",
        )
        self.request_s = histogram(
            "request_seconds{path}",
            "Time from a request's arrival to the end of its answer, by path, "
            "for answers that were complete.",
            _ANSWERS_S,
        )
        self.between_tokens_s = histogram(
            "inter_token_seconds{path}",
            "Mean time between the tokens of a stream, by path: from its first byte to its end, "
            "divided by its output tokens less one. Only streams that state their usage count.",
            _BETWEEN_TOKENS_S,
        )
        self.output_tokens = counter(
            "output_tokens{worker}", "Output tokens of the answers that stated their usage."
        )
        self.answers_without_usage = counter(
            "answers_without_usage{path}",
            "Complete answers that stated no usage, so that their tokens are not counted.",
        )
        self.priority_ttft_s = histogram(
            "priority_ttft_seconds{priority}",
            "Time from a request's arrival to the first byte of its answer, "
            "by the lowest priority of its band.",
        )
        self.queue_s = histogram(
            "queue_seconds{reason}",
            "Time that requests waited before they were sent to a worker, "
            "for capacity or for a prefix that another request computes.",
        )
        self.priority_queue_s = histogram(
            "priority_queue_seconds{priority}",
            "Time that requests waited for capacity, by the lowest priority of their band.",
        )
        self.queued_requests = gauge("queued_requests", "Requests in the admission queue.")
        self.held_requests = gauge(
            "held_requests",
            "Requests in the admission queue that are held back until their agents fit.",
        )
        self.held_s = histogram(
            "held_seconds{priority}",
            "Time that requests were held back until their agents fit, by the lowest priority of "
            "their band.",
        )
        self.queued_by_priority = gauge(
            "queued_by_priority{priority}",
            "Requests in the admission queue, by the lowest priority of their band.",
        )
        self.promotions = counter(
            "promotions",
            "Requests that left the queue after they had waited for aging-s or longer.",
        )
        self.requests_rejected = counter(
            "requests_rejected",
            "Requests rejected because the queue was full or they waited too long.",
        )
        self.model_fallbacks = counter(
            "model_fallbacks{model,fallback}",
            "Requests that another model's engines took, as their own model had none that was "
            "ready.",
        )
        self.failed_requests = counter(
            "failed_requests{reason}",
            "Requests refused (429, 5xx), failed or cut, by reason.",
        )
        self.placements = counter(
            "placements{reason}", "Requests sent to a worker, by the reason for its choice."
        )
        self.retries = counter(
            "retries", "Requests sent to another worker because an earlier one failed."
        )
        self.suspect_requests = counter(
            "suspect_requests{result}",
            "Requests suspected to have ended an engine, cleared or convicted of it, and refused "
            "because such a request had been convicted.",
        )
        self.suspect_requests.counts[("convicted",)] = 0  # as for the store's failures
        self.requests_on_trial = gauge(
            "requests_on_trial",
            "Requests that may have ended an engine, and wait until each is sent again alone.",
        )
        self.retries_rejected = counter(
            "retries_rejected",
            "Engines' 503 answers passed on because the retry budget was empty.",
        )
        self.cut_streams = counter(
            "cut_streams", "Streams that a worker cut after the first byte was sent to the client."
        )
        self.resent_requests = counter(
            "resent_requests",
            "Requests that took over the copy that their client had sent before.",
        )
        self.heartbeats = counter(
            "heartbeats", "Pings and comments sent to clients whose answer had not begun."
        )
        self.client_disconnects = counter(
            "client_disconnects", "Requests whose client disconnected before the answer ended."
        )
        self.stripped_headers = counter(
            "stripped_headers", "Session headers found at the beginning of prompts."
        )
        self.standby_prefills = counter(
            "standby_prefills{result}",
            "Prompts sent ahead to a second worker because their session's worker was busy.",
        )
        self.store_events = counter(
            "store_events{event}",
            "Reads, writes, evictions and failures of the store of responses and contexts.",
        )
        self.contexts_made = counter(
            "contexts_made{result}",
            "Requests that asked for a context of what their cache marks cover, by the result.",
        )
        self.saved_bytes = counter(
            "saved_bytes",
            "Bytes that clients did not have to send because requests named what is stored: "
            "a context or earlier turns.",
        )
        # Prometheus does not see the first increase of a series that did not exist before.
        self.store_events.counts[("failed",)] = 0
        self.tenant_requests = counter(
            "tenant_requests{tenant}", "Requests admitted within the tenant's rate limits."
        )
        self.tenant_rate_limited = counter(
            "tenant_rate_limited{tenant,limit}",
            "Requests rejected because the tenant was over a rate limit.",
        )
        self.tenant_tokens = counter(
            "tenant_tokens{tenant}",
            "Tokens charged to the tenant: prompt tokens that were computed, and output tokens.",
        )
        self.tenant_limit = gauge(
            "tenant_limit{tenant,limit}", "Requests or tokens that the tenant may use in a minute."
        )
        self.tenant_ttft_s = histogram(
            "tenant_ttft_seconds{tenant}",
            "Time from a request's arrival to the first byte of its answer, by configured tenant.",
        )
        self.tenant_prompt_tokens = counter(
            "tenant_prompt_tokens{tenant}",
            "Prompt tokens of a configured tenant's answered requests, as the engines reported.",
        )
        self.tenant_cached_tokens = counter(
            "tenant_cached_tokens{tenant}",
            "Prompt tokens of a configured tenant that engines read from their cache.",
        )
        self.tenant_output_tokens = counter(
            "tenant_output_tokens{tenant}", "Output tokens of a configured tenant's requests."
        )
        self.limit_outages = counter(
            "tenant_limit_outages",
            "Times that the store of the tenants' limits failed, so that this process enforced "
            "its share of each limit.",
        )
        self.prompt_tokens = counter(
            "prompt_tokens{worker}",
            "Prompt tokens of the requests whose worker reported its cached tokens.",
        )
        self.reported_tokens = counter(
            "reported_cached_tokens{worker}",
            "Prompt tokens that workers reported as read from their cache.",
        )
        self.predicted_tokens = counter(
            "predicted_cached_tokens{worker}",
            "Prompt tokens that the balancer predicted to be cached, "
            "for the requests whose worker reported its cached tokens.",
        )
        self.prediction_error_tokens = histogram(
            "prediction_error_tokens{worker}",
            "Difference between the predicted and the reported cached tokens of a request.",
            _TOKENS,
        )
        self.clients = ClientMetrics(counter, histogram)
        self.diverged_prompts = counter(
            "diverged_prompts{harness,kind}",
            "Prompts that did not begin like an earlier prompt of their session or fleet, and "
            "those whose earlier prompt was evicted. new_version: a new version of a client moves "
            "a byte early in the prompt.",
        )
        for harness in HARNESSES:  # as for the store's failures
            self.diverged_prompts.counts[harness, NEW_VERSION] = 0
        self.diverged_tokens = counter(
            "diverged_tokens{harness,kind}",
            "Prompt tokens that had to be computed again because prompts diverged, by estimate, "
            "or because they were evicted.",
        )
        self.cache_diagnoses = counter(
            "cache_diagnoses{reason}",
            "Answers that said why the cache missed, by the reason; none if it did not.",
        )
        self.prompts_not_compared = counter(
            "prompts_not_compared{reason}",
            "Prompts that were not compared with earlier ones, by the reason.",
        )
        self.prefix_events = counter(
            "prefix_events{worker}", "Prefix events received from engines."
        )
        self.prefix_event_bytes = counter(
            "prefix_event_bytes{worker}", "Bytes of prefix events received from engines."
        )
        self.prefix_event_faults = counter(
            "prefix_event_faults{worker,fault}",
            "Prefix events from engines that could not be applied to the index.",
        )
        self.index_segments = gauge("index_segments", "Segments in the prefix index.")
        self.unlisted_segments = counter(
            "unlisted_segments",
            "Times that the prefix index could not take a segment, or show all of its workers to "
            "the processes that share it.",
        )
        self.unconfirmed_prefixes = counter(
            "unconfirmed_prefixes",
            "Requests after which the engine never reported that it holds their prefix.",
        )
        self.workers_joined = counter(
            "workers_joined", "Engines that joined. An engine that was started again joins again."
        )
        self.workers_left = counter("workers_left", "Engines that left, for whatever reason.")
        self.worker_outages = counter(
            "worker_outages", "Times that an engine that was ready became unready."
        )
        self.engine_scrape_failures = counter(
            "engine_scrape_failures{reason}",
            "Engines' metrics that /metrics/engines had to leave out, by the reason.",
        )
        self.membership_faults = counter(
            "membership_faults{source}",
            "Times that a source of workers could not be read, so that its last list stays.",
        )
        self.settings_reloads = counter(
            "settings_reloads", "Changes of settings applied without a restart."
        )
        self.settings_reload_failures = counter(
            "settings_reload_failures", "Reloads of settings that were wrong; they change nothing."
        )
        self.engine_settings_failures = counter(
            "engine_settings_failures", "Times that an engine did not take reloaded settings."
        )
        self.peer_message_faults = counter(
            "peer_message_faults{fault}",
            "Messages between the balancer's processes that were lost or unreadable.",
        )
        self.identities_replaced = counter(
            "identities_replaced{header}",
            "Request ids and trace headers of clients that were invalid and were replaced.",
        )
        self.spans = counter(
            "spans{result}",
            "Spans of requests that the collector took, or that were dropped because the queue was "
            "full or the collector failed.",
        )
        self.request_log_dropped_lines = counter(
            "request_log_dropped_lines",
            "Lines of the request log dropped because they could not be written in time.",
        )
        self.bodies_rejected = counter(
            "bodies_rejected",
            "Bodies and heads rejected because the byte budget was used up.",
        )
        self.held_bytes = gauge(
            "held_bytes", "Bytes of bodies and answers that the byte budget counts now."
        )
        self.connections_rejected = counter(
            "connections_rejected", "Connections closed because there were too many."
        )
        self.connections = gauge("connections", "Connections of clients that are open now.")
        self.sockets = gauge("websockets", "WebSockets of clients that are open now.")
        self.sockets_closed = counter(
            "websockets_closed{reason}", "WebSockets that the balancer ended, by the reason."
        )
        self.socket_turns_forgotten = counter(
            "websocket_turns_forgotten",
            "Times that a WebSocket's remembered turns were dropped because they were too large.",
        )
        self.gateway_streams = gauge(
            "gateway_streams", "Requests for which a gateway has a stream to the endpoint picker."
        )
        self.gateway_faults = counter(
            "gateway_faults{fault}",
            "What went wrong between a gateway and the endpoint picker: no answer, a "
            "configuration that cannot be served, unexpected and unsent messages, an unreadable "
            "answer.",
        )
        self.stall_s = histogram(
            "event_loop_stall_seconds{clock}",
            "Time that the event loop stood still, by the wall clock, "
            "and how much of it the loop's own thread computed.",
            STALLS_S,
        )
        self.live_streams = gauge("live_streams", "Live streams of the state that are open now.")
        self.live_streams_dropped = counter(
            "live_streams_dropped{reason}",
            "Live streams of the state refused because there were too many, "
            "or ended because their client read too slowly.",
        )
        self.file_reloads = counter(
            "file_reloads{file,result}",
            "Changes of the key file, the engine secret's and the certificate's files, by whether "
            "they were applied, or refused because a file was unreadable or wrong.",
        )
        self.key_file_older = counter(
            "key_file_older",
            "Times that another balancer was found to read a newer key file than this one.",
        )
        self.tls_handshakes_failed = counter(
            "tls_handshakes_failed{reason}",
            "Connections that ended before their TLS handshake did: faulty, plain HTTP, too slow, "
            "or displaced by newer ones.",
        )
        self.certificate_expiry = gauge(
            "tls_certificate_expiry_timestamp_seconds",
            "When the certificate of tls-cert ends, as a Unix time; 0 without TLS.",
        )
        self.run_folder_free_bytes = gauge(
            "run_folder_free_bytes", "Free bytes of the disk with the node's run folder."
        )
        self.run_folder_bytes = gauge(
            "run_folder_bytes", "Bytes of the disk with the node's run folder."
        )
        self.background_failures = counter("background_failures{task}", supervision.HELP)

    def background_failed(self, task: str) -> None:
        """Counts an exception of a background task."""
        self.background_failures.counts[(task,)] += 1

    def socket_closed(self, reason: str) -> None:
        """Counts a WebSocket that the balancer ended."""
        self.sockets_closed.counts[(reason,)] += 1

    def gateway_fault(self, fault: str) -> None:
        """Counts what went wrong between a gateway and the endpoint picker."""
        self.gateway_faults.counts[(fault,)] += 1

    def store_failed(self, _: str) -> None:
        """Counts a read or write of the store of responses and contexts that failed."""
        self.store_events.counts[("failed",)] += 1


_UNSTATED, _MCP, _OTHER = "unstated", "mcp", "other"
# Claude Code's agents and Codex's. People name theirs as they like: other types are one label.
_AGENT_TYPES = (
    *("Explore", "Plan", "claude", "custom", "general-purpose", "statusline-setup", "teammate"),
    *("memory_consolidation", "review", "thread_spawn"),
)
_TOOLS = frozenset(
    ("Agent", "Bash", "Edit", "Glob", "Grep", "Read", "Skill", "WebFetch", "WebSearch", "Write")
)
_TOOLS_S = (0.01, 0.1, 0.5, 1, 5, 15, 60, 300, 900, 3600)


class ClientMetrics:
    """Requests and cached tokens by class of request, and the time that tools take."""

    def __init__(
        self, counter: Callable[..., Counter], histogram: Callable[..., Histogram]
    ) -> None:
        self._requests = counter(
            "client_requests{harness,class,agent}",
            "Answered requests, by the agent program, what it sent them for, and its kind of "
            "sub-agent, as far as it states these.",
        )
        self._prompt_tokens = counter(
            "client_prompt_tokens{harness,class}",
            "Prompt tokens of the requests whose worker reported its cached tokens, by agent "
            "program and class of request.",
        )
        self._cached_tokens = counter(
            "client_cached_tokens{harness,class}",
            "Prompt tokens that workers read from their cache, by agent program and class of "
            "request.",
        )
        self._tool_s = histogram(
            "client_tool_seconds{tool}",
            "Time for which clients ran a tool before they sent its result, as they state it.",
            _TOOLS_S,
        )
        self.hints_ignored = counter(
            "client_hints_ignored{hint}",
            "Headers and fields about the client that were malformed or unknown, and were ignored.",
        )
        self.volatile_lines = counter(
            "volatile_lines{kind}",
            "Volatile lines found in system texts: moved to the first user message, or kept.",
        )

    def count(self, facts: ClientFacts, prompt_tokens: int, usage: Usage | None) -> None:
        """Counts an answered request. prompt_tokens: an estimate, if the usage has none."""
        request_class = facts.request_class or _UNSTATED
        agent = facts.agent_type and agent_label(facts.agent_type)
        self._requests.counts[facts.harness, request_class, agent] += 1
        if usage is not None and usage.cached_tokens is not None:
            prompt_tokens = usage.prompt_tokens or prompt_tokens
            self._prompt_tokens.counts[facts.harness, request_class] += prompt_tokens
            self._cached_tokens.counts[facts.harness, request_class] += usage.cached_tokens
        for tool, duration_ms in facts.prev_tool_durations_ms:
            self._tool_s.observe(tool_label(tool), duration_ms / 1e3)


def agent_label(agent_type: str) -> str:
    """A kind of sub-agent as a label; "" if there is none."""
    return agent_type if agent_type in _AGENT_TYPES else agent_type and _OTHER


def tool_label(tool: str) -> str:
    """A tool of an agent program as a label."""
    if tool in _TOOLS:
        return tool
    return _MCP if tool.startswith("mcp__") else _OTHER


class ShownWorker(Protocol):
    """What is shown of a worker."""

    ready: bool
    draining: bool
    refuses_secret: bool
    publishes: bool
    breaker: Breaker
    in_flight: int
    pinned_tokens: int
    weights: Weights
    report: Mapping[str, Any]

    @property
    def pins(self) -> Sized: ...
    @property
    def state(self) -> str: ...
    def total_pending_tokens(self, now_s: float) -> int: ...


# Each metric of a worker: its help text and its value at a time.
_GAUGES: dict[str, tuple[str, Callable[[ShownWorker, float], float]]] = {
    "ready": ("Whether the worker is ready for requests.", lambda worker, now_s: worker.ready),
    "draining": (
        "Whether the worker drains: it gets no new requests and leaves after its last one.",
        lambda worker, now_s: worker.draining,
    ),
    "secret_refused": (
        "Whether the worker refuses the engine secret of this balancer.",
        lambda worker, now_s: worker.refuses_secret,
    ),
    "breaker_open": (
        "Whether the worker's circuit breaker is open.",
        lambda worker, now_s: worker.breaker.state is State.OPEN,
    ),
    "in_flight": (
        "Requests that the worker is answering for this balancer.",
        lambda worker, now_s: worker.in_flight,
    ),
    "pending_tokens": (
        "Estimate of the prompt tokens that the worker still has to compute.",
        lambda worker, now_s: worker.total_pending_tokens(now_s),
    ),
    "pinned_tokens": (
        "Tokens of the prefixes that are pinned in the worker's cache.",
        lambda worker, now_s: worker.pinned_tokens,
    ),
    "pins": (
        "Prefixes that are pinned in the worker's cache.",
        lambda worker, now_s: len(worker.pins),
    ),
    "prefill_weight": (
        "What a token of prefill costs there, 1 on the usual engine; learned from requests.",
        lambda worker, now_s: worker.weights.prefill,
    ),
    "decode_weight": (
        "What a decoded token costs there, 1 on the usual engine; learned from requests.",
        lambda worker, now_s: worker.weights.decode,
    ),
    "subscribed": (
        "Whether the worker publishes the prefixes that it holds. Without them it is routed to by "
        "what this balancer sent there.",
        lambda worker, now_s: worker.publishes,
    ),
}
# Each metric that an engine reports of itself: its help text, and its name in the report.
_REPORTED = {
    "running_requests": ("Requests that the worker's scheduler runs, of all balancers.", "running"),
    "queued_requests": ("Requests that wait in the worker's own queue.", "queued"),
    "used_tokens": (
        "Tokens in the worker's KV cache that cannot be evicted: of running requests, and pinned.",
        "used_tokens",
    ),
    "capacity_tokens": ("Tokens that fit into the worker's KV cache.", "capacity_tokens"),
}


def gauges(
    workers: Mapping[str, ShownWorker], states: Sequence[str], now_s: float
) -> Iterator[Metric]:
    """All gauges of these workers, by their ids. states: those that a worker can be in."""
    for gauge, (help_text, value) in _GAUGES.items():
        family = GaugeMetricFamily(f"sgl_ext_worker_{gauge}", help_text, labels=["worker"])
        for name, worker in workers.items():
            family.add_metric([name], value(worker, now_s))
        yield family
    for gauge, (help_text, field) in _REPORTED.items():
        family = GaugeMetricFamily(f"sgl_ext_worker_{gauge}", help_text, labels=["worker"])
        for name, worker in workers.items():
            if field in worker.report:
                family.add_metric([name], worker.report[field])
        yield family
    text = "Whether this is the worker's state; it gets new requests in the state ready alone."
    labels = ["worker", "state"]
    family = GaugeMetricFamily("sgl_ext_worker_state", text, labels=labels)
    for name, worker in workers.items():
        for state in states:
            family.add_metric([name, state], worker.state == state)
    yield family
