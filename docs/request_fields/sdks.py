"""What the SDKs' types allow in a request, as JSON schemas.

As a program, for an SDK that is installed elsewhere: `PYTHON docs/request_fields/sdks.py openai`.
"""

import json
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

SDKS = {"anthropic": ("/v1/messages",), "openai": ("/v1/chat/completions", "/v1/responses")}
COMPLETIONS = "/v1/completions"
_TYPES = {
    COMPLETIONS: ("openai.types.completion_create_params", "CompletionCreateParamsStreaming"),
    "/v1/messages": ("anthropic.types.beta.message_create_params", "MessageCreateParamsStreaming"),
    "/v1/chat/completions": (
        "openai.types.chat.completion_create_params",
        "CompletionCreateParamsStreaming",
    ),
    "/v1/responses": (
        "openai.types.responses.response_create_params",
        "ResponseCreateParamsStreaming",
    ),
}


def read_sdk(name: str, paths: Sequence[str] = ()) -> dict[str, Any]:
    """The version of an SDK that is installed, and the schema of each path."""
    from pydantic import TypeAdapter

    schemas = {}
    for path in paths or SDKS[name]:
        module, kind = _TYPES[path]
        schemas[path] = TypeAdapter(getattr(import_module(module), kind)).json_schema()
    return {"version": import_module(name).__version__, "schemas": schemas}


if __name__ == "__main__":
    print(json.dumps(read_sdk(sys.argv[1])))
