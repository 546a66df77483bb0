"""What became of one request, in a line of JSON: the request log holds one for each.

    {"id", "trace", "time", "route", "status", "outcome", "error", "worker", "reason", "workers",
     "tenant", "harness", "client", "moved_lines", "model", "session", "prefix_hash", "tools_hash",
     "tools_count", "segments", "prompt_tokens", "predicted_tokens", "expected_tokens",
     "reported_tokens", "counted_tokens", "output_tokens", "queue_ms", "ttft_ms", "total_ms",
     "attempts", "divergence", "saved_bytes"}

`outcome` is one of `Outcome`. `workers` are those that it could have gone to at its last attempt,
the cheapest first, at most MOST_WORKERS of them, with their costs as `explain` shows them.
`predicted_tokens` counts the prompt tokens that the engine was known to have cached.
`expected_tokens` adds those that another request was still computing there. `reported_tokens`,
`counted_tokens` and `output_tokens` are the engine's own: read from its cache, in the whole
prompt, and generated. `prefix_hash` is
equal for prompts of a tenant and a model that have the same tools and instructions in the same
order, `tools_hash` for those with the same tools; both are null if there are none. `divergence`
is null unless the prompt diverges from an earlier one (docs/guide/doctor.md). `saved_bytes` is what
the client did not send because its request named what is stored.

`harness` and `client` are what the client says about itself (`requests/client_facts.py`).
`session` is the id that the client states, and after a slash that of its sub-agent, or a hash
(`requests/session.py`). Prefixes are hashes. No text of a prompt is written.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

import msgspec
import orjson

from scheduler.placement import PlacementRequest, WorkerView, score_all
from sgl_ext.balancer.reporting.diagnosis import PromptDiagnosis
from sgl_ext.balancer.routing.routing_request import RoutingRequest
from sgl_ext.balancer.routing.worker import Attempt
from sgl_ext.reading.client import NO_FACTS, ClientFacts
from sgl_ext.reading.usage import Usage

MOST_WORKERS = 8


class Outcome(StrEnum):
    """How a request ended."""

    COMPLETE = "complete"
    """An engine's answer was sent to its end, whatever its status."""
    REJECTED = "rejected"
    """The balancer answered an error before any engine had the request."""
    FAILED = "failed"
    """The balancer answered an error after an engine had the request."""
    CUT = "cut"
    """The stream ended in an error event."""
    DISCONNECTED = "disconnected"
    """The client left."""


class EndedRequest(msgspec.Struct, frozen=True, gc=False):
    """A request and its end. It holds no prompt, so that many can be remembered.

    trace: the id of its trace. time_s: when it ended.
    status: of the answer; None if none had begun. error: why it failed, None if it did not, or if
        the client's own words may be in it.
    considered: the workers at its last attempt; empty if it had none.
    """

    request_id: str
    trace: str
    route: str
    time_s: float
    status: int | None
    outcome: Outcome
    error: str | None
    usage: Usage | None
    worker: str | None
    reason: str | None
    considered: Sequence[WorkerView]
    tenant: str
    session: str | None
    prefix_hash: int | None
    tools_hash: int | None
    tools_count: int
    segments: int
    prompt_tokens: int
    predicted_tokens: int | None
    expected_tokens: int | None
    queued_s: float
    ttft_s: float
    total_s: float
    attempts: int
    diagnosis: PromptDiagnosis | None
    facts: ClientFacts = NO_FACTS
    saved_bytes: int = 0
    moved: Mapping[str, int] = {}


class Name(NamedTuple):
    """What a request is found by. trace: the id of its trace. route: as metrics name its path."""

    request_id: str
    trace: str
    route: str


class End(NamedTuple):
    """How a request ended. usage: as its answer states it. The rest is as of an `EndedRequest`."""

    time_s: float
    status: int | None
    outcome: Outcome
    error: str | None = None
    usage: Usage | None = None


class Course(NamedTuple):
    """How long a request took, and how often it was sent to a worker."""

    queued_s: float
    ttft_s: float
    total_s: float
    attempts: int


class Finding(NamedTuple):
    """What was found in a request when it was read."""

    diagnosis: PromptDiagnosis | None = None
    facts: ClientFacts = NO_FACTS
    saved_bytes: int = 0
    moved: Mapping[str, int] = {}


NOTHING_FOUND = Finding()


