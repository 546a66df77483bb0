"""Whether an answer is what the SDKs' own models read, and nothing else.

Strict: a value of another type is named, and a field that the models do not have, unless it is in
`OURS`. As a command, it looks at answers with the SDKs of the Python that runs it.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import Any

import anthropic
import anthropic.types.beta
import openai
import pydantic
from anthropic.types.beta_error_response import BetaErrorResponse
from openai.types.responses import Response, ResponseStreamEvent

_MESSAGES = "/v1/messages"
_COUNTS = "/v1/messages/count_tokens"
_WHOLE: dict[str, Any] = {
    _MESSAGES: anthropic.types.beta.BetaMessage,
    _COUNTS: anthropic.types.beta.BetaMessageTokensCount,
    "/v1/chat/completions": openai.types.chat.ChatCompletion,
    "/v1/completions": openai.types.Completion,
    "/v1/responses": Response,
}


class _PieceOfText(openai.types.CompletionChoice):
    finish_reason: str | None  # type: ignore[assignment]  # null until the end, as OpenAI sends it


class _CompletionPiece(openai.types.Completion):
    choices: list[_PieceOfText]  # type: ignore[assignment]


# OpenAI sends this code, on which Codex compacts; the SDK's list lacks it.
_TOO_LONG = b'"code":"context_length_exceeded"'
# Their errors are SGLang's, or those of several engines.
_OTHERS = {"/v1/pins", "/v1/systemone"}
_PIECES: dict[str, Any] = {
    _MESSAGES: anthropic.types.beta.BetaRawMessageStreamEvent,
    "/v1/chat/completions": openai.types.chat.ChatCompletionChunk,
    "/v1/completions": _CompletionPiece,
    "/v1/responses": ResponseStreamEvent,
}
_REASONS = product(("", "message."), ("block", "byte", "cause", "cache_missed_input_tokens"))
# Fields of ours and of SGLang's, and OpenAI's own that are newer than the SDK that SGLang asks for.
OURS: dict[str, set[str]] = {
    "/v1/messages": {
        *("usage.cache_creation", "usage.cache_creation.granted_ttl_s"),
        "message.usage.cache_creation.granted_ttl_s",
        *(f"{where}diagnostics.cache_miss_reason.{name}" for where, name in _REASONS),
    },
    "/v1/chat/completions": {
        *("choices.delta.reasoning_content", "choices.message.reasoning_content"),
        *("choices.matched_stop", "choices.message.tool_calls.index"),
        *("choices.prompt_token_ids", "choices.response_token_ids"),
        *("metadata", "usage.reasoning_tokens"),
        "usage.prompt_tokens_details.cache_write_tokens",
        "usage.prompt_tokens_details.granted_ttl_s",
    },
    "/v1/completions": {"choices.matched_stop", "metadata", "usage.reasoning_tokens"},
    "/v1/responses": {
        *("item.phase", "output.phase", "name", "store"),
        *("namespace", "item.namespace", "output.namespace"),
        *("tools.defer_loading", "tools.format", "tools.tools"),
        *("tools.parameters", "tools.strict"),
        "usage.input_tokens_details.cache_write_tokens",
        "usage.input_tokens_details.granted_ttl_s",
    },
}


class _OpenAIError(pydantic.BaseModel, extra="allow"):
    error: openai.types.ErrorObject


def problems(path: str, status: int, kind: str, body: bytes) -> list[str]:
    """Where an answer to `path` is not what its protocol's SDK reads.

    `kind` is the content type. Of a stream, every complete event is looked at.
    """
    if not path.startswith("/v1/") or path in _OTHERS or not body:
        return []
    is_anthropic = path.startswith(_MESSAGES)
    error = BetaErrorResponse if is_anthropic else _OpenAIError
    if status >= 400:
        return _differs(path, error, body)
    if not kind.startswith("text/event-stream"):
        model = _WHOLE.get(path)
        return _differs(path, model, body) if model else []
    found = []
    for data in re.findall(rb"^data: ?(\{.*\})\r?\n\r?\n", body, re.MULTILINE):
        data = data.replace(_TOO_LONG, b'"code":"invalid_prompt"')
        event = json.loads(data)
        is_error = isinstance(event.get("error"), dict) and event.get("type", "error") == "error"
        model = error if is_error else _PIECES.get(path)
        is_ping = is_anthropic and event.get("type") == "ping"
        found += _differs(path, model, data) if model and not is_ping else []
    return list(dict.fromkeys(found))


@cache
def _reader(model: Any) -> pydantic.TypeAdapter[Any]:
    return pydantic.TypeAdapter(model)


def _differs(path: str, model: Any, data: bytes) -> list[str]:
    try:
        read = _reader(model).validate_json(data, strict=True)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[:4]
        where = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in first]
        return [f"{path}: {'; '.join(where)}: {data[:600].decode(errors='replace')}"]
    names = {name.removeprefix("response.") for name in _unknown(read)} - OURS.get(path, set())
    return [f"{path}: unknown field {name}" for name in sorted(names)]


def _unknown(value: Any, prefix: str = "") -> Iterator[str]:
    """The fields that the models do not have, by their names from the top."""
    if isinstance(value, pydantic.BaseModel):
        for name, inner in {**value.__dict__, **(value.model_extra or {})}.items():
            if name in (value.model_extra or {}):
                yield f"{prefix}{name}"
            else:
                yield from _unknown(inner, f"{prefix}{name}.")
    elif isinstance(value, list):
        for inner in value:
            yield from _unknown(inner, prefix)


if __name__ == "__main__":
    for line in sys.stdin:
        path, status, kind, body = json.loads(line)
        for each in problems(path, status, kind, body.encode()):
            print(each)
