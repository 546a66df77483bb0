"""Where a request enters SGLang's HTTP process, and where it leaves for the scheduler.

read_body     its body passes here once: SGLang parses every JSON body in `ORJSONRequest.json`,
              before validation and before any protocol's conversion, so one hook serves all
send_hints    what was read of it goes with it
"""

import re
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from typing import Any

from sgl_ext.engine.core import hints
from sgl_ext.engine.core.counters import counter
from sgl_ext.engine.core.hints import is_slice
from sgl_ext.engine.core.request_context import (
    WHOLE_PROMPT,
    RequestContext,
    conversation_name,
    current,
    current_dry_run,
    enter,
    put_on,
)
from sgl_ext.engine.core.request_names import (
    check_adapters,
    group_of,
    isolate,
    name_after_id,
    name_request,
    request_id_of,
)
from sgl_ext.engine.http.extension import HttpExtension, installed
from sgl_ext.engine.http.translation import for_sglang
from sgl_ext.engine.sglang_http_types import TokenizerManager
from sgl_ext.protocols.prompt_cache import NO_HINTS, read_kv_hints
from sgl_ext.protocols.registry import of_path
from sgl_ext.reading.cache_marks import Marks, read_marks
from sgl_ext.reading.client import (
    AGENT_HINT_HEADER,
    ClientFacts,
    gives_cache_back,
    is_final,
    read_client,
    session_key,
    stated_lease_s,
    stated_session,
    with_agent_hint,
)
from sgl_ext.reading.compaction import Summary, asks_for_summary, with_tools
from sgl_ext.reading.hints import brief, limits_with, read_importance
from sgl_ext.reading.segments import (
    Chain,
    read_batch,
    read_chain,
    salt_of,
    with_sorted_schemas,
    with_sorted_tools,
)
from sgl_ext.reading.strip import Stripped, strip_request
from sgl_ext.wire.headers import (
    GROUP_HEADER,
    NO_DEFAULTS,
    QUEUED_HEADER,
    RANK_HEADER,
    WINDOW_HEADER,
    DefaultHints,
    read_bootstrap,
    read_defaults,
    read_purpose,
    read_seconds,
)

MAX_SEGMENTS = 16_384
_FIELD = re.compile(r"[\w.]+(?=: )")


async def read_body(original: Callable[[Any], Awaitable[Any]], request: Any) -> Any:
    """Around `ORJSONRequest.json`: the body for SGLang. Enters the request's context.

    Raises HTTPException if a hint of our own namespace is malformed.
    """
    if hasattr(request, "_json"):
        return request._json
    _reject_compressed(request)
    extension, path, raw_body = installed(), request.url.path, await request.body()
    body, stripped = _strip(extension, path, await original(request))
    facts = read_client(dict(request.scope["headers"]), stripped.fields)
    context = _read_context(extension, request, path, body, facts)
    if extension.settings.keep_tools:
        _keep_prompt(extension, dict(request.headers.items()), context)
    # It reads the whole body for a metric, so it waits until the request is with the scheduler.
    context.after_sending = partial(_count_left, extension, path, raw_body, stripped.headers)
    if not context.protocol.generates:
        context.run_after_sending()
    enter(context)
    put_on(request, context)
    body = for_sglang(request, context)
    if extension.message_cache is not None:
        body = extension.message_cache.recall(body, context)
    request._json = body
    return body


def _keep_prompt(
    extension: HttpExtension, headers: dict[str, str], context: RequestContext
) -> None:
    """Has a request for a summary keep the tools of the turn before; notes those of other turns."""
    protocol, body, name = context.protocol, context.body, conversation_name(context)
    if not isinstance(body, dict) or not protocol.generates or name is None:
        return
    tools, offered = body.get("tools"), extension.offered_tools
    before = [] if tools else offered.last(name)
    if asks_for_summary(context.facts, protocol, body, had_tools=bool(before)):
        context.summary = Summary(body, keeps_tools=bool(before))
        if before:
            context.body = with_tools(body, before)
            context.chain = read_chain(protocol, context.body, salt=salt_of(headers))
    elif isinstance(tools, list) and tools:
        offered.note(name, context.chain, tools)