def ended_request(
    name: Name,
    end: End,
    course: Course,
    routing: RoutingRequest,
    attempt: Attempt | None = None,
    finding: Finding = NOTHING_FOUND,
) -> EndedRequest:
    """A request that has ended; `attempt` was its last."""
    worker = reason = predicted_tokens = expected_tokens = None
    considered: Sequence[WorkerView] = ()
    if attempt is not None:
        worker, reason, considered = attempt.worker.id, attempt.placement.reason, attempt.considered
        predicted_tokens, expected_tokens = attempt.predicted_tokens, attempt.expected_tokens
        if len(considered) > MOST_WORKERS:
            considered = _cheapest(considered, worker, routing.prompt_tokens, reason)
    chain = routing.chain
    hashes, head, tools = chain.hashes, chain.head_segments, chain.tool_segments
    return EndedRequest(
        name.request_id,
        name.trace,
        name.route,
        end.time_s,
        end.status,
        end.outcome,
        end.error,
        end.usage,
        worker,
        reason,
        considered,
        routing.tenant,
        routing.session_name,
        hashes[head - 1] if head else None,
        hashes[tools - 1] if tools else None,
        chain.tools,
        len(hashes),
        routing.prompt_tokens,
        predicted_tokens,
        expected_tokens,
        course.queued_s,
        course.ttft_s,
        course.total_s,
        course.attempts,
        finding.diagnosis,
        finding.facts,
        finding.saved_bytes,
        finding.moved,
    )


def start_of_line(request_id: str) -> bytes:
    """How the line of a request with this id begins."""
    return b'{"id":%b,' % orjson.dumps(request_id)


def as_line(ended: EndedRequest) -> bytes:
    """The line of a request."""
    found, known, usage = ended.diagnosis, ended.facts.known(), ended.usage
    record: dict[str, Any] = {
        "id": ended.request_id,
        "trace": ended.trace,
        "time": int(ended.time_s * 1e3) / 1e3,
        "route": ended.route,
        "status": ended.status,
        "outcome": ended.outcome,
        "error": ended.error,
        "worker": ended.worker,
        "reason": ended.reason,
        "workers": _rows(ended),
        "tenant": ended.tenant,
        "harness": ended.facts.harness,
        "client": {name: value for name, value in known.items() if name != "harness"},
        "moved_lines": ended.moved,
        "model": None if found is None else found.model,
        "session": ended.session,
        "prefix_hash": _hex(ended.prefix_hash),
        "tools_hash": _hex(ended.tools_hash),
        "tools_count": ended.tools_count,
        "segments": ended.segments,
        "prompt_tokens": ended.prompt_tokens,
        "predicted_tokens": ended.predicted_tokens,
        "expected_tokens": ended.expected_tokens,
        "reported_tokens": None if usage is None else usage.cached_tokens,
        "counted_tokens": None if usage is None else usage.prompt_tokens,
        "output_tokens": None if usage is None else usage.output_tokens,
        "queue_ms": int(ended.queued_s * 1e6) / 1e3,
        "ttft_ms": int(ended.ttft_s * 1e6) / 1e3,
        "total_ms": int(ended.total_s * 1e6) / 1e3,
        "attempts": ended.attempts,
        "divergence": None if found is None else found.divergence,
        "saved_bytes": ended.saved_bytes,
    }
    return orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE)


def _rows(ended: EndedRequest) -> list[dict[str, Any]]:
    """The workers that it could have gone to, the cheapest first. Where only some of them are
    listed, their sessions count against the mean of these."""
    request, is_new = PlacementRequest(ended.prompt_tokens, 0), _is_new(ended.reason)
    views = ended.considered
    scores = score_all(request, views, is_new=is_new)
    return [
        {
            "name": cost.name,
            "cost": round(cost.cost),
            "held_tokens": view.held_tokens,
            "host_tokens": view.host_tokens,
            "shared_tokens": view.shared_tokens,
            "pending": cost.pending,
            "uncached": cost.uncached,
            "loaded": round(cost.loaded),
            "decoding": cost.decoding,
            "recent": round(cost.recent),
            "sessions": round(cost.sessions),
            "prefill_weight": view.prefill_weight,
            "decode_weight": view.decode_weight,
        }
        for cost, view in sorted(zip(scores, views, strict=True), key=lambda each: each[0].cost)
    ]


def _cheapest(
    views: Sequence[WorkerView], chosen: str, prompt_tokens: int, reason: str
) -> Sequence[WorkerView]:
    """The chosen worker and the cheapest others."""
    request, is_new = PlacementRequest(prompt_tokens, 0), _is_new(reason)
    costs = {score.name: score.cost for score in score_all(request, views, is_new=is_new)}
    return sorted(views, key=lambda view: (view.name != chosen, costs[view.name]))[:MOST_WORKERS]


def _is_new(reason: str | None) -> bool:
    """Whether a placement for this reason counts the terms of a session's first request."""
    return reason in ("new", "lost")


def _hex(number: int | None) -> str | None:
    return None if number is None else f"{number:032x}"
