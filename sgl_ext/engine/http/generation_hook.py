"""The generation hook: every request passes it on its way to the scheduler."""

from typing import Any

from sgl_ext.engine.core import hints
from sgl_ext.engine.core.counters import counter
from sgl_ext.engine.core.hints import is_slice
from sgl_ext.engine.core.request_context import current
from sgl_ext.engine.core.request_names import (
    check_adapters,
    group_of,
    isolate,
    name_after_id,
    name_request,
)
from sgl_ext.engine.http.extension import installed
from sgl_ext.engine.sglang_http_types import TokenizerManager


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
