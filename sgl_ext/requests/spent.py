"""What an answer cost: found in its bytes, whatever the protocol.

    chat, completions    "usage": {prompt_tokens, completion_tokens, prompt_tokens_details}
    responses            "usage": {input_tokens, output_tokens, input_tokens_details}
    messages             "usage": {input_tokens, output_tokens, cache_creation_input_tokens}, whose
                         `input_tokens` are without those; in a stream the first event has the
                         prompt's and a last one the answer's
    generate             "meta_info": {prompt_tokens, completion_tokens, cached_tokens}
    prefill ahead        "prefilled_tokens"

Text in an answer is not taken for these: a quotation mark in a JSON string is escaped.
"""

from __future__ import annotations

import json
import re
from typing import Any

_MOST_BYTES = 4096
_WHOLE = (b'"usage":', b'"meta_info":')
_PREFILLED = re.compile(rb'"prefilled_tokens":\s*(\d{1,12})')
_DECODER = json.JSONDecoder()


def spent_tokens(first: bytes, last: bytes) -> int | None:
    """Prompt tokens that were not read from the cache, and tokens answered with.

    first, last: the first events of a stream and its last; a whole answer is both. None if
    they do not tell.
    """
    begin, end = _usage(first), _usage(last)
    prompt = _prompt(begin)
    prompt = _prompt(end) if prompt is None else prompt
    if prompt is None:
        prefilled = _PREFILLED.search(last[-_MOST_BYTES:])
        return int(prefilled[1]) if prefilled else None
    return prompt + max(_answer(begin), _answer(end))


def _usage(data: bytes) -> dict[str, Any]:
    """The last object that counts tokens; empty if there is none."""
    for name in _WHOLE:
        at = data.rfind(name)
        while at >= 0:  # a tool may have a parameter of the name
            found = _decoded(data[at + len(name) :][:_MOST_BYTES])
            if isinstance(found, dict) and (_prompt(found) is not None or _answer(found)):
                return found
            at = data.rfind(name, 0, at)
    return {}


def _decoded(data: bytes) -> Any:
    try:
        return _DECODER.raw_decode(data.decode("utf-8", "replace").lstrip())[0]
    except ValueError:
        return None


def _prompt(usage: dict[str, Any]) -> int | None:
    for name in ("prompt_tokens", "input_tokens"):
        tokens = usage.get(name)
        if isinstance(tokens, int):
            details = usage.get(f"{name}_details")
            cached = details.get("cached_tokens") if isinstance(details, dict) else None
            cached = usage.get("cached_tokens") if cached is None else cached
            created = usage.get("cache_creation_input_tokens")
            return max(tokens - _number(cached), 0) + _number(created)
    return None


def _answer(usage: dict[str, Any]) -> int:
    return max(_number(usage.get("completion_tokens")), _number(usage.get("output_tokens")))


def _number(value: Any) -> int:
    return value if isinstance(value, int) else 0