def _reject_compressed(request: Any) -> None:
    """Raises HTTPException 415 for a body that SGLang would read as it was sent."""
    words = request.headers.get("content-encoding", "").split(",")
    coding = next((word for word in words if word.strip().lower() not in ("", "identity")), None)
    if coding is not None:
        from fastapi import HTTPException

        message = f"content-encoding: {coding.strip()!r} is read by the balancer, and by no engine"
        raise HTTPException(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, message)


def _strip(extension: HttpExtension, path: str, body: Any) -> tuple[Any, Stripped]:
    """The body without session headers, its tools in the order that the settings say, and what was
    stripped."""
    stripped = strip_request(of_path(path), body, extension.strip)
    if stripped.headers:
        counter("headers_stripped").labels(path).inc(stripped.headers)
    for kind, lines in stripped.moved.items():
        counter("volatile_lines").labels(path, kind).inc(lines)
    body = with_sorted_tools(stripped.body) if extension.settings.sort_tools else stripped.body
    if extension.settings.sort_schema_keys:
        body = with_sorted_schemas(body)
    return body, stripped


def _count_left(extension: HttpExtension, path: str, raw_body: bytes, stripped: int) -> None:
    left = extension.strip.mentions(raw_body) - stripped
    if left > 0:
        counter("headers_not_stripped").labels(path).inc(left)


def _read_context(
    extension: HttpExtension, request: Any, path: str, body: Any, facts: ClientFacts
) -> RequestContext:
    headers = dict(request.headers.items())  # of a repeated name the last, as in the balancer
    if AGENT_HINT_HEADER in headers:
        headers = with_agent_hint(headers)
    tenant = extension.tenants.of_headers(headers)
    defaults = _read_defaults(path, headers)
    ttl_limits = limits_with(defaults, extension.settings.ttl_limits)
    if gives_cache_back(facts, headers):
        ttl_limits = brief(ttl_limits)
    protocol = of_path(path)
    hints = NO_HINTS if protocol.marks is None else read_kv_hints(body)
    lease_s = stated_lease_s(headers) if hints.lease_s == 0 else hints.lease_s
    marks = read_marks(protocol, body, ttl_limits, lease_s)
    if hints.demotes and not marks.error:
        marks = Marks(keep=False, ignored=marks.ignored)
    importance = read_importance(headers, body, tenant.max_priority, defaults)
    for name, times in (
        ("cache_hints_ignored", marks.ignored),
        ("cache_ttls_clamped", marks.clamped_s > 0),
        ("priority_hints_ignored", importance.ignored),
        ("priority_clamped", importance.is_clamped),
    ):
        if times:
            counter(name).labels(path).inc(times)
    for kind, times in hints.counts.items():
        counter("kv_hints").labels(kind).inc(times)
    if hints.prefetches:
        importance = replace(importance, speculative_prefill=True)
    if error := marks.error or importance.error or hints.error:
        from fastapi import HTTPException

        field = _FIELD.match(error)
        param = None if field is None else field[0]
        raise HTTPException(HTTPStatus.BAD_REQUEST, {"message": error, "param": param})
    salt = salt_of(headers)
    chain, batch = read_chain(protocol, body, salt=salt), read_batch(protocol, body, salt=salt)
    if len(chain.hashes) + sum(len(each.hashes) for each in batch) > MAX_SEGMENTS:
        counter("long_chains_ignored").inc()
        chain, batch = Chain(), ()
    return RequestContext(
        path,
        body,
        chain,
        marks,
        importance,
        facts=facts,
        owner=tenant.name,
        group=headers.get(GROUP_HEADER),
        session=stated_session(headers, body) or "",
        request_id=request_id_of(request.scope),
        purpose=read_purpose(headers),
        queued_s=_read_seconds(path, headers, QUEUED_HEADER),
        window_s=_read_seconds(path, headers, WINDOW_HEADER),
        bootstrap=read_bootstrap(headers),
        rank=extension.rank_of(headers.get(RANK_HEADER)),
        is_last=is_final(headers),
        is_demoted=hints.demotes,
        pins=((WHOLE_PROMPT, marks.whole_ttl_s),) if marks.whole_ttl_s else (),
        conversation=session_key(headers, body, chain),
        dry_run=current_dry_run(),
        batch=batch,
    )


