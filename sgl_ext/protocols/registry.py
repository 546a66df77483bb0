"""Every protocol that requests may speak, by URL path and by name."""

import os
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from sgl_ext.protocols.anthropic import ANTHROPIC, COUNT_TOKENS
from sgl_ext.protocols.chat import CHAT, OLLAMA_CHAT
from sgl_ext.protocols.errors import OPENAI_ERRORS
from sgl_ext.protocols.prompt_cache import NO_PARTS
from sgl_ext.protocols.responses import COUNT_RESPONSE, RESPONSES
from sgl_ext.reading.protocol import COMMENT, ErrorShape, MarkRules, Part, Protocol

# Raw prompts: OpenAI's completions, SGLang's own paths, and Ollama's and Vertex AI's.


def _raw(
    path: str,
    *prompt: tuple[Part, str],
    beat: bytes = b"",
    refused: Mapping[str, str] = MappingProxyType({}),
    formats: tuple[str, ...] = (),
) -> Protocol:
    return Protocol(
        paths=(path,),
        errors=OPENAI_ERRORS,
        beat=beat,
        prompt=prompt,
        marks=MarkRules(read_fields=NO_PARTS),
        refused=refused,
        formats=formats,
    )


_NO_SUFFIX = "write the model's own marks of a gap into the prompt"
COMPLETIONS = _raw(
    "/v1/completions",
    (Part.TEXT, "prompt"),
    beat=COMMENT,
    refused={"suffix": _NO_SUFFIX, "best_of": "send n, and choose"},
    formats=("response_format",),
)
GENERATE = _raw("/generate", (Part.TEXT, "text"), (Part.TEXT, "input_ids"), beat=COMMENT)
OLLAMA_GENERATE = _raw(
    "/api/generate",
    (Part.INSTRUCTIONS, "system"),
    (Part.TEXT, "prompt"),
    refused={
        "suffix": _NO_SUFFIX,
        "format": "use response_format of /v1/completions",
        "template": "write the whole prompt",
        "context": "write the whole prompt",
        "images": "use /v1/chat/completions",
    },
)
VERTEX = Protocol(
    paths=(os.environ.get("AIP_PREDICT_ROUTE", "/vertex_generate"),),
    errors=OPENAI_ERRORS,
    prompt=((Part.INSTANCES, "instances"),),
)
NATIVE = (COMPLETIONS, GENERATE, OLLAMA_GENERATE, VERTEX)

# In this order `detect` asks them whether a body is theirs.
PROTOCOLS = (RESPONSES, ANTHROPIC, CHAT, COUNT_TOKENS, COUNT_RESPONSE, OLLAMA_CHAT, *NATIVE)
UNKNOWN = Protocol(paths=(), errors=OPENAI_ERRORS, generates=False)
"""The protocol of every other path: it has no prompt, no marks and no turns."""


class _ByPath(dict[str, Protocol]):
    def __missing__(self, path: str) -> Protocol:
        return UNKNOWN


_BY_PATH = _ByPath({path: protocol for protocol in PROTOCOLS for path in protocol.paths})
of_path: Callable[[str], Protocol] = _BY_PATH.__getitem__
"""The protocol of requests to a URL path; UNKNOWN if it is none's."""
_MEANT = frozenset((*(path for path in _BY_PATH if path.startswith("/v1/")), "/v1/models"))
_BY_NAME = {protocol.name: protocol for protocol in PROTOCOLS if protocol.name}
PATHS = tuple(_BY_PATH)
GENERATING_PATHS = tuple(path for path, protocol in _BY_PATH.items() if protocol.generates)
COUNTING_PATHS = tuple(path for path in PATHS if path not in GENERATING_PATHS)


def errors_of(path: str) -> ErrorShape:
    """How errors on a path are worded; a path below a protocol's has that protocol's errors."""
    if (protocol := _BY_PATH.get(path)) is not None:
        return protocol.errors
    path = path_meant(path)
    below = (each for each in PROTOCOLS if f"{path}/".startswith(f"{each.paths[0]}/"))
    return next(below, UNKNOWN).errors


def path_meant(path: str) -> str:
    """The path of a protocol that a client means whose base URL has a slash or `/v1` too many or
    too few, or a prefix of another server's, such as `/anthropic`; the same path if there is none.
    """
    steps = [step for step in path.split("/") if step]
    last = max((at for at, step in enumerate(steps) if step == "v1"), default=-1)
    found = "/v1/" + "/".join(steps[last + 1 :])
    return found if found != path and found in _MEANT else path


def detect(headers: Mapping[str, str], stated: str | None, body: Any) -> Protocol | None:
    """The protocol that a body speaks; None if that is not certain. Never raises.

    A name in `nvext.protocol`, or else `stated`, decides, even if it is unknown. `headers` has
    lower-case names.
    """
    if not isinstance(body, dict):
        return None
    nvext = body.get("nvext")
    name = nvext.get("protocol") if isinstance(nvext, dict) else None
    name = stated or None if name is None else name
    if name is not None:
        return _BY_NAME.get(name) if isinstance(name, str) else None
    return next((each for each in PROTOCOLS if each.recognizes(headers, body)), None)


def with_name(protocol: Protocol, body: dict[str, Any]) -> dict[str, Any]:
    """A body that names its protocol itself; the same object if the protocol has no name."""
    nvext = body.get("nvext") or {}
    if not protocol.name or not isinstance(nvext, dict):
        return body
    return {**body, "nvext": {**nvext, "protocol": protocol.name}}
