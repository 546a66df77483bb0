"""Every path of an engine that the balancer knows, and what it does with it.

A path that is not here is answered 404: an engine's administration must not be
applied to one engine of many by accident.
"""

from __future__ import annotations

import os
from http import HTTPStatus
from typing import NamedTuple

from sgl_ext.protocols.errors import BalancerError

# One worker, chosen by the conversation's beginning. The body is JSON.
PLACED = (
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/embeddings",
    "/v1/classify",
    "/v1/score",
    "/v1/rerank",
    "/v1/decisions",
    "/v1/systemone",
    "/v1/tokenize",
    "/v1/detokenize",
    "/tokenize",
    "/detokenize",
    "/generate",
    "/encode",
    "/classify",
    "/api/chat",
    "/api/generate",
    "/api/show",
    "/invocations",
    os.environ.get("AIP_PREDICT_ROUTE", "/vertex_generate"),
    "/parse_function_call",
    "/separate_reasoning",
)

# One worker, that where the conversation's next turn will go: it computes it while it is idle.
WARMED = "/v1/prefill"

# What the balancer keeps for clients: it answers these itself.
CONTEXTS = "/v1/contexts"
RESPONSE = "/v1/responses/{response}"

# One worker, any: all answer alike. The body, if any, is not JSON.
ANY_GET = (
    "/v1/models",
    "/v1/models/{model}",
    "/model_info",
    "/get_model_info",
    "/server_info",
    "/get_server_info",
    "/api/tags",
)
ANY_POST = ("/v1/audio/transcriptions",)

# Every worker; the answer is each worker's own.
FANNED_OUT = (
    "/flush_cache",
    "/start_profile",
    "/stop_profile",
    "/abort_request",
    "/pause_generation",
    "/continue_generation",
    "/freeze_gc",
    "/set_trace_level",
    "/configure_logging",
    "/load_lora_adapter",
    "/unload_lora_adapter",
    "/update_weights_from_disk",
    "/release_memory_occupation",
    "/resume_memory_occupation",
)
FANNED_OUT_GET = ("/v1/loads",)


# Of the placed, what an engine answers without running it: any worker, whatever runs there.
NOT_RUN = {
    "/v1/messages/count_tokens",
    "/v1/tokenize",
    "/v1/detokenize",
    "/tokenize",
    "/detokenize",
    "/api/show",
    "/parse_function_call",
    "/separate_reasoning",
}


class Route(NamedTuple):
    """A path that goes to one worker.

    label: its pattern, so that ids are no metric labels.
    placed: whether its body decides where it goes.
    runs: whether that is the worker's scheduler's to run, and needs room there.
    warms: whether it is for a turn that has not come yet, and runs when nothing else does.
    """

    label: str
    placed: bool
    runs: bool = False
    warms: bool = False


_MODEL = "/v1/models/{model}"
_TO_ONE: dict[str, dict[str, Route]] = {
    **{path: {"POST": Route(path, placed=True, runs=path not in NOT_RUN)} for path in PLACED},
    WARMED: {"POST": Route(WARMED, placed=True, warms=True)},
    **{path: {"GET": Route(path, placed=False)} for path in ANY_GET},
    **{path: {"POST": Route(path, placed=False)} for path in ANY_POST},
}


def to_one(method: str, path: str) -> Route | None:
    """How a request goes to one worker; None if it does not.

    Raises BalancerError 405 for a method that the path does not have.
    """
    by_method = _TO_ONE.get(path) or _TO_ONE.get(_pattern(path))
    if by_method is None or (method, path) == ("DELETE", WARMED):
        return None
    route = by_method.get(method)
    if route is None:
        raise BalancerError(HTTPStatus.METHOD_NOT_ALLOWED, f"{method} {path}: Method Not Allowed")
    return route


def is_known_to_one(path: str) -> bool:
    """Whether requests of this path go to one worker."""
    return path in _TO_ONE or _pattern(path) in _TO_ONE


def _pattern(path: str) -> str:
    parent, _, model = path.rpartition("/")
    return _MODEL if parent == "/v1/models" and model else path


def label_of(path: str) -> str:
    """A path as a metric's label: itself or its pattern if it is known."""
    pattern = _pattern(path)
    return pattern if pattern in _KNOWN else "unknown"


_KNOWN = {
    "/",
    "/health",
    "/metrics",
    CONTEXTS,
    WARMED,
    *PLACED,
    *ANY_GET,
    *ANY_POST,
    *FANNED_OUT,
    *FANNED_OUT_GET,
}
