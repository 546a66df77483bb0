"""Why a request would go where it would."""

from typing import Any

from scheduler.placement import place, score_all
from sgl_ext.balancer.routing.attempts import RoutingRequest
from sgl_ext.balancer.routing.router import Router
from sgl_ext.balancer.routing.worker import DECODE


def explain(router: Router, routing: RoutingRequest) -> dict[str, Any]:
    """What this request would cost on each worker, and where it would go. Changes nothing."""
    now_s = router.clock()
    held = router.prefixes.lookup(routing.chain)
    candidates = router.candidates(routing, set())
    workers = [worker for worker in router.workers.all if worker.role != DECODE]
    views = {w: router.fleet.view(w, held.tokens, now_s) for w in workers}
    request = router.homes.request_of(routing, held)
    home = None if request.home is None else router.workers.find(request.home)
    compared = router.fleet.compared(candidates, held, home, lambda _: True, now_s)
    mean_sessions = router.fleet.mean_sessions
    placement = place(request, [views[w] for w in compared], mean_sessions)
    scores = score_all(request, [*views.values()], mean_sessions, is_new=request.home is None)
    return {
        "segments": len(routing.chain.hashes),
        "tools": routing.chain.tools,
        "prompt_tokens": routing.prompt_tokens,
        "session": routing.session_name,
        "home": request.home,
        "worker": None if placement is None else placement.worker,
        "reason": "no worker is open" if placement is None else placement.reason,
        "workers": [
            {
                **cost._asdict(),
                "open": worker.is_available,
                "has_room": candidates.has_capacity(worker, held),
                "held_tokens": view.held_tokens,
                "host_tokens": view.host_tokens,
                "shared_tokens": view.shared_tokens,
                "pinned_tokens": worker.pins.tokens_of(routing.chain.hashes),
                "live_session_tokens": view.session_tokens,
                "decoding_requests": view.decoding,
                "warmth": view.warmth,
                "prefill_weight": view.prefill_weight,
                "decode_weight": view.decode_weight,
            }
            for cost, (worker, view) in zip(scores, views.items(), strict=True)
        ],
    }
