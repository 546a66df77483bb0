"""Every engine path that the balancer knows, and how it routes requests to it.

A path that is not here is answered 404: a command to an engine's administration must not reach
one engine of many by accident.
"""

from typing import NamedTuple

from sgl_ext.protocols import registry
from sgl_ext.protocols.anthropic import ANTHROPIC
from sgl_ext.protocols.errors import method_not_allowed

# One worker, chosen by the prefix of the prompt. The body is JSON. All protocols' paths, and:
EMBEDDING = ("/v1/embeddings", "/v1/classify", "/encode", "/classify")
PARSING = ("/parse_function_call", "/separate_reasoning")
SYSTEM_ONE = "/v1/systemone"
TOKENIZING = ("/v1/tokenize", "/v1/detokenize", "/tokenize", "/detokenize")
PLACED = (
    *registry.PATHS,
    *EMBEDDING,
    *PARSING,
    *TOKENIZING,
    "/v1/score",
    "/v1/rerank",
    "/v1/decisions",
    SYSTEM_ONE,
    "/api/show",
)
# Of these paths, an engine answers without its scheduler: any worker will do, however busy.
NOT_RUN = {*registry.COUNTING_PATHS, *PARSING, *TOKENIZING, "/api/show"}

# A GET opens a WebSocket, whose messages are requests to the same path.
SOCKETS = registry.of_path("/v1/responses").paths

# One worker, the one where the conversation's next turn will go. It prefills while it is idle.
PREFILL = "/v1/prefill"

# The balancer stores these for clients, and answers such requests itself.
CONTEXTS = "/v1/contexts"
RESPONSE = "/v1/responses/{response}"

# What the model's chat template does.
TEMPLATE = "/sgl_ext/template"

# One worker, any: all give the same answer. The body, if any, is not JSON.
ANY_GET = (
    TEMPLATE,
    "/v1/models",
    "/v1/models/{model}",
    "/model_info",
    "/get_model_info",
    "/server_info",
    "/get_server_info",
    "/api/tags",
)
ANY_POST = ("/v1/audio/transcriptions",)

# The state of the whole balancer: once, and as a stream of events.
STATE = "/sgl_ext/state"
LIVE = "/sgl_ext/live"

# What Prometheus scrapes: this balancer's metrics, and those of every engine.
METRICS = ("/metrics", "/metrics/engines")

# The page that shows it; its files hold no data.
UI = "/sgl_ext/ui"

# Probes, whose answers are neither counted nor need a key.
HEALTH = ("/health", "/live", "/ready")

# Every worker; the answer contains each worker's own answer. An action is a POST: a GET is sent by
# any page that shows a picture.
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


class Route(NamedTuple):
    """How requests to a path reach one worker.

    label: the path's pattern, so that ids in paths do not become metric labels.
    method: the only HTTP method of such requests; with GET, HEAD is one, too.
    placed: the body decides the worker.
    runs: the worker's scheduler runs the request, so the worker needs capacity for it.
    warms: the request prepares a later one and runs only while the worker is idle.
    """

    label: str
    method: str = "POST"
    placed: bool = False
    runs: bool = False
    warms: bool = False


_BELOW_RESPONSES = "/v1/responses/"
_MODEL = "/v1/models/{model}"
_RESPONSE_ID = "resp_"
_SERVICES = ("compact", "input_tokens")
_TO_ONE = {
    **{path: Route(path, placed=True, runs=path not in NOT_RUN) for path in PLACED},
    PREFILL: Route(PREFILL, placed=True, warms=True),
    **{path: Route(path, "GET") for path in ANY_GET},
    **{path: Route(path) for path in ANY_POST},
}
_KNOWN = {"/", *HEALTH, *METRICS, CONTEXTS, *_TO_ONE, *FANNED_OUT, *FANNED_OUT_GET}


def to_one(method: str, path: str) -> Route | None:
    """How a request reaches one worker; None if it does not go to one worker.

    Raises BalancerError 405 for a method that the path does not have.
    """
    route = _TO_ONE.get(path) or _TO_ONE.get(_pattern(path))
    if route is None or (method, path) == ("DELETE", PREFILL):
        return None
    allowed = {"GET", "HEAD"} if route.method == "GET" else {route.method}
    if method not in allowed:
        raise method_not_allowed(method, path, allowed)
    return route


def not_found(method: str, path: str) -> str:
    """What to say of a path that is not served: if a client's base URL has made it of one that is,
    which base URL is meant."""
    said = f"{method} {path}: Not Found"
    meant = registry.path_meant(path)
    if meant == path:
        return said
    of_openai = registry.of_path(meant).errors is not ANTHROPIC.errors
    what = "address and /v1" if of_openai else "address alone"
    example = f"http://127.0.0.1:30000{'/v1' if of_openai else ''}"
    return f"{said}. {meant} is served: the client's base URL must be the {what}, as in {example}"


def is_service_beside_responses(path: str) -> bool:
    """Whether a path below that of responses is one of OpenAI's services, and no id."""
    return path.removeprefix(_BELOW_RESPONSES) in _SERVICES


def is_beside_responses(path: str) -> bool:
    """Whether a path below that of responses names a service, such as `compact`, and no id."""
    name = path.removeprefix(_BELOW_RESPONSES)
    return name != path and not name.startswith(_RESPONSE_ID)


def is_known_to_one(path: str) -> bool:
    """Whether requests to this path go to one worker."""
    return _pattern(path) in _TO_ONE


def is_page(path: str) -> bool:
    """Whether this is the page or one of its files."""
    return path == UI or path.startswith(f"{UI}/")


def label_of(path: str) -> str:
    """A path as a metric's label: itself or its pattern; "unknown" if it is not known."""
    pattern = _pattern(path)
    return pattern if pattern in _KNOWN else "unknown"


def _pattern(path: str) -> str:
    parent, _, model = path.rpartition("/")
    return _MODEL if parent == "/v1/models" and model else path
