"""The dashboard of tenants: who uses what, who meets a limit, and who waits."""

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
    variable,
)
from docs.dashboards.queries import ENGINE, OURS, VARIABLES, quantile, rate, share

_TENANT = OURS + ',tenant=~"$tenant"'
_REQUESTS = "sgl_ext_tenant_ttft_seconds_count"


def _of_limit(metric: str, limit: str) -> str:
    """What a tenant used in the last minutes, as a share of a limit."""
    used = f"60 * {rate(metric, _TENANT, by='tenant')}"
    most = f'max by (tenant) (sgl_ext_tenant_limit{{{_TENANT},limit="{limit}"}})'
    return share(used, most)


_NEAR = thresholds(GREEN, (0.8, YELLOW), (1, RED))

_USE = row(
    "Use",
    stat(
        "Tenants",
        "Configured tenants with requests so far; other covers all that are not configured.",
        (f"count(count by (tenant) ({_REQUESTS}{{{_TENANT}}}))", ""),
        width=4,
    ),
    stat(
        "Requests",
        "Generating requests answered in a second.",
        (rate(_REQUESTS, _TENANT), ""),
        unit="reqps",
        width=4,
    ),
    stat(
        "Rejected by a limit",
        "Requests that got a 429 in the last hour.",
        (f"sum(increase(sgl_ext_tenant_rate_limited_total{{{_TENANT}}}[1h])) or vector(0)", ""),
        colors=thresholds(GREEN, (1, YELLOW), (100, RED)),
        width=4,
    ),
    stat(
        "Cached prompt tokens",
        "Share of these tenants' prompt tokens that the engines read from their cache.",
        (
            share(
                rate("sgl_ext_tenant_cached_tokens_total", _TENANT),
                rate("sgl_ext_tenant_prompt_tokens_total", _TENANT),
            ),
            "",
        ),
        unit="percentunit",
        colors=thresholds(RED, (0.5, YELLOW), (0.8, GREEN)),
        width=4,
    ),
    stat(
        "Key file",
        "Changes of the key file in the last day that were wrong, so that earlier keys stay.",
        (f"sum(increase(sgl_ext_key_file_reload_failures_total{{{OURS}}}[1d]))", ""),
        colors=thresholds(GREEN, (1, RED)),
        width=4,
    ),
    stat(
        "Limits without their store",
        "Times in the last day that processes enforced their share of each limit by themselves.",
        (f"sum(increase(sgl_ext_tenant_limit_outages_total{{{OURS}}}[1d]))", ""),
        colors=thresholds(GREEN, (1, YELLOW)),
        width=4,
    ),
    graph(
        "Requests",
        "Generating requests answered in a second.",
        (rate(_REQUESTS, _TENANT, by="tenant"), "{{tenant}}"),
        unit="reqps",
        stacked=True,
    ),
    graph(
        "Prompt tokens",
        "Prompt tokens in a second, cached or not.",
        (rate("sgl_ext_tenant_prompt_tokens_total", _TENANT, by="tenant"), "{{tenant}}"),
        unit="suffix: tok/s",
        stacked=True,
    ),
    graph(
        "Output tokens",
        "Output tokens in a second.",
        (rate("sgl_ext_tenant_output_tokens_total", _TENANT, by="tenant"), "{{tenant}}"),
        unit="suffix: tok/s",
        stacked=True,
    ),
    graph(
        "Cached share",
        "Share of each tenant's prompt tokens that the engines read from their cache.",
        (
            share(
                rate("sgl_ext_tenant_cached_tokens_total", _TENANT, by="tenant"),
                rate("sgl_ext_tenant_prompt_tokens_total", _TENANT, by="tenant"),
            ),
            "{{tenant}}",
        ),
        unit="percentunit",
        most=1,
    ),
    graph(
        "Computed tokens",
        "Prompt tokens that were not cached, and output: what a tenant costs the engines.",
        (
            f"{rate('sgl_ext_tenant_prompt_tokens_total', _TENANT, by='tenant')}"
            f" - {rate('sgl_ext_tenant_cached_tokens_total', _TENANT, by='tenant')}"
            f" + {rate('sgl_ext_tenant_output_tokens_total', _TENANT, by='tenant')}",
            "{{tenant}}",
        ),
        unit="suffix: tok/s",
        stacked=True,
    ),
    graph(
        "Time to first token, p95",
        "95% of each tenant's requests got their first byte within this time.",
        (quantile("sgl_ext_tenant_ttft_seconds", 0.95, _TENANT, by="tenant"), "{{tenant}}"),
        unit="s",
    ),
)
_LIMITS = row(
    "Limits of the key file",
    bars(
        "Requests, of the limit",
        "Admitted requests in a minute as a share of the tenant's limit.",
        (_of_limit("sgl_ext_tenant_requests_total", "requests"), "{{tenant}}"),
        unit="percentunit",
        colors=_NEAR,
    ),
    bars(
        "Tokens, of the limit",
        "Charged tokens in a minute as a share of the tenant's limit.",
        (_of_limit("sgl_ext_tenant_tokens_total", "tokens"), "{{tenant}}"),
        unit="percentunit",
        colors=_NEAR,
    ),
    graph(
        "Rejected by a limit",
        "Requests that got a 429, by tenant and limit.",
        (
            rate("sgl_ext_tenant_rate_limited_total", _TENANT, by="tenant, limit"),
            "{{tenant}} {{limit}}",
        ),
        unit="reqps",
    ),
    graph(
        "Charged tokens",
        "Tokens charged to each tenant in a second: computed prompt tokens and output.",
        (rate("sgl_ext_tenant_tokens_total", _TENANT, by="tenant"), "{{tenant}}"),
        unit="suffix: tok/s",
        stacked=True,
        width=12,
    ),
    graph(
        "Key file",
        "Changes that were applied, that were wrong, and older files found at other balancers.",
        (f"sum(increase(sgl_ext_key_file_reloads_total{{{OURS}}}[1h]))", "applied"),
        (f"sum(increase(sgl_ext_key_file_reload_failures_total{{{OURS}}}[1h]))", "wrong"),
        (f"sum(increase(sgl_ext_key_file_older_total{{{OURS}}}[1h]))", "older"),
        width=12,
    ),
)
_PRIORITIES = row(
    "Priorities, by the lowest of their band",
    graph(
        "Time to first token, p95",
        "By band of priority: -1 is all below 0.",
        (quantile("sgl_ext_priority_ttft_seconds", 0.95, by="priority"), "{{priority}}"),
        unit="s",
    ),
    graph(
        "Waiting for capacity, p95",
        "Of the requests that waited in the admission queue.",
        (quantile("sgl_ext_priority_queue_seconds", 0.95, by="priority"), "{{priority}}"),
        unit="s",
    ),
    graph(
        "Waiting now",
        "Requests in the admission queue.",
        (f"sum by (priority) (sgl_ext_queued_by_priority{{{OURS}}})", "{{priority}}"),
        stacked=True,
    ),
    graph(
        "Requests by band",
        "Requests in a second that got a first byte.",
        (rate("sgl_ext_priority_ttft_seconds_count", by="priority"), "{{priority}}"),
        unit="reqps",
        stacked=True,
    ),
    graph(
        "Promotions by age",
        "Requests that went ahead of their priority because they had waited long.",
        (rate("sgl_ext_promotions_total"), "balancer"),
        (rate("sgl_ext_promotions_total", ENGINE), "engines"),
        unit="reqps",
    ),
    graph(
        "Preempted requests",
        "Requests that an engine interrupted for more important ones.",
        (rate("sgl_ext_preempted_requests_total", ENGINE, by="engine"), "{{engine}}"),
        unit="reqps",
    ),
    graph(
        "Priority clamped",
        "Requests that asked for more priority than their tenant has.",
        (rate("sgl_ext_priority_clamped_total", ENGINE, by="path"), "{{path}}"),
        unit="reqps",
    ),
)

DASHBOARD = dashboard(
    "sgl-ext-tenants",
    "What each configured tenant uses, which limits it meets, and how long it waits.",
    [*VARIABLES, variable("tenant", "Tenant", f"{_REQUESTS}{{{OURS}}}", "tenant")],
    [_USE, _LIMITS, _PRIORITIES],
)