def _read_defaults(path: str, headers: dict[str, str]) -> DefaultHints:
    """The operator's default hints for the request, as its balancer states them."""
    try:
        return read_defaults(headers)
    except ValueError:  # a balancer of another version
        counter("default_hints_malformed").labels(path).inc()
        return NO_DEFAULTS


def _read_seconds(path: str, headers: dict[str, str], name: str) -> float:
    """What the balancer states of its queue; 0 if it is malformed."""
    seconds = read_seconds(headers, name)
    if seconds is None:
        counter("queued_headers_malformed").labels(path).inc()
        return 0.0
    return seconds


def send_hints(
    manager: TokenizerManager | None, request: Any, raw_request: Any = None, *_: Any, **__: Any
) -> None:
    """Before `TokenizerManager.generate_request`: isolates the request in its cache group and its
    tenant's names, names it by its id, sends it to its rank, sets its priority, and adds its hints.
    Ends a dry run.

    Of one HTTP request the first generation takes the hints: later ones (a tool loop inside the
    engine) have another prompt. `request` is one of several classes, embeddings among them.
    """
    context = current()
    if not is_slice(request):  # a slice has the name space of the request that it is a slice of
        isolate(request, group_of(context, raw_request))
    if context is None:
        return
    context.run_after_sending()
    if not is_slice(request):
        name_request(request, context)
        name_after_id(request, context)
        if manager is not None and manager.enable_lora:
            check_adapters(request, installed().tenants.of(context.owner))
    if context.rank is not None and hasattr(request, "routed_dp_rank"):
        if request.routed_dp_rank not in (None, context.rank):
            counter("translated_parts").labels(context.path, "routed_dp_rank").inc()
        request.routed_dp_rank = context.rank
    if context.bootstrap is not None and hasattr(request, "bootstrap_room"):
        _hand_over(request, *context.bootstrap)
    if context.dry_run is not None:
        context.dry_run.stop(request, context)
    next_turns = installed().next_turns
    if next_turns is not None and not context.are_hints_sent and not is_slice(request):
        next_turns.compare(context, request)
    if manager is not None and manager.enable_priority_scheduling and hasattr(request, "priority"):
        request.priority = context.importance.priority
    # The prompt of an SGLang session is longer than what the body says.
    if not hasattr(request, "kv_hints") or request.session_params is not None:
        return
    has_chain = bool(context.chain.hashes or context.batch)
    has_hints = has_chain or context.pins or context.owner or context.queued_s
    if context.are_hints_sent or not (has_hints or context.is_demoted):
        return
    context.are_hints_sent = True
    hints.attach(request, context)


def _hand_over(request: Any, host: str, port: int, room: int) -> None:
    """Has a prefill engine and a decode engine hand over the KV of a request. Raises ValueError,
    which is answered 400, for several samples: SGLang computes their prompt under the same room
    as their answers, and waits forever."""
    sampling = request.sampling_params
    first = sampling[0] if isinstance(sampling, list) and sampling else sampling
    if isinstance(first, dict) and first.get("n") not in (None, 1):
        raise ValueError("n: must be 1 with prefill and decode engines; send several requests")
    request.bootstrap_host, request.bootstrap_port, request.bootstrap_room = host, port, room
