"""What an answered request adds to the metrics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from scheduler.placement import Placement
from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.balancer.reporting.activity import Activity
from sgl_ext.balancer.reporting.request_log import (
    Course,
    End,
    Finding,
    Name,
    Outcome,
    RequestLog,
    ended_request,
)
from sgl_ext.balancer.routing.routing_request import NO_ROUTING, RoutingRequest
from sgl_ext.balancer.routing.worker import Attempt
from sgl_ext.reading.client import NO_FACTS, ClientFacts
from sgl_ext.reading.segments import Chain
from sgl_ext.reading.usage import Usage
from tests.balancer.workers import workers_at

A = "http://a"
PATH = "/v1/messages"


def lines_for(
    *answers: dict[str, Any],
    tenant: str = "",
    label: Callable[[str], str | None] = lambda tenant: None,
    routing: RoutingRequest | None = None,
) -> set[str]:
    """The lines of the page after these answers, each of which differs as it says from one of 2 s
    whose first byte came after half a second."""
    metrics = Metrics()
    log = RequestLog(metrics, Activity(0.0), None, tenant_label=label)
    worker = workers_at([A], metrics).all[0]
    routing = routing or RoutingRequest(Chain(), None, 0, 100, tenant=tenant)
    attempt = Attempt(routing, worker, worker, Placement(worker.id, "new"))
    for answer in answers:
        usual: dict[str, Any] = {
            "route": PATH,
            "status": 200,
            "usage": Usage(100, 90, 26),
            "streams": True,
            "facts": NO_FACTS,
        }
        about = usual | answer
        ended = ended_request(
            Name("id", "0" * 32, about["route"]),
            End(1.0, about["status"], Outcome.COMPLETE, None, about["usage"]),
            Course(0.0, 0.5, 2.0, 1),
            routing,
            attempt,
            Finding(None, about["facts"]),
        )
        log.count(ended, attempt, streams=about["streams"])
    return set(metrics.render().decode().splitlines())


def test_a_stream_counts_its_output_and_the_time_between_its_tokens() -> None:
    lines = lines_for({}, {"streams": False})
    assert f'sgl_ext_output_tokens_total{{worker="{A}"}} 32.0' in lines
    assert f'sgl_ext_inter_token_seconds_sum{{path="{PATH}"}} 0.1' in lines
    assert f'sgl_ext_inter_token_seconds_count{{path="{PATH}"}} 1.0' in lines
    assert f'sgl_ext_request_seconds_sum{{path="{PATH}"}} 4.0' in lines


def test_one_token_has_no_time_between_tokens() -> None:
    lines = lines_for({"usage": Usage(100, 90, 11)})
    assert f'sgl_ext_output_tokens_total{{worker="{A}"}} 1.0' in lines
    assert not any(line.startswith("sgl_ext_inter_token_seconds_count") for line in lines)


def test_answers_without_usage_are_counted_unless_they_are_errors() -> None:
    lines = lines_for({"usage": None}, {"usage": None, "status": 400})
    assert f'sgl_ext_answers_without_usage_total{{path="{PATH}"}} 1.0' in lines
    assert not any(line.startswith("sgl_ext_output_tokens_total") for line in lines)


def test_requests_that_generate_nothing_have_no_tokens() -> None:
    lines = lines_for({"usage": None, "route": "/tokenize"}, routing=NO_ROUTING)
    assert 'sgl_ext_request_seconds_count{path="/tokenize"} 1.0' in lines
    assert not any(line.startswith("sgl_ext_answers_without_usage_total") for line in lines)


def test_requests_are_counted_by_what_their_client_says() -> None:
    sub = ClientFacts("claude-code", request_class="subagent", agent_type="Explore")
    mine = ClientFacts("claude-code", agent_type="my-reviewer")
    timed = mine._replace(
        request_class="main",
        prev_tool_durations_ms=(("Bash", 2000), ("mcp__a__b", 30), ("mcp__c__d", 30), ("Mine", 1)),
    )
    lines = lines_for({"facts": sub}, {"facts": sub}, {"facts": mine}, {"facts": timed})
    name, claude = "sgl_ext_client_requests_total", 'harness="claude-code"'
    assert f'{name}{{agent="Explore",class="subagent",{claude}}} 2.0' in lines
    assert f'{name}{{agent="other",class="unstated",{claude}}} 1.0' in lines
    tokens = f'{{class="subagent",{claude}}}'
    assert f"sgl_ext_client_prompt_tokens_total{tokens} 200.0" in lines
    assert f"sgl_ext_client_cached_tokens_total{tokens} 180.0" in lines
    assert 'sgl_ext_client_tool_seconds_sum{tool="Bash"} 2.0' in lines
    assert 'sgl_ext_client_tool_seconds_count{tool="mcp"} 2.0' in lines
    assert 'sgl_ext_client_tool_seconds_count{tool="other"} 1.0' in lines


def test_tenants_are_counted_by_their_label() -> None:
    lines = lines_for({}, tenant="x", label={"x": "other"}.get)
    assert 'sgl_ext_tenant_prompt_tokens_total{tenant="other"} 100.0' in lines
    assert 'sgl_ext_tenant_cached_tokens_total{tenant="other"} 90.0' in lines
    assert 'sgl_ext_tenant_output_tokens_total{tenant="other"} 16.0' in lines
    assert 'sgl_ext_tenant_ttft_seconds_count{tenant="other"} 1.0' in lines
    assert not any('tenant="' in line for line in lines_for({}))
