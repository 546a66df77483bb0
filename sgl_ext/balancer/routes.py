"""Every path of an engine that the balancer knows, and what it does with it.

A path that is not here is answered 404: an engine's administration must not be
applied to one engine of many by accident.
"""

from __future__ import annotations

import os

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

# The worker that has it: asked in turn until one knows.
SOUGHT_GET = ("/v1/responses/{response}",)
SOUGHT_POST = ("/v1/responses/{response}/cancel",)

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
